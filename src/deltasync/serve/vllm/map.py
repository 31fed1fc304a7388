"""The map of a whole engine: where each element of the checkpoint lies in each of its workers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from deltasync.errors import MismatchError
from deltasync.format.changes import Changes, tensor_parts
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.weights import Bits
from deltasync.serve.vllm.copies import Copy, Indices, is_covered
from deltasync.serve.vllm.stagefile import Segment, segments
from deltasync.trainer.tensors import bits_dtype, torch_dtype


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker told of itself: its copies by tensor, and the element type of each of its storages."""

    copies: Mapping[str, Sequence[Copy]]
    errors: Mapping[str, str]
    computed: Sequence[str]
    unfilled: Sequence[str]
    types: Sequence[torch.dtype]

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "Rank":
        """What `RuntimeWeights.describe` gave."""
        return cls(
            {name: [Copy.from_json(fields) for fields in copies] for name, copies in told["copies"].items()},
            told["errors"],
            told["computed"],
            told["unfilled"],
            [getattr(torch, name) for name in told["types"]],
        )


class EngineMap:
    """Which tensors the map knows, and where changes of them go. The others are left to vLLM's loader.

    `is_whole`: these are all workers of the engine, so that every element must be with one of them.
    """

    def __init__(self, layout: Layout, ranks: Sequence[Rank], *, is_whole: bool = True) -> None:
        self.layout = layout
        self._ranks = tuple(ranks)
        self._is_whole = is_whole
        self._known = {
            spec.name
            for spec in layout.tensors
            if self._is_copied(spec.name) and (not is_whole or is_covered(spec.elements, self._copies(spec.name)))
        }

    def require_served(self) -> None:
        """MismatchError if the feed is of another model: it names a tensor that does not fit, or what is missing."""
        for spec in self.layout.tensors:
            for rank in self._ranks:
                if spec.name in rank.errors and not any(spec.name in other.copies for other in self._ranks):
                    raise _other_model(f"the model does not take {spec}: {rank.errors[spec.name]}")
            self._require_fits(spec)
        unfilled = set(self._ranks[0].unfilled).intersection(*(rank.unfilled for rank in self._ranks))
        if unfilled:
            raise _other_model(f"the feed has nothing for the model's parameter {min(unfilled)!r:.200}")

    def _require_fits(self, spec: TensorSpec) -> None:
        """The loader cuts what is too large and casts what is of another kind, without a word."""
        copies = self._copies(spec.name)
        if self._is_whole and self._is_copied(spec.name) and any(copies) and not is_covered(spec.elements, copies):
            raise _other_model(f"the model takes only a part of {spec}")
        for rank in self._ranks:
            for copy in rank.copies.get(spec.name, ()):
                stored = rank.types[copy.storage]
                if torch_dtype(spec.dtype).is_floating_point != stored.is_floating_point:
                    raise _other_model(f"the model has {stored} in place of {spec}")

    def keep(self, proved: Iterable[str]) -> None:
        """Go by the map only where it was proved."""
        self._known &= set(proved)

    def is_known(self, ordinal: int) -> bool:
        """Whether a tensor is written through the map."""
        return self.layout.tensors[ordinal].name in self._known

    @property
    def ranks(self) -> int:
        return len(self._ranks)

    @property
    def known(self) -> list[int]:
        return [ordinal for ordinal in range(len(self.layout.tensors)) if self.is_known(ordinal)]

    @property
    def unknown(self) -> list[str]:
        return [spec.name for spec in self.layout.tensors if spec.name not in self._known]

    def touched_unknown(self, changes: Iterable[Changes]) -> list[str]:
        """Tensors with changes that the loader has to take. Blocks cover tensors without any, too."""
        ordinals: set[int] = set()
        for part in changes:
            ends = np.cumsum(part.runs[:, 2])
            cuts = ends if part.positions is None else np.searchsorted(part.positions, ends)
            ordinals.update(part.runs[np.diff(cuts, prepend=0) > 0, 0].tolist())
        return [self.layout.tensors[o].name for o in sorted(ordinals) if not self.is_known(o)]

    def segments(self, rank: int, changes: Sequence[Changes]) -> Iterator[Segment]:
        """What the worker `rank` has to write; where changes overlap, the last one wins."""
        found: dict[int, list[tuple[Indices, Bits]]] = {}
        for part in changes:
            for ordinal, indices, values in tensor_parts(self.layout, part):
                spec = self.layout.tensors[ordinal]
                if spec.name not in self._known:
                    continue
                wide = indices.astype(np.int64)
                for copy in self._ranks[rank].copies.get(spec.name, ()):
                    which, places = copy.locate(wide)
                    bits = _as_stored(spec, values[which], self._ranks[rank].types[copy.storage])
                    found.setdefault(copy.storage, []).append((places, bits))
        for storage, parts in found.items():
            yield from segments(storage, parts)

    def _is_copied(self, name: str) -> bool:
        """Whether the loaders do nothing with a tensor but to copy it."""
        return not any(name in rank.errors or name in rank.computed for rank in self._ranks)

    def _copies(self, name: str) -> list[Sequence[Copy]]:
        return [rank.copies.get(name, ()) for rank in self._ranks]


def _as_stored(spec: TensorSpec, values: Bits, stored: torch.dtype) -> Bits:
    """The bits that a worker has for values of the feed: vLLM casts where its type is another."""
    if torch_dtype(spec.dtype) == stored:
        return values
    signed = torch.from_numpy(values.view(f"i{spec.dtype.width}"))
    cast = signed.view(torch_dtype(spec.dtype)).to(stored)
    return cast.view(bits_dtype(cast.element_size())).numpy().view(f"u{cast.element_size()}")


def _other_model(told: str) -> MismatchError:
    return MismatchError(told, rule="vllm.model", hint="serve the model that is trained, in the same layout")
