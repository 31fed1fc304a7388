"""The native kernels, seen from Python.

Importing this module raises ImportError where they were not built, and RuntimeError where they were built from other
sources than the Python code beside them: they would then write other bytes than the reference.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import DType
from deltasync.format.weights import Bits, Buffer, Positions, Region
from deltasync.kernels import _native, rans, reference

Lanes = tuple[int, int]

CONSTANTS = {
    "block_elements_max": limits.BLOCK_ELEMENTS_MAX,
    "classes_max": limits.CLASSES_MAX,
    "lanes_log2_max": limits.LANES_LOG2_MAX,
    "varint_bytes_max": rans.VARINT_BYTES_MAX,
    "precision": rans.PRECISION,
    "state_min": rans.STATE_MIN,
    "exact": rans.EXACT,
    "buckets_max": rans.BUCKETS_MAX,
    "columns": reference.COLUMNS,
    "classes_wanted": reference.CLASSES_WANTED,
    "class_cost_bits": reference.CLASS_COST_BITS,
    "elements_all_below": reference.ELEMENTS_ALL_BELOW,
    "changes_all_below": reference.CHANGES_ALL_BELOW,
    "sample_run": reference.SAMPLE_RUN,
    "sample_scale": reference.SAMPLE_SCALE,
    "step_bits_wide": reference.STEP_BITS_WIDE,
}
"""The numbers that exist here and in native/constants.hpp, by the name under which C++ exports them."""


def require_same_constants(built: Mapping[str, int]) -> None:
    """RuntimeError unless the constants that C++ exports are those of the Python code."""
    names = sorted(CONSTANTS.keys() | built.keys())
    wrong = [
        f"{name} is {built.get(name, 'missing')} and must be {CONSTANTS.get(name, 'absent')}"
        for name in names
        if built.get(name) != CONSTANTS.get(name)
    ]
    if wrong:
        raise RuntimeError(
            "the native kernels were built from other sources than deltasync's Python code: "
            f"{'; '.join(wrong)}. Reinstall deltasync to rebuild them"
        )


# A build from before there were constants has none.
require_same_constants(getattr(_native, "CONSTANTS", {}))


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this build and this machine have, best first."""
    return list(_native.instruction_sets())


class NativeKernels:
    """The C++ core on one instruction set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def detect(self, old: Region, new: Region, start: int, *, cell: int, enough: int) -> tuple[Positions, Bits, int]:
        positions, values, stop = _native.detect(self.name, _region(old), _region(new), start, cell, enough)
        return positions, values.view(old.dtype.bits_dtype), stop

    def detect_rounded(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int, nan: int
    ) -> tuple[Positions, Bits, int]:
        before, after = _region(old), _region(new)
        positions, values, stop = _native.detect_rounded(self.name, before, after, start, cell, enough, nan)
        return positions, values.view(old.dtype.bits_dtype), stop

    def encode_changes(self, old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes, Lanes]:
        with _translated():
            return _native.encode_changes(self.name, _region(old), _aligned(positions), _aligned(values))

    def encode_difference(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int
    ) -> tuple[int, int, bool, bytes, Lanes]:
        return _native.encode_difference(self.name, _region(old), _region(new), start, cell, enough)

    def decode_changes(self, old: Region, data: Buffer, *, absolute: bool) -> tuple[Positions, Bits, Lanes]:
        with _translated():
            positions, values, lanes = _native.decode_changes(self.name, _region(old), data, absolute)
        return positions, values.view(old.dtype.bits_dtype), lanes

    def encode_planes(self, region: Region) -> bytes:
        return _native.encode_planes(self.name, _region(region))

    def decode_planes(self, data: Buffer, elements: int, dtype: DType) -> Bits:
        with _translated():
            kind = _native.Kind(dtype.width, dtype.exponent_shift, dtype.exponent_mask)
            return _native.decode_planes(self.name, kind, data, elements).view(dtype.bits_dtype)

    def decode_planes_into(self, data: Buffer, target: Region) -> Lanes:
        with _translated():
            return _native.decode_planes_into(self.name, data, _writable(target), _region(target))

    def digest(self, region: Region) -> Lanes:
        return _native.digest(self.name, _region(region))

    def digest_change(self, old: Region, positions: Positions, values: Bits) -> Lanes:
        with _translated():
            return _native.digest_change(_region(old), _aligned(positions), _aligned(values))

    def overwrite(self, target: Region, positions: Positions, values: Bits) -> None:
        with _translated():
            _native.overwrite(_writable(target), _aligned(positions), _aligned(values))


def _region(region: Region) -> _native.Region:
    kind = _native.Kind(region.dtype.width, region.dtype.exponent_shift, region.dtype.exponent_mask)
    runs, keys = np.ascontiguousarray(region.runs), np.ascontiguousarray(region.keys)
    return _native.Region(kind, region.arrays, runs, keys)


def _writable(region: Region) -> _native.WritableRegion:
    region.require_writable()
    kind = _native.Kind(region.dtype.width, region.dtype.exponent_shift, region.dtype.exponent_mask)
    return _native.WritableRegion(kind, region.arrays, np.ascontiguousarray(region.runs))


def _aligned(array: Bits) -> Bits:
    return np.require(array, requirements=("C", "A"))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except _native.Corrupt as e:
        raise CorruptError(e.args[1], rule=e.args[0]) from None
    except _native.Invalid as e:
        raise InvalidInputError(e.args[1], rule=e.args[0]) from None
