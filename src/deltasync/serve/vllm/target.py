"""An engine of vLLM as a target: stage beside it, pause, write, label, resume."""

import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from deltasync.errors import EngineError, MismatchError
from deltasync.following.target import Damage, Staged
from deltasync.format.layout import Layout
from deltasync.format.weights import Weights
from deltasync.serve.vllm.map import EngineMap, Rank
from deltasync.serve.vllm.stagefile import write_stage

_log = logging.getLogger(__name__)


class Engine(Protocol):
    """What a target needs of vLLM. Each method waits for its end, and raises EngineError if vLLM fails at it."""

    @property
    def name(self) -> str:
        """What this is, for people."""
        ...

    @property
    def checkpoint(self) -> str:
        """What the model was loaded from."""
        ...

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `RuntimeWeights` in every worker; what they returned, in the order of their ranks."""
        ...

    def pause(self) -> None:
        """Hold generation, and forget what was computed with the present weights. Twice is once."""
        ...

    def resume(self) -> None:
        """Go on with generation."""
        ...

    def label(self, version: int) -> None:
        """Tokens have this version from now on."""
        ...


class VllmTarget:
    """Writes versions into a running engine.

    If anything fails after the first write, the engine stays paused: it answers nothing until a version is live, all of
    it. `folder` is where stages are put for the workers; it should be in memory. `is_whole`: the engine's workers hold
    all of the model, not only a part of it.
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
        """Tensors that the map does not know are loaded from the mirror."""
        return self._map is not None and bool(self._map.unknown)

    def require(self, layout: Layout) -> None:
        """Build the map, and prove it by the checkpoint that the engine has loaded."""
        if self._map is not None:
            if self._map.layout != layout:
                raise MismatchError("the feed has other tensors since", rule="vllm.layout", hint="restart the server")
            return
        ranks = [Rank.from_json(told) for told in self._engine.call("describe", layout.to_json())]
        found = EngineMap(layout, ranks, is_whole=self._is_whole)
        found.require_served()
        missing = sorted({name for told in self._engine.call("missing", self._engine.checkpoint) for name in told})
        if missing:
            raise MismatchError(
                f"the feed lacks {missing[0]!r:.200}, which the model was loaded with",
                rule="vllm.model",
                hint="serve the model that is trained, in the same layout",
            )
        self._is_proved = self._prove(found, self._engine.call("prove", self._engine.checkpoint))
        self._map = found

    def stage(self, staged: Staged) -> None:
        """Turn changes into places in the memory of each worker, and bring them there."""
        self._mirror = str(staged.mirror.path)
        if staged.changes is None:
            return
        known = self._require_map()
        paths = [self._folder / f"stage-{rank}.safetensors" for rank in range(known.ranks)]
        for rank, path in enumerate(paths):
            write_stage(path, known.segments(rank, staged.changes))
        self._engine.call("prepare", [str(path) for path in paths])

    def commit(self, staged: Staged) -> float:
        """Pause, write, label, resume."""
        begun = time.perf_counter()
        # Before the pause: one that fails may still hold the engine, which has to be brought here again then.
        self._version = None
        self._engine.pause()
        try:
            self._write(staged)
        except EngineError as error:
            # Values are absolute: writing all of them again mends what was written in part.
            _log.warning("version %d was not written, once more: %s", staged.version, error)
            self._write(staged)
        self._engine.label(staged.version)
        self._engine.resume()
        self._version = staged.version
        return time.perf_counter() - begun

    def scrub(self, weights: Weights, tensors: Sequence[int], *, repair: bool) -> list[Damage]:
        """Compare live memory with the mirror, through the map; tensors that it does not know are passed over.

        To compare needs no pause. To repair does: what was computed with damaged weights has to be forgotten.
        """
        known = self._require_map()
        ordinals = [ordinal for ordinal in tensors if known.is_known(ordinal)]
        found = self._compare(ordinals, repair=False)
        if found and repair:
            version, self._version = self._version, None
            self._engine.pause()
            self._compare(sorted(found), repair=True)
            self._engine.resume()
            self._version = version
        return [Damage(known.layout.tensors[ordinal].name, count) for ordinal, count in sorted(found.items())]

    def _write(self, staged: Staged) -> None:
        known = self._require_map()
        if staged.changes is not None:
            self._engine.call("scatter")
            self._load(known.touched_unknown(staged.changes))
        elif self._is_proved:
            self._engine.call("copy", self._mirror, known.known)
            self._load(known.unknown)
        else:
            # Nothing says that the map is right but the loader: whatever it puts elsewhere is left to it.
            self._load([spec.name for spec in known.layout.tensors])
            differing = self._compare(known.known, repair=False)
            self._keep(known, [t.name for ordinal, t in enumerate(known.layout.tensors) if ordinal not in differing])
            self._is_proved = True

    def _load(self, names: Sequence[str]) -> None:
        if names:
            self._engine.call("load", self._mirror, list(names))

    def _compare(self, ordinals: Sequence[int], *, repair: bool) -> dict[int, int]:
        """Differing elements by tensor, in all workers together."""
        found: dict[int, int] = {}
        for told in self._engine.call("compare", self._mirror, list(ordinals), repair):
            for ordinal, count in told:
                found[ordinal] = found.get(ordinal, 0) + count
        return found

    def _prove(self, known: EngineMap, told: Sequence[list[str] | None]) -> bool:
        """False if there is nothing to hold the map against."""
        proved = [set(names) for names in told if names is not None]
        if len(proved) != len(told):
            _log.info("%s is not here to prove the map by: the first version is loaded whole", self._engine.checkpoint)
            return False
        self._keep(known, set.intersection(*proved))
        return True

    def _keep(self, known: EngineMap, names: Iterable[str]) -> None:
        known.keep(names)
        if known.unknown:
            _log.warning(
                "%d of %d tensors do not lie in memory as they were loaded, such as %r: vLLM's loader takes them",
                len(known.unknown),
                len(known.layout.tensors),
                known.unknown[0],
            )

    def _require_map(self) -> EngineMap:
        if self._map is None:
            raise EngineError("the layout of the feed was not shown to the engine")
        return self._map
