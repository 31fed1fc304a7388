"""Element types: how wide one is, and where its exponent sits. Names are those of safetensors."""

from dataclasses import dataclass

import numpy as np

from deltasync.errors import FormatError


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
    found = DTYPES.get(name)
    if found is None:
        raise FormatError(f"element type {name!r} is not supported", rule="dtype", hint=f"known: {', '.join(DTYPES)}")
    return found


def dtype_of(array: np.ndarray) -> DType:
    """The element type of a NumPy array; ml_dtypes' bfloat16 and float8 types are known by their names."""
    name = _NUMPY_NAMES.get(array.dtype.name)
    if name is None:
        raise FormatError(f"NumPy type {array.dtype.name!r} is not supported", rule="dtype")
    return DTYPES[name]
