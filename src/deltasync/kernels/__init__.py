"""The hot loops, and which implementation runs: the native kernels where they were built, otherwise NumPy."""

import os
import warnings
from functools import cache
from typing import Protocol

from deltasync.errors import InvalidInputError
from deltasync.format.layout import DType
from deltasync.format.weights import Bits, Buffer, Positions, Region

Lanes = tuple[int, int]
"""The two lanes of a state digest, or of a difference of two."""

VARIABLE = "DELTASYNC_KERNELS"
"""Environment variable that forces a set of kernels by name; for tests and bug reports."""


class Kernels(Protocol):
    """The hot loops. reference.py says what each does; the native ones give the same results."""

    name: str

    def detect(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int
    ) -> tuple[Positions, Bits, int]: ...
    def detect_rounded(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int, nan: int
    ) -> tuple[Positions, Bits, int]: ...
    def encode_changes(self, old: Region, positions: Positions, values: Bits) -> tuple[bool, bytes, Lanes]: ...
    def encode_difference(
        self, old: Region, new: Region, start: int, *, cell: int, enough: int
    ) -> tuple[int, int, bool, bytes, Lanes]: ...
    def decode_changes(self, old: Region, data: Buffer, *, absolute: bool) -> tuple[Positions, Bits, Lanes]: ...
    def encode_planes(self, region: Region) -> bytes: ...
    def decode_planes(self, data: Buffer, elements: int, dtype: DType) -> Bits: ...
    def decode_planes_into(self, data: Buffer, target: Region) -> Lanes: ...
    def digest(self, region: Region) -> Lanes: ...
    def digest_change(self, old: Region, positions: Positions, values: Bits) -> Lanes: ...
    def overwrite(self, target: Region, positions: Positions, values: Bits) -> None: ...


def available() -> list[str]:
    """Names of the kernels that can run here, best first."""
    try:
        from deltasync.kernels import native
    except ImportError:
        return ["reference"]
    return [*native.instruction_sets(), "reference"]


@cache
def load(name: str) -> Kernels:
    """The kernels of that name; InvalidInputError if this machine or this build has none."""
    if name not in available():
        raise InvalidInputError(
            f"there are no kernels {name!r:.80} in this build or on this machine",
            hint=f"available: {', '.join(available())}",
        )
    if name == "reference":
        from deltasync.kernels import reference

        return reference
    from deltasync.kernels.native import NativeKernels

    return NativeKernels(name)


@cache
def kernels() -> Kernels:
    """The kernels of this process: the best ones, or those that DELTASYNC_KERNELS names."""
    wanted = os.environ.get(VARIABLE)
    if wanted is not None:
        return load(wanted)
    best = available()[0]
    if best == "reference":
        warnings.warn(
            "deltasync was built without its native kernels and runs on NumPy, many times slower; "
            "install a C++20 compiler and reinstall deltasync",
            RuntimeWarning,
            stacklevel=3,
        )
    return load(best)
