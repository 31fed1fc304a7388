"""In the API server: LoRA adapters, each of which follows a feed of its own.

Each version of an adapter is a folder that vLLM loads beside the version before; from then on the name of the adapter
stands for it. Nothing is paused: requests in flight finish with the version that they began with, and because vLLM keys
its prefix cache by the folder of the adapter, no request hits a prefix of another version.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.files import temporary_beside
from deltasync.format.layout import Layout
from deltasync.format.safetensors import header_bytes
from deltasync.format.weights import Weights
from deltasync.replica.target import Damage, Staged, Target

logger = logging.getLogger(__name__)

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_KEPT_VERSIONS = 4
"""Folders that are kept: vLLM reads one again if a request in flight needs an adapter that has left its cache."""

Load = Callable[[Path], None]
"""Loads the adapter in a folder, and lets new requests for its name use it. EngineError if vLLM fails."""


class AdapterTarget(Target):
    """The versions of one adapter in a running engine. `folder` is its own, and should be in memory."""

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
