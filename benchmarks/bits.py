"""Bit views of the element types: exponents, the monotone order, and steps in units in the last place."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Bits = NDArray[np.unsignedinteger[Any]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ElementType:
    """How the bits of one element are split; `exponent_bits` is 0 for integers."""

    name: str
    width: int
    exponent_bits: int
    mantissa_bits: int

    @property
    def is_float(self) -> bool:
        """Whether the type has an exponent to condition on."""
        return self.exponent_bits > 0

    @property
    def exponents(self) -> int:
        """The number of values that the exponent field can take; integers have one class."""
        return 1 << self.exponent_bits


# Named as in the header of a safetensors file.
ELEMENT_TYPES: dict[str, ElementType] = {
    kind.name: kind
    for kind in (
        ElementType("BF16", 2, 8, 7),
        ElementType("F16", 2, 5, 10),
        ElementType("F32", 4, 8, 23),
        ElementType("F8_E4M3", 1, 4, 3),
        ElementType("F8_E5M2", 1, 5, 2),
        ElementType("I8", 1, 0, 0),
        ElementType("U8", 1, 0, 0),
    )
}


def exponents(bits: Bits, kind: ElementType) -> NDArray[np.uint8]:
    """Return the exponent field of every element; all zero for integers."""
    if not kind.is_float:
        return np.zeros(bits.shape, np.uint8)
    shifted = bits >> bits.dtype.type(kind.mantissa_bits)
    return (shifted & bits.dtype.type(kind.exponents - 1)).astype(np.uint8)


def monotone(bits: Bits) -> NDArray[np.int64]:
    """Map float bits to integers in the order of the numbers: flip all bits if negative, otherwise the sign."""
    top = bits.dtype.itemsize * 8 - 1
    sign = bits.dtype.type(1 << top)
    ones = bits.dtype.type((1 << (top + 1)) - 1)
    return (bits ^ np.where(bits & sign, ones, sign)).astype(np.int64)


def steps(old: Bits, new: Bits, kind: ElementType) -> NDArray[np.int64]:
    """Return the signed step from old to new: in the monotone order for floats, modular for integers."""
    if kind.is_float:
        return monotone(new) - monotone(old)
    signed = np.dtype(f"i{old.dtype.itemsize}")
    return (new - old).view(signed).astype(np.int64)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Cast finite float32 values to bfloat16 bits, to the nearest, ties to even, in integer arithmetic."""
    wide = values.view(np.uint32)
    tie = (wide >> np.uint32(16)) & np.uint32(1)
    return ((wide + np.uint32(0x7FFF) + tie) >> np.uint32(16)).astype(np.uint16)
