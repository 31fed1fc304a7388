"""The native kernels, seen from Python. Importing this fails where they were not built."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from deltasync.errors import CorruptError, InvalidInputError
from deltasync.format.layout import DTYPES, DType
from deltasync.format.weights import Bits, Positions, Region
from deltasync.kernels import _native

Lanes = tuple[int, int]


def instruction_sets() -> list[str]:
    """Names of the instruction sets that this build and this machine have, best first."""
    return list(_native.instruction_sets())


class NativeKernels:
    """The C++ core on one instruction set."""

    def __init__(self, name: str) -> None:
        self.name = name

    def detect(self, old: Region, new: Region, start: int, *, cell: int, enough: int) -> tuple[Positions, Bits, int]:
        kind = _kind(old.dtype)
        positions, values, stop = _native.detect(self.name, kind, _region(old), _region(new), start, cell, enough)
        return positions, values.view(old.dtype.bits_dtype), stop

    def detect_rounded(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int, nan: int
    ) -> tuple[Positions, Bits, int]:
        before, after = _region(old, DTYPES["BF16"]), _region(new, DTYPES["F32"])
        positions, values, stop = _native.detect_rounded(self.name, before, after, start, cell, enough, nan)
        return positions, values.view(old.dtype.bits_dtype), stop

    def encode_changes(self, old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes, Lanes]:
        with _translated():
            absolute, data, lanes = _native.encode_changes(
                self.name, _kind(old.dtype), _region(old), _aligned(positions), _aligned(values)
            )
        return absolute, data, lanes

    def encode_difference(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int
    ) -> tuple[int, int, bool, bytes, Lanes]:
        kind = _kind(old.dtype)
        return _native.encode_difference(self.name, kind, _region(old), _region(new), start, cell, enough)

    def decode_changes(self, old: Region, data: bytes, *, absolute: bool) -> tuple[Positions, Bits, Lanes]:
        with _translated():
            positions, values, lanes = _native.decode_changes(self.name, _kind(old.dtype), _region(old), data, absolute)
        return positions, values.view(old.dtype.bits_dtype), lanes

    def encode_planes(self, region: Region) -> bytes:
        return _native.encode_planes(_kind(region.dtype), _region(region))

    def decode_planes(self, data: bytes, elements: int, dtype: DType) -> Bits:
        with _translated():
            return _native.decode_planes(_kind(dtype), data, elements).view(dtype.bits_dtype)

    def digest(self, region: Region) -> Lanes:
        return _native.digest(self.name, _kind(region.dtype), _region(region))

    def digest_change(self, old: Region, positions: Positions, values: Bits) -> Lanes:
        with _translated():
            return _native.digest_change(_kind(old.dtype), _region(old), _aligned(positions), _aligned(values))

    def overwrite(self, target: Region, positions: Positions, values: Bits) -> None:
        if not all(array.flags.writeable for array in target.arrays):
            raise InvalidInputError("the arrays to overwrite are read-only")
        with _translated():
            _native.overwrite(_kind(target.dtype), _region(target), _aligned(positions), _aligned(values))


def _kind(dtype: DType) -> _native.Kind:
    return _native.Kind(dtype.width, dtype.exponent_shift, dtype.exponent_mask)


def _region(region: Region, dtype: DType | None = None) -> _native.Region:
    """A region whose elements must have the type, if one is given: the kernel then relies on their width."""
    return _native.Region(
        _kind(region.dtype if dtype is None else dtype),
        region.arrays,
        np.ascontiguousarray(region.runs),
        np.ascontiguousarray(region.keys),
    )


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
