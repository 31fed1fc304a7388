"""A pair of states, old and new, as raw bits; and its cut into blocks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from benchmarks.bits import ELEMENT_TYPES, Bits, ElementType


@dataclass(frozen=True, slots=True)
class Pair:
    """Two states of one layout: the tensors of `old` and `new` have the same names, shapes and width."""

    name: str
    kind: ElementType
    old: Mapping[str, Bits]
    new: Mapping[str, Bits]

    @property
    def elements(self) -> int:
        """Elements in one state."""
        return sum(bits.size for bits in self.old.values())

    @property
    def nbytes(self) -> int:
        """Bytes of one state."""
        return self.elements * self.kind.width

    def tensors(self) -> Iterator[tuple[Bits, Bits]]:
        """Yield old and new of each tensor, flat, in the order of the layout."""
        for name, old in self.old.items():
            yield old.reshape(-1), self.new[name].reshape(-1)


def make_pair(name: str, dtype: str, old: Mapping[str, Bits], new: Mapping[str, Bits]) -> Pair:
    """Pair two states of one layout, checked; `dtype` is a safetensors name such as `BF16`."""
    if list(old) != list(new):
        raise ValueError(f"{name}: the tensors of the two states differ")
    for tensor, bits in old.items():
        if bits.shape != new[tensor].shape or bits.dtype != new[tensor].dtype:
            raise ValueError(f"{name}: {tensor} differs in shape or type between the two states")
    return Pair(name=name, kind=ELEMENT_TYPES[dtype], old=old, new=new)


def blocks(pair: Pair, *, elements: int = 1 << 24) -> Iterator[tuple[Bits, Bits]]:
    """Yield runs of `elements` over the concatenated tensors: small tensors pool, large ones are cut."""
    held_old: list[Bits] = []
    held_new: list[Bits] = []
    room = elements
    for old, new in pair.tensors():
        start = 0
        while start < old.size:
            stop = min(old.size, start + room)
            held_old.append(old[start:stop])
            held_new.append(new[start:stop])
            room -= stop - start
            start = stop
            if room == 0:
                yield np.concatenate(held_old), np.concatenate(held_new)
                held_old, held_new, room = [], [], elements
    if held_old:
        yield np.concatenate(held_old), np.concatenate(held_new)
