"""In the worker processes: the weight transfer engine that vLLM creates for this backend.

A server follows its feed in `server`, which calls `worker` through a collective call. The methods here are vLLM's own
protocol, for programs that drive an engine without our routes, such as `LLM.update_weights`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltasync.errors import InvalidInputError
from deltasync.replica.follower import Follower
from deltasync.replica.memory import memory_folder
from deltasync.vllm.architectures import warn_if_not_in_zoo
from deltasync.vllm.releases import warn_if_untested
from deltasync.vllm.settings import Settings
from deltasync.vllm.target import VllmTarget
from deltasync.vllm.twins import Twins
from deltasync.vllm.worker import RuntimeWeights


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the weights come from. Without a feed, the environment says."""

    feed: str | None = None
    base: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to become; None is the newest."""

    version: int | None = None


class DeltasyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Moves to a version when vLLM asks for it. Each worker then has a mirror of its own in memory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.runtime = RuntimeWeights(model, Twins(vllm_config), vllm_config.parallel_config.rank)
        self._follower: Follower | None = None
        self._held = ExitStack()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the feed. Nothing is fetched yet."""
        self._open(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: `receive_weights` writes a whole version."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch and write a version. The engine waits for it; with `deltasync serve` it generates in the meantime."""
        follower = self._open(InitInfo()) if self._follower is None else self._follower
        follower.advance(to=update_info.version)

    def finish_weight_update(self) -> None:
        """Do nothing: `receive_weights` writes a whole version."""

    def shutdown(self) -> None:
        """Release the feed and the mirror."""
        self._follower = None
        self._held.close()

    def _open(self, init_info: InitInfo) -> Follower:
        self.shutdown()
        if self.vllm_config.parallel_config.rank == 0:
            warn_if_untested(vllm.__version__)
            warn_if_not_in_zoo(self.vllm_config.model_config.architectures)
        if init_info.feed is None:
            settings = Settings.from_environment()
        else:
            settings = Settings(init_info.feed, base=None if init_info.base is None else Path(init_info.base))
        if settings.feed is None:
            raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it, or give `feed` in the init_info")
        folder = self._held.enter_context(memory_folder())
        mirror = folder / "mirror.safetensors"
        target = VllmTarget(_OwnWorker(self.runtime), folder=folder, mirror=mirror, is_whole=False)
        self._follower = self._held.enter_context(
            Follower(settings.feed, target, mirror=mirror, base=settings.base, beat_s=None)
        )
        return self._follower


class _OwnWorker:
    """An `Engine` of the worker that it runs in. The caller of vLLM's protocol pauses generation and sets labels."""

    def __init__(self, runtime: RuntimeWeights) -> None:
        self._runtime = runtime
        self.name = "vllm worker"

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._runtime, method)(*args)]

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def label(self, version: int) -> None:
        """Do nothing."""
