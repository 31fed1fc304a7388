"""The state digest: two 64-bit lanes that add up over elements, blocks and ranks."""

import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deltasync.errors import FormatError
from deltasync.format.layout import Layout

_LANE_MASK = (1 << 64) - 1
_HEX = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class StateDigest:
    """A digest, or a difference of two; lanes add and subtract modulo 2^64."""

    lane0: int
    lane1: int

    ZERO: ClassVar["StateDigest"]

    @classmethod
    def of(cls, lanes: tuple[int, int]) -> "StateDigest":
        """From sums of lanes, reduced modulo 2^64."""
        return cls(lanes[0] & _LANE_MASK, lanes[1] & _LANE_MASK)

    @classmethod
    def from_hex(cls, text: object) -> "StateDigest":
        """The inverse of `hex`; FormatError on anything but 32 lower-case hex digits."""
        if not isinstance(text, str) or _HEX.fullmatch(text) is None:
            raise FormatError(f"a state digest must be 32 lower-case hex digits, not {text!r:.80}", rule="digest.hex")
        return cls(int(text[:16], 16), int(text[16:], 16))

    @property
    def hex(self) -> str:
        """Lane 0, then lane 1, 16 digits each."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    def __add__(self, other: "StateDigest") -> "StateDigest":
        return StateDigest.of((self.lane0 + other.lane0, self.lane1 + other.lane1))

    def __sub__(self, other: "StateDigest") -> "StateDigest":
        return StateDigest.of((self.lane0 - other.lane0, self.lane1 - other.lane1))

    def __str__(self) -> str:
        return self.hex


StateDigest.ZERO = StateDigest(0, 0)


def layout_digest(layout: Layout) -> StateDigest:
    """The digest of a state whose bits are all zero: it binds names, types and shapes, even of empty tensors."""
    # Sums of 64-bit numbers wrap around, as lanes do.
    lane0, lane1 = layout.seeds.sum(axis=0, dtype=np.uint64).tolist()
    return StateDigest(lane0, lane1)
