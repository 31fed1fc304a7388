"""Element types, and the layout of a model: the ordered list of (name, dtype, shape)."""

import hashlib
import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.errors import FormatError, MismatchError
from deltasync.format import limits
from deltasync.format.sealed import canonical_json


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. `exponent_mask` is 0 for types that are coded as plain integers."""

    name: str
    width: int
    exponent_shift: int = 0
    exponent_mask: int = 0

    @property
    def is_float(self) -> bool:
        return self.exponent_mask != 0

    @property
    def bits_dtype(self) -> np.dtype[np.unsignedinteger]:
        """The NumPy type that holds the raw bits of one element."""
        return np.dtype(f"<u{self.width}")


# 8-byte floats are rare in checkpoints and have 11-bit exponents: they are coded as integers.
DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("BF16", 2, 7, 0xFF),
        DType("F16", 2, 10, 0x1F),
        DType("F32", 4, 23, 0xFF),
        DType("F8_E4M3", 1, 3, 0x0F),
        DType("F8_E5M2", 1, 2, 0x1F),
        DType("F8_E8M0", 1),
        DType("BOOL", 1),
        DType("U8", 1),
        DType("I8", 1),
        DType("U16", 2),
        DType("I16", 2),
        DType("U32", 4),
        DType("I32", 4),
        DType("U64", 8),
        DType("I64", 8),
        DType("F64", 8),
    )
}

_NUMPY_NAMES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bool": "BOOL",
    **{f"{kind}{bits}": f"{kind[0].upper()}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)},
}


def dtype_named(name: str) -> DType:
    """The element type with this safetensors name; FormatError if there is none."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise FormatError(
            f"the element type {name!r:.80} is not supported", rule="dtype", hint=f"supported: {', '.join(DTYPES)}"
        )
    return dtype


def dtype_of(array: np.ndarray) -> DType:
    """The element type of a NumPy array, also of the bfloat16 and float8 types of ml_dtypes."""
    name = _NUMPY_NAMES.get(array.dtype.name)
    if name is None:
        supported = ", ".join(_NUMPY_NAMES)
        raise FormatError(
            f"the NumPy type {array.dtype.name!r} is not supported", rule="dtype", hint=f"supported: {supported}"
        )
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, element type and shape of one tensor, in Hugging Face checkpoint coordinates."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.width

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype.name}{list(self.shape)}"


def tensor_seed(spec: TensorSpec) -> tuple[int, int]:
    """Two 64-bit numbers that stand for a tensor in the state digest: they bind its name, type and shape."""
    text = f"{spec.name}\0{spec.dtype.name}\0{','.join(map(str, spec.shape))}"
    hashed = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(hashed[:8], "little"), int.from_bytes(hashed[8:16], "little")


@dataclass(frozen=True)
class Layout:
    """All tensors of a model, ascending by name (UTF-8 bytes), so that every side agrees on the order."""

    tensors: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, tensors: Iterable[TensorSpec]) -> "Layout":
        """Sort the tensors; FormatError for duplicates and for tensors outside the limits."""
        ordered = tuple(sorted(tensors, key=lambda t: t.name.encode()))
        if len(ordered) > limits.TENSORS_MAX:
            raise FormatError(
                f"the layout has {len(ordered)} tensors; at most {limits.TENSORS_MAX} are allowed", rule="layout.count"
            )
        for i, spec in enumerate(ordered):
            name_bytes = len(spec.name.encode())
            if not 0 < name_bytes <= limits.NAME_BYTES_MAX:
                raise FormatError(
                    f"a tensor name has {name_bytes} bytes; it must have 1 to {limits.NAME_BYTES_MAX}",
                    rule="layout.name",
                )
            if len(spec.shape) > limits.DIMENSIONS_MAX:
                raise FormatError(
                    f"tensor {spec.name!r:.200} has {len(spec.shape)} dimensions; at most {limits.DIMENSIONS_MAX} are "
                    "allowed",
                    rule="layout.dimensions",
                )
            if max(spec.elements, *spec.shape, 0) > limits.ELEMENTS_MAX:
                raise FormatError(
                    f"tensor {spec.name!r:.200} has more than {limits.ELEMENTS_MAX} elements, the most that are "
                    "allowed",
                    rule="layout.elements",
                )
            if i and ordered[i - 1].name == spec.name:
                raise FormatError(f"the layout has the tensor {spec.name!r:.200} twice", rule="layout.duplicate")
        return cls(ordered)

    @classmethod
    def from_json(cls, value: Any) -> "Layout":
        """The inverse of `to_json`; FormatError on anything else."""
        if not isinstance(value, list):
            raise FormatError("the layout must be a list", rule="layout.type")
        specs = [_spec_from_json(item) for item in value]
        layout = cls.of(specs)
        if list(layout.tensors) != specs:
            raise FormatError("the layout must be sorted by name", rule="layout.order")
        return layout

    def to_json(self) -> list[Any]:
        """What `from_json` reads; not to be changed."""
        return self._json

    @cached_property
    def _json(self) -> list[Any]:
        return [[t.name, t.dtype.name, list(t.shape)] for t in self.tensors]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON of the layout, in hex: its identity."""
        return hashlib.sha256(canonical_json(self._json)).hexdigest()

    @cached_property
    def index_bytes(self) -> int:
        """What the layout takes in the index of each payload."""
        return len(zlib.compress(canonical_json(self._json)))

    @cached_property
    def ordinals(self) -> dict[str, int]:
        return {t.name: i for i, t in enumerate(self.tensors)}

    @cached_property
    def seeds(self) -> NDArray[np.uint64]:
        """`tensor_seed` of each tensor, one row each."""
        return np.array([tensor_seed(t) for t in self.tensors], np.uint64).reshape(-1, 2)

    @cached_property
    def elements(self) -> int:
        return sum([t.elements for t in self.tensors])

    @cached_property
    def nbytes(self) -> int:
        return sum([t.nbytes for t in self.tensors])

    def require_equal(self, other: "Layout", *, ours: str, theirs: str) -> None:
        """MismatchError that names the first tensor that differs, and both sides."""
        if self.tensors == other.tensors:
            return
        mine = {t.name: t for t in self.tensors}
        others = {t.name: t for t in other.tensors}
        for name in sorted(mine.keys() | others.keys(), key=str.encode):
            a, b = mine.get(name), others.get(name)
            if a == b:
                continue
            message = " but ".join(
                f"{spec} in {side}" if spec is not None else f"not in {side}" for spec, side in ((a, ours), (b, theirs))
            )
            raise MismatchError(
                f"tensor {name!r} differs: {message}",
                rule="layout.differs",
                hint="a delta joins two states of one layout; check that both are the same model",
            )


def _spec_from_json(item: Any) -> TensorSpec:
    match item:
        case [str(name), str(dtype), list(shape)] if all(type(d) is int and d >= 0 for d in shape):
            return TensorSpec(name, dtype_named(dtype), tuple(shape))
    raise FormatError(f"an entry of the layout must be [name, dtype, shape], not {item!r:.200}", rule="layout.entry")
