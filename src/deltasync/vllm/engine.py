"""In the worker processes: what vLLM creates for this backend, the weight transfer engine and the model loader.

A server follows its feed in `server`, which calls `worker` through a collective call. The methods of the engine are
vLLM's own protocol, for programs that drive an engine without our routes, such as `LLM.update_weights`.

With the load format `deltasync`, a server takes its first weights from the feed: the first worker brings the mirror to
a version, and all load that version from it. How they are loaded is left to vLLM, so the model holds what that of a
fresh server would hold that is started with the restored checkpoint.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import ModelConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import get_world_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import InvalidInputError
from deltasync.replica.follower import Follower
from deltasync.replica.mirror import fill_mirror, memory_folder
from deltasync.vllm.plugin import BACKEND, is_used, log_where_vllm_does
from deltasync.vllm.releases import warn_if_not_in_zoo, warn_if_untested
from deltasync.vllm.settings import Settings
from deltasync.vllm.target import VllmTarget
from deltasync.vllm.worker import LOADED, RuntimeWeights, Twins, named_tensors

logger = logging.getLogger(__name__)


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


class MirrorLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads the weights of a version from the mirror, whose file `DELTASYNC_MIRROR` names."""

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing: `load_model` fetches the weights, in the process that needs them."""

    def load_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> torch.nn.Module:
        if not is_used(vllm_config):
            raise InvalidInputError(
                f"--load-format {BACKEND} is set without its backend",
                hint=f'add --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
            )
        log_where_vllm_does()
        # Before anything is fetched: such a server would refuse the feed later.
        Twins(vllm_config).require_fixed()
        settings = Settings.from_environment()
        if settings.feed is None:
            raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it, or leave --load-format out")
        group: Any = get_world_group()
        mirror, version = _mirror(settings), None
        if group.rank == 0:
            version = fill_mirror(settings.feed, mirror, base=settings.base)
            logger.info("loading version %d of %s", version, settings.feed)
        # All workers load one version, which the mirror of each host holds.
        version = group.broadcast_object(version, src=0)
        if group.local_rank == 0 and group.rank != 0:
            fill_mirror(settings.feed, mirror, base=settings.base, version=version)
        group.barrier()
        model: torch.nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        setattr(model, LOADED, version)
        return model

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of the mirror. vLLM also calls this to load the weights again."""
        self.counter_before_loading_weights = time.perf_counter()
        weights = open_checkpoint(_mirror(Settings.from_environment())).weights
        return named_tensors(weights, weights.layout.tensors)


def _mirror(settings: Settings) -> Path:
    if settings.mirror is None:
        raise InvalidInputError(
            f"DELTASYNC_MIRROR is not set, which --load-format {BACKEND} needs",
            hint="set it to a file that the server and its workers share, in memory or on a disk",
        )
    return settings.mirror
