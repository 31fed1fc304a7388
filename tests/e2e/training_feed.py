"""A trainer that changes a model a little at each step and publishes it, for servers to follow."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from servers import Server
from tiny_models import save

from deltasync.checkpoint import open_checkpoint
from deltasync.checkpoint_output import companion_files
from deltasync.restore import restore
from deltasync.store.opening import open_store
from deltasync.trainer.publisher import Publisher


class TrainingFeed:
    """`base` is the checkpoint of version 0. Each step changes answers visibly."""

    def __init__(self, model: torch.nn.Module, base: Path, publisher: Publisher, url: str) -> None:
        self.model = model
        self.base = base
        self.url = url
        self._publisher = publisher
        self._random = torch.Generator().manual_seed(7)
        self._begun = [(p.detach().float().mean(), p.detach().float().std()) for p in model.parameters()]
        self._publisher.publish(model, step=0).wait()
        self.version = 0

    def step(self, *, fraction: float = 0.05, scale: float = 0.1) -> int:
        """Move some elements of every parameter and publish; the version. No number of steps lets them grow."""
        with torch.no_grad():
            for parameter, (mean, std) in zip(self.model.parameters(), self._begun, strict=True):
                chosen = torch.rand(parameter.shape, generator=self._random) < fraction
                drawn = mean + std * torch.randn(parameter.shape, generator=self._random)
                parameter[chosen] = parameter.float().lerp(drawn, scale).to(parameter.dtype)[chosen]
        self.version = self._publisher.publish(self.model).wait().version
        return self.version

    def restored(self, folder: Path, *, version: int | None = None) -> Path:
        """The checkpoint of a version, for a server that never followed anything."""
        store = open_store(self.url)
        restore(store, folder, version=version)
        store.close()
        return folder


@contextmanager
def training_feed(model: torch.nn.Module, folder: Path, server: Server | None = None) -> Iterator[TrainingFeed]:
    """A new feed, in `folder` or on a server."""
    base = save(model, folder / "base")
    url = (folder / "feed").as_uri() if server is None else server.url("feed")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in () if server is None else server.environment.items():
            patch.setenv(name, value)
        with Publisher(url, files=companion_files(open_checkpoint(base))) as publisher:
            yield TrainingFeed(model, base, publisher, url)
