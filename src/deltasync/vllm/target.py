"""In the API server: a vLLM engine as a target. Stage while it generates, then pause, write, label and resume.

Each of its LoRA adapters may follow a feed of its own, as a target of its own.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from deltasync.checkpoint import open_checkpoint
from deltasync.engines.memory import Indices, Placement, Segment, is_covered, segments, write_stage
from deltasync.errors import EngineError, InvalidInputError, MismatchError
from deltasync.files import temporary_beside
from deltasync.format.layout import Layout, TensorSpec
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Bits, Changes, Weights, tensor_parts
from deltasync.replica.target import Damage, Staged, Target
from deltasync.torch.tensors import bits_dtype, torch_dtype

logger = logging.getLogger(__name__)

_HINT = "serve the model that is trained, in the same layout"


@dataclass(frozen=True, slots=True)
class Rank:
    """What one worker reports.

    `placements`: where the elements of each tensor are. `computed`: tensors that the worker also computes with.
    `types`: the element type of each of its spans. `elements`: how many elements of memory depend on the tensors.
    """

    placements: Mapping[str, Sequence[Placement]]
    computed: frozenset[str]
    types: Sequence[torch.dtype]
    elements: int

    @classmethod
    def from_json(cls, description: Mapping[str, Any]) -> "Rank":
        """The worker that `RuntimeWeights.describe` describes; MismatchError if it refuses the tensors."""
        if "refused" in description:
            message, rule, hint = description["refused"]
            raise MismatchError(message, rule=rule, hint=hint)
        return cls(
            {name: [Placement.from_json(p) for p in found] for name, found in description["placements"].items()},
            frozenset(description["computed"]),
            [getattr(torch, name) for name in description["types"]],
            description["elements"],
        )


class EngineMap:
    """Where the changes of each tensor go, and which changes need memory that only vLLM's own code can compute.

    `is_whole`: these are all workers of the engine, so every element must be in one of them.
    """

    def __init__(self, layout: Layout, ranks: Sequence[Rank], *, is_whole: bool = True) -> None:
        self.layout = layout
        self.ranks = tuple(ranks)
        self._is_whole = is_whole
        self._computed = frozenset[str]().union(*(rank.computed for rank in ranks))
        self.has_computed = bool(self._computed)
        """Whether there is memory that depends on weights in another way than by copies."""
        self.elements = sum(rank.elements for rank in ranks)
        """How many elements of memory depend on the tensors, in all workers together."""

    def require_served(self) -> None:
        """MismatchError if the workers hold a part of a tensor only, or other types; it names the tensor."""
        ignored = []
        for spec in self.layout.tensors:
            placements = [rank.placements.get(spec.name, ()) for rank in self.ranks]
            stored = {rank.types[p.storage] for rank in self.ranks for p in rank.placements.get(spec.name, ())}
            for other in stored:
                if torch_dtype(spec.dtype).is_floating_point != other.is_floating_point:
                    raise _other_model(f"the model has {other} in place of {spec}")
            if stored and self._is_whole and not is_covered(spec.elements, placements):
                raise _other_model(f"the model takes only a part of {spec}")
            if not stored and spec.elements and spec.name not in self._computed:
                ignored.append(spec.name)
        if ignored and len(ignored) == len(self.layout.tensors):
            raise _other_model(f"the model takes none of the tensors, such as {ignored[0]!r:.200}")
        if ignored and self._is_whole:
            logger.warning("the model has no use for %d tensors of the feed, such as %r", len(ignored), ignored[0])

    def touches_computed(self, changes: Iterable[Changes]) -> bool:
        """Whether such memory depends on the changed tensors. A block also covers tensors without changes."""
        for block in changes if self._computed else ():
            ends = np.cumsum(block.runs[:, 2])
            cuts = ends if block.positions is None else np.searchsorted(block.positions, ends)
            ordinals = set(block.runs[np.diff(cuts, prepend=0) > 0, 0].tolist())
            if any(self.layout.tensors[ordinal].name in self._computed for ordinal in ordinals):
                return True
        return False

    def segments(self, rank: int, changes: Sequence[Changes]) -> Iterator[Segment]:
        """What the worker `rank` has to write; where changes overlap, the last one wins."""
        writes: dict[int, list[tuple[Indices, Bits]]] = {}
        for block in changes:
            for ordinal, indices, values in tensor_parts(self.layout, block):
                spec = self.layout.tensors[ordinal]
                wide = indices.astype(np.int64)
                for placement in self.ranks[rank].placements.get(spec.name, ()):
                    which, places = placement.locate(wide)
                    bits = _as_stored(spec, values[which], self.ranks[rank].types[placement.storage])
                    writes.setdefault(placement.storage, []).append((places, bits))
        for storage, pairs in writes.items():
            yield from segments(storage, pairs)


def _as_stored(spec: TensorSpec, values: Bits, stored: torch.dtype) -> Bits:
    """The bits of values of the feed in a worker: vLLM casts them if its type differs."""
    if torch_dtype(spec.dtype) == stored:
        return values
    signed = torch.from_numpy(values.view(f"i{spec.dtype.width}"))
    cast = signed.view(torch_dtype(spec.dtype)).to(stored)
    return cast.view(bits_dtype(cast.element_size())).numpy().view(f"u{cast.element_size()}")


def _other_model(message: str) -> MismatchError:
    return MismatchError(message, rule="engine.model", hint=_HINT)


class Engine(Protocol):
    """What the target needs of vLLM. Each method returns when it is done, and raises EngineError if vLLM fails."""

    @property
    def name(self) -> str:
        """The engine and its release, for status and heartbeats."""
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


class VllmTarget(Target):
    """Writes versions into a running engine.

    If anything fails after the first write, the engine stays paused: it answers nothing until a whole version is live.
    `folder` is where stages are written for the workers; it should be in memory. `mirror` is the file of the mirror.
    `is_whole`: the workers of the engine hold all of the model, not only a part of it.
    """

    def __init__(self, engine: Engine, *, folder: Path, mirror: Path, is_whole: bool = True) -> None:
        self.engine = engine.name
        self._engine = engine
        self._folder = folder
        self._mirror = str(mirror)
        self._is_whole = is_whole
        self._map: EngineMap | None = None
        self._compared: dict[int, int] = {}
        """By tensor: how many elements of memory its last comparison read, in all workers together."""

    def claim(self) -> None:
        """Claim the version that the workers have loaded from the mirror, if they have; the follower proves it.

        Called once, before the engine gets requests.
        """
        loaded = set(self._engine.call("loaded_version"))
        version = loaded.pop() if len(loaded) == 1 else None
        if version is not None:
            self._engine.label(version)
            self.version = version

    def require(self, layout: Layout) -> None:
        """Build the map. The live model is only looked at."""
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
        if new.has_computed:
            logger.warning("vLLM computes a part of this model from its weights: that part is computed at each switch")
        self._map = new
        # The workers compute something from the mirror at every change.
        self.reads_state = new.has_computed
        self.unseen_elements = new.elements

    def stage(self, staged: Staged) -> None:
        """Translate the changes to the memory of each worker, and let the workers read or compute them."""
        known = self._require_map()
        if staged.changes is not None:
            paths = self._stages(known)
            for rank, path in enumerate(paths):
                write_stage(path, known.segments(rank, staged.changes))
            self._engine.call("prepare", [str(path) for path in paths])
        if known.has_computed and (staged.changes is None or known.touches_computed(staged.changes)):
            self._engine.call("refresh", self._mirror)

    def commit(self, staged: Staged) -> float:
        """Pause, write, label, resume."""
        started = time.perf_counter()
        # Unknown already before the pause: a pause that fails may still stop the engine, which then needs a new commit.
        self.version = None
        self._engine.pause()
        try:
            self._write(staged)
        except EngineError as error:
            # Values are absolute, so writing all of them again repairs a partial write.
            logger.warning("version %d was not written and is written again: %s", staged.version, error)
            self._write(staged)
        self._engine.label(staged.version)
        self._engine.resume()
        self.version = staged.version
        held_s = time.perf_counter() - started
        # They are in memory, and the workers have freed what they prepared of them.
        for path in self._stages(self._require_map()):
            path.unlink(missing_ok=True)
        return held_s

    def _stages(self, known: EngineMap) -> list[Path]:
        """The files through which the workers get changes, by rank."""
        return [self._folder / f"stage-{rank}.safetensors" for rank in range(len(known.ranks))]

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare live memory with the mirror, and what was computed from it with a twin.

        Only a repair pauses the engine: the caches were computed with damaged weights and must be cleared.
        """
        differing = self._compare(tensors, repair=False)
        if differing and repair:
            version, self.version = self.version, None
            self._engine.pause()
            self._compare(tensors, repair=True)
            self._engine.resume()
            self.version = version
        return [Damage(name, count) for name, count in sorted(differing.items())]

    def _write(self, staged: Staged) -> None:
        if staged.changes is not None:
            self._engine.call("scatter")
        else:
            self._engine.call("copy", self._mirror, list(range(len(self._require_map().layout.tensors))))

    def _compare(self, ordinals: Sequence[int], *, repair: bool) -> dict[str, int]:
        """The number of differing elements by tensor, in all workers together."""
        differing: dict[str, int] = {}
        seen = dict.fromkeys(ordinals, 0)
        for compared in self._engine.call("compare", self._mirror, list(ordinals), repair):
            for ordinal, elements in compared["elements"]:
                seen[ordinal] += elements
            for name, count in compared["differing"].items():
                differing[name] = differing.get(name, 0) + count
        self._compared |= seen
        # In one step: the status is read by other threads, and what is compared again is not unseen meanwhile.
        self.unseen_elements = self._require_map().elements - sum(self._compared.values())
        return differing

    def _require_map(self) -> EngineMap:
        if self._map is None:
            raise EngineError("the layout of the feed was not shown to the target", hint="call `require` first")
        return self._map


WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_KEPT_VERSIONS = 4
"""Folders that are kept: vLLM reads one again if a request in flight needs an adapter that has left its cache."""

Load = Callable[[Path], None]
"""Loads the adapter in a folder, and lets new requests for its name use it. EngineError if vLLM fails."""


class AdapterTarget(Target):
    """The versions of one LoRA adapter in a running engine. `folder` is its own, and should be in memory.

    Each version is a folder that vLLM loads beside the version before; from then on the name of the adapter stands for
    it. Nothing is paused: requests in flight finish with the version that they began with, and because vLLM keys its
    prefix cache by the folder of the adapter, no request hits a prefix of another version.
    """

    reads_state = True
    """An adapter is small: each version is written as a whole, from the mirror."""

    def __init__(self, name: str, load: Load, *, folder: Path) -> None:
        self.engine = f"vllm adapter {name}"
        self._name = name
        self._load = load
        self._folder = folder
        self._staged: Path | None = None
        self._live: Path | None = None

    def require(self, layout: Layout) -> None:
        """Raise MismatchError unless these are the tensors of an adapter."""
        for spec in layout.tensors:
            if "lora_" not in spec.name:
                raise MismatchError(
                    f"{spec} is not a tensor of a LoRA adapter, which the feed of {self._name!r:.80} must contain",
                    rule="vllm.adapter",
                    hint='publish the adapter alone, for example with DeltasyncCallback(what="adapter")',
                )
        # What vLLM holds on its device is not compared.
        self.unseen_elements = layout.elements

    def stage(self, staged: Staged) -> None:
        """Write the version as a folder that vLLM can load."""
        files = staged.files()
        if CONFIG_NAME not in files:
            raise MismatchError(
                f"version {staged.version} has no {CONFIG_NAME}",
                rule="vllm.adapter",
                hint="publish it with the adapter",
            )
        # The name has the digest, because a feed that was rolled back may have other weights under the same number.
        self._staged = self._folder / f"v{staged.version}-{staged.manifest.digest.hex[:16]}"
        if self._staged.exists():
            self._staged.touch()
            return
        pairs = sorted(
            zip(staged.weights.layout.tensors, staged.weights.arrays, strict=True),
            key=lambda pair: -pair[0].dtype.width,
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        with temporary_beside(self._staged) as temporary:
            temporary.mkdir()
            (temporary / CONFIG_NAME).write_bytes(files[CONFIG_NAME])
            with (temporary / WEIGHTS_NAME).open("xb") as file:
                file.write(header_bytes([spec for spec, _ in pairs], {}))
                for _, bits in pairs:
                    file.write(np.ascontiguousarray(bits).data.cast("B"))
            temporary.rename(self._staged)

    def commit(self, staged: Staged) -> float:
        """Load the version. Requests go on meanwhile: nothing is held up."""
        if self._staged is None:
            raise InvalidInputError(f"version {staged.version} was not staged", hint="call stage first")
        started = time.perf_counter()
        self.version = None
        self._load(self._staged)
        self._live, self.version = self._staged, staged.version
        logger.info(
            "adapter %r: version %d, loaded in %.3f s", self._name, staged.version, time.perf_counter() - started
        )
        folders = sorted(self._folder.glob("v*-*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in folders[:-_KEPT_VERSIONS]:
            if folder != self._live:
                shutil.rmtree(folder, ignore_errors=True)
        return 0.0

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare the file that vLLM has loaded with the mirror. What it holds on its device is not compared."""
        if self._live is None:
            return []
        held = open_checkpoint(self._live / WEIGHTS_NAME).weights
        arrays = dict(zip((spec.name for spec in held.layout.tensors), held.arrays, strict=True))
        damages = []
        for ordinal in tensors:
            spec = weights.layout.tensors[ordinal]
            count = int(np.count_nonzero(arrays[spec.name] != weights.arrays[ordinal]))
            if count:
                damages.append(Damage(spec.name, count))
        if damages and repair:
            # The follower delivers a target without a version all weights; the folder must be written again then.
            self.version = None
            shutil.rmtree(self._live, ignore_errors=True)
        return damages
