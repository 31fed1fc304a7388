"""In the worker processes: vLLM's weight transfer engine of this backend.

A server follows its feed by `server`, which calls `worker` through a collective call. The methods here are vLLM's own
protocol, for programs that drive an engine without our routes, such as `LLM.update_weights`.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from deltasync.replica.follower import Follower
from deltasync.vllm.settings import Settings, memory_folder
from deltasync.vllm.target import VllmTarget
from deltasync.vllm.worker import RuntimeWeights


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the weights come from; without a feed, what the environment says."""

    feed: str | None = None
    base: str | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """The version to become; None is the newest."""

    version: int | None = None


class DeltasyncEngine(WeightTransferEngine[InitInfo, UpdateInfo]):  # type: ignore[misc]
    """Follows a feed when vLLM says so. Each worker has a mirror of its own in memory then."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.runtime = RuntimeWeights(model, vllm_config.model_config, vllm_config.parallel_config.rank)
        self._following: _Following | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Open the feed. Nothing is fetched yet."""
        self.shutdown()
        if init_info.feed is None:
            settings = Settings.from_environment()
        else:
            settings = Settings(init_info.feed, base=None if init_info.base is None else Path(init_info.base))
        self._following = _Following(settings, _OwnWorker(self.runtime, str(self.model_config.model)))

    def start_weight_update(self) -> None:
        """Nothing: a version is written in one go."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Fetch and write a version. The engine waits meanwhile: `deltasync serve` fetches beside it."""
        if self._following is None:
            self.init_transfer_engine(InitInfo())
        assert self._following is not None
        self._following.advance(update_info.version)

    def finish_weight_update(self) -> None:
        """Nothing."""

    def shutdown(self) -> None:
        """Give back the feed and the mirror."""
        if self._following is not None:
            self._following.close()
            self._following = None


class _Following:
    """What one worker follows by itself, with a mirror in shared memory."""

    def __init__(self, settings: Settings, engine: "_OwnWorker") -> None:
        self._memory = ExitStack()
        folder = self._memory.enter_context(memory_folder())
        self._target = VllmTarget(engine, folder=folder, is_whole=False)
        self._follower = Follower(
            settings.feed, self._target, mirror=folder / "mirror.safetensors", base=settings.base, beat_s=None
        )

    def advance(self, version: int | None) -> None:
        self._follower.advance(to=version)

    def close(self) -> None:
        self._follower.close()
        self._memory.close()


class _OwnWorker:
    """An `Engine` of the worker that it runs in. Whoever called has paused generation, and sets the label."""

    def __init__(self, runtime: RuntimeWeights, checkpoint: str) -> None:
        self._runtime = runtime
        self.checkpoint = checkpoint
        self.name = "vllm worker"

    def call(self, method: str, *args: Any) -> list[Any]:
        return [getattr(self._runtime, method)(*args)]

    def pause(self) -> None:
        """Nothing."""

    def resume(self) -> None:
        """Nothing."""

    def label(self, version: int) -> None:
        """Nothing."""
