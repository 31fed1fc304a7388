"""In the worker processes: the load format `deltasync`, with which a server takes its first weights from the feed.

The first worker brings the mirror to a version, and all load that version from it. How they are loaded is left to vLLM,
so the model holds what that of a fresh server would hold that is started with the restored checkpoint.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.config import ModelConfig, VllmConfig
from vllm.distributed import get_world_group
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import InvalidInputError
from deltasync.replica.mirror import fill_mirror
from deltasync.vllm.plugin import BACKEND, is_used, log_where_vllm_does
from deltasync.vllm.settings import Settings
from deltasync.vllm.twins import Twins
from deltasync.vllm.worker import LOADED, named_tensors

logger = logging.getLogger(__name__)


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
        version = _agree(Settings.from_environment())
        model: torch.nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        setattr(model, LOADED, version)
        return model

    def get_all_weights(self, model_config: ModelConfig, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of the mirror. vLLM also calls this to load the weights again."""
        self.counter_before_loading_weights = time.perf_counter()
        weights = open_checkpoint(_mirror(Settings.from_environment())).weights
        return named_tensors(weights, weights.layout.tensors)


def _agree(settings: Settings) -> int:
    """The version that all workers load. The mirror of each host holds it."""
    if settings.feed is None:
        raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it, or leave --load-format out")
    group: Any = get_world_group()
    mirror, version = _mirror(settings), None
    if group.rank == 0:
        version = fill_mirror(settings.feed, mirror, base=settings.base)
        logger.info("loading version %d of %s", version, settings.feed)
    agreed: int = group.broadcast_object(version, src=0)
    if group.local_rank == 0 and group.rank != 0:
        fill_mirror(settings.feed, mirror, base=settings.base, version=agreed)
    group.barrier()
    return agreed


def _mirror(settings: Settings) -> Path:
    if settings.mirror is None:
        raise InvalidInputError(
            f"DELTASYNC_MIRROR is not set, which --load-format {BACKEND} needs",
            hint="set it to a file that the server and its workers share, in memory or on a disk",
        )
    return settings.mirror
