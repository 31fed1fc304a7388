"""In the API server: a vLLM engine as a target. Stage while it generates, then pause, write, label and resume."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from deltasync.errors import EngineError, MismatchError
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.weights import Bits, Changes, Weights, tensor_parts
from deltasync.replica.target import Damage, Staged
from deltasync.torch.tensors import bits_dtype, torch_dtype
from deltasync.vllm.stage import Segment, segments, write_stage
from deltasync.vllm.tracing import Copy, Indices, is_covered

logger = logging.getLogger(__name__)

_HINT = "serve the model that is trained, in the same layout"


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker reports: its copies by tensor, and the element type of each of its storages."""

    copies: Mapping[str, Sequence[Copy]]
    errors: Mapping[str, str]
    computed: Sequence[str]
    unfilled: Sequence[str]
    types: Sequence[torch.dtype]

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> "Rank":
        """The worker that `RuntimeWeights.describe` describes."""
        return cls(
            {name: [Copy.from_json(fields) for fields in copies] for name, copies in description["copies"].items()},
            description["errors"],
            description["computed"],
            description["unfilled"],
            [getattr(torch, name) for name in description["types"]],
        )


class EngineMap:
    """The tensors that are written through the map, and where their changes go. vLLM's loader takes the others.

    `is_whole`: these are all workers of the engine, so every element must be in one of them.
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
        """MismatchError if the feed is of another model; it names a tensor that does not fit or is missing."""
        for spec in self.layout.tensors:
            for rank in self._ranks:
                if spec.name in rank.errors and not any(spec.name in other.copies for other in self._ranks):
                    raise _other_model(f"the model does not take {spec}: {rank.errors[spec.name]}")
            self._require_fits(spec)
        unfilled = set(self._ranks[0].unfilled).intersection(*(rank.unfilled for rank in self._ranks))
        if unfilled:
            raise _other_model(f"the feed has nothing for the model's parameter {min(unfilled)!r:.200}")

    def _require_fits(self, spec: TensorSpec) -> None:
        """MismatchError for a tensor that the loader would silently cut, or cast between integers and floats."""
        copies = self._copies(spec.name)
        if self._is_whole and self._is_copied(spec.name) and any(copies) and not is_covered(spec.elements, copies):
            raise _other_model(f"the model takes only a part of {spec}")
        for rank in self._ranks:
            for copy in rank.copies.get(spec.name, ()):
                stored = rank.types[copy.storage]
                if torch_dtype(spec.dtype).is_floating_point != stored.is_floating_point:
                    raise _other_model(f"the model has {stored} in place of {spec}")

    def keep(self, proved: Iterable[str]) -> None:
        """Use the map only for these tensors."""
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
        """The changed tensors that the loader has to take. A block also covers tensors without changes."""
        ordinals: set[int] = set()
        for block in changes:
            ends = np.cumsum(block.runs[:, 2])
            cuts = ends if block.positions is None else np.searchsorted(block.positions, ends)
            ordinals.update(block.runs[np.diff(cuts, prepend=0) > 0, 0].tolist())
        return [self.layout.tensors[o].name for o in sorted(ordinals) if not self.is_known(o)]

    def segments(self, rank: int, changes: Sequence[Changes]) -> Iterator[Segment]:
        """What the worker `rank` has to write; where changes overlap, the last one wins."""
        writes: dict[int, list[tuple[Indices, Bits]]] = {}
        for block in changes:
            for ordinal, indices, values in tensor_parts(self.layout, block):
                spec = self.layout.tensors[ordinal]
                if spec.name not in self._known:
                    continue
                wide = indices.astype(np.int64)
                for copy in self._ranks[rank].copies.get(spec.name, ()):
                    which, places = copy.locate(wide)
                    bits = _as_stored(spec, values[which], self._ranks[rank].types[copy.storage])
                    writes.setdefault(copy.storage, []).append((places, bits))
        for storage, pairs in writes.items():
            yield from segments(storage, pairs)

    def _is_copied(self, name: str) -> bool:
        """Whether the loaders only copy a tensor."""
        return not any(name in rank.errors or name in rank.computed for rank in self._ranks)

    def _copies(self, name: str) -> list[Sequence[Copy]]:
        return [rank.copies.get(name, ()) for rank in self._ranks]


def _as_stored(spec: TensorSpec, values: Bits, stored: torch.dtype) -> Bits:
    """The bits of values of the feed in a worker: vLLM casts them if its type differs."""
    if torch_dtype(spec.dtype) == stored:
        return values
    signed = torch.from_numpy(values.view(f"i{spec.dtype.width}"))
    cast = signed.view(torch_dtype(spec.dtype)).to(stored)
    return cast.view(bits_dtype(cast.element_size())).numpy().view(f"u{cast.element_size()}")


def _other_model(message: str) -> MismatchError:
    return MismatchError(message, rule="vllm.model", hint=_HINT)


class Engine(Protocol):
    """What the target needs of vLLM. Each method returns when it is done, and raises EngineError if vLLM fails."""

    @property
    def name(self) -> str:
        """The engine and its release, for status and heartbeats."""
        ...

    @property
    def checkpoint(self) -> str:
        """The checkpoint that the model was loaded from."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `RuntimeWeights` in every worker; the results in the order of the ranks."""
        ...

    def pause(self) -> None:
        """Pause generation and clear the caches. A paused engine stays paused."""
        ...

    def resume(self) -> None:
        """Resume generation."""
        ...

    def label(self, version: int) -> None:
        """Label the tokens from now on with this version."""
        ...


class VllmTarget:
    """Writes versions into a running engine.

    If anything fails after the first write, the engine stays paused: it answers nothing until a whole version is live.
    `folder` is where stages are written for the workers; it should be in memory. `is_whole`: the workers of the engine
    hold all of the model, not only a part of it.
    """

    def __init__(self, engine: Engine, *, folder: Path, is_whole: bool = True) -> None:
        self._engine = engine
        self._folder = folder
        self._is_whole = is_whole
        self._map: EngineMap | None = None
        self._is_proved = False
        self._version: int | None = None
        self._mirror = ""

    @property
    def engine(self) -> str:
        return self._engine.name

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def reads_mirror(self) -> bool:
        """Whether there are tensors that vLLM's loader reads from the mirror."""
        return self._map is not None and bool(self._map.unknown)

    def require(self, layout: Layout) -> None:
        """Build the map, and prove it against the checkpoint that the engine has loaded."""
        if self._map is not None:
            if self._map.layout != layout:
                raise MismatchError(
                    "the feed now has other tensors than the server started with",
                    rule="vllm.layout",
                    hint="restart the server",
                )
            return
        ranks = [Rank.from_json(description) for description in self._engine.call("describe", layout.to_json())]
        new = EngineMap(layout, ranks, is_whole=self._is_whole)
        new.require_served()
        missing = {name for names in self._engine.call("missing", self._engine.checkpoint) for name in names}
        if missing:
            raise _other_model(f"the feed lacks {min(missing)!r:.200}, which the model was loaded with")
        self._is_proved = self._prove(new, self._engine.call("prove", self._engine.checkpoint))
        self._map = new

    def stage(self, staged: Staged) -> None:
        """Translate the changes to the memory of each worker, and let the workers read them."""
        self._mirror = str(staged.path)
        if staged.changes is None:
            return
        known = self._require_map()
        paths = [self._folder / f"stage-{rank}.safetensors" for rank in range(known.ranks)]
        for rank, path in enumerate(paths):
            write_stage(path, known.segments(rank, staged.changes))
        self._engine.call("prepare", [str(path) for path in paths])

    def commit(self, staged: Staged) -> float:
        """Pause, write, label, resume."""
        started = time.perf_counter()
        # Unknown already before the pause: a pause that fails may still stop the engine, which then needs a new commit.
        self._version = None
        self._engine.pause()
        try:
            self._write(staged)
        except EngineError as error:
            # Values are absolute, so writing all of them again repairs a partial write.
            logger.warning("version %d was not written and is written again: %s", staged.version, error)
            self._write(staged)
        self._engine.label(staged.version)
        self._engine.resume()
        self._version = staged.version
        return time.perf_counter() - started

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare live memory with the mirror; tensors that the map does not know are skipped.

        Only a repair pauses the engine: the caches were computed with damaged weights and must be cleared.
        """
        known = self._require_map()
        ordinals = [ordinal for ordinal in tensors if known.is_known(ordinal)]
        differing = self._compare(ordinals, repair=False)
        if differing and repair:
            version, self._version = self._version, None
            self._engine.pause()
            self._compare(sorted(differing), repair=True)
            self._engine.resume()
            self._version = version
        return [Damage(known.layout.tensors[ordinal].name, count) for ordinal, count in sorted(differing.items())]

    def _write(self, staged: Staged) -> None:
        known = self._require_map()
        if staged.changes is not None:
            self._engine.call("scatter")
            self._load(known.touched_unknown(staged.changes))
        elif self._is_proved:
            self._engine.call("copy", self._mirror, known.known)
            self._load(known.unknown)
        else:
            # The loader is the only proof of the map here: tensors that it puts elsewhere are left to it.
            self._load([spec.name for spec in known.layout.tensors])
            differing = self._compare(known.known, repair=False)
            self._keep(known, [t.name for ordinal, t in enumerate(known.layout.tensors) if ordinal not in differing])
            self._is_proved = True

    def _load(self, names: Sequence[str]) -> None:
        if names:
            self._engine.call("load", self._mirror, list(names))

    def _compare(self, ordinals: Sequence[int], *, repair: bool) -> dict[int, int]:
        """The number of differing elements by tensor, in all workers together."""
        differing: dict[int, int] = {}
        for counts in self._engine.call("compare", self._mirror, list(ordinals), repair):
            for ordinal, count in counts:
                differing[ordinal] = differing.get(ordinal, 0) + count
        return differing

    def _prove(self, known: EngineMap, names_by_rank: Sequence[list[str] | None]) -> bool:
        """Keep what every worker has proved; False if the checkpoint is not available to prove the map with."""
        proved = [set(names) for names in names_by_rank if names is not None]
        if len(proved) != len(names_by_rank):
            logger.info(
                "%s is not available to prove the map with: vLLM's loader takes all of the first version",
                self._engine.checkpoint,
            )
            return False
        self._keep(known, set.intersection(*proved))
        return True

    def _keep(self, known: EngineMap, names: Iterable[str]) -> None:
        known.keep(names)
        if known.unknown:
            logger.warning(
                "%d of %d tensors are not in memory as they were loaded, such as %r: vLLM's loader takes them",
                len(known.unknown),
                len(known.layout.tensors),
                known.unknown[0],
            )

    def _require_map(self) -> EngineMap:
        if self._map is None:
            raise EngineError("the layout of the feed was not shown to the target", hint="call `require` first")
        return self._map
