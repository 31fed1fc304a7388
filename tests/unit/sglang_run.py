"""A trainer, the stand-in for an SGLang server, and the target between them: versions that are written in place."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from served_model import Served, changed, odd, tensors
from sglang_stand_in import SglangStandIn, sglang_server
from support import LONG_S

from deltasync import Follower
from deltasync.sglang import SglangTarget
from deltasync.sglang.in_place import LOADER
from deltasync.torch import Publisher
from deltasync.trainer.publisher import PublisherOptions

ROUND = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]
IN_PLACE = ["/pause_generation", *ROUND, "/update_weight_version", "/continue_generation"]
FROM_DISK = ["/pause_generation", "/update_weights_from_disk", *ROUND, *ROUND, "/continue_generation"]
State = dict[str, torch.Tensor]


class Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(6.0), persistent=False)


def served(*, rank: int = 0, size: int = 1, names: tuple[str, ...] = ()) -> Served:
    model = Served(rank=rank, size=size, odd=odd(*names))
    del model.angles
    model.rotary = Rotary()
    return model


class Run:
    """A trainer, a server, and the target between them."""

    def __init__(self, folder: Path, server: SglangStandIn, models: list[Served], state: State) -> None:
        self.server, self.state = server, state
        server.workers = list(models)
        server.facts["custom_weight_loader"] = [LOADER]
        self.feed = str(folder / "feed")
        self.publisher = Publisher(self.feed, options=PublisherOptions(wait=True, files={"config.json": b"{}"}))
        self.publisher.publish(state).wait(LONG_S)
        self.target = SglangTarget(folder / "live", server.url, only_changes=True)
        self.follower = Follower(self.feed, self.target)

    def step(self, seed: int) -> None:
        self.state = changed(self.state, seed)
        self.publisher.publish(self.state).wait(LONG_S)

    def advance(self) -> list[str]:
        """The routes that were called."""
        self.server.calls.clear()
        self.follower.advance()
        return [route for route, _ in self.server.calls]

    def require_bits(self) -> None:
        """Every worker has the bits that a server has that was started with these weights."""
        assert self.server.paused is None
        assert not self.server.is_session_open
        assert not self.server.has_ended
        for model in self.server.workers:
            assert isinstance(model, Served)
            fresh = Served(rank=model.rank, size=model.size, odd=model._odd_again()).load(self.state.items())
            wanted = fresh.bits()
            wanted["rotary.angles"] = wanted.pop("angles")
            found = model.bits()
            assert found.keys() == wanted.keys()
            assert all(np.array_equal(found[name], wanted[name]) for name in found)


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Run]]:
    """A function that starts a run on a server of its own, and closes it in the end."""
    with sglang_server() as server, ExitStack() as runs:

        def begin(models: list[Served] | None = None, state: State | None = None) -> Run:
            run = Run(folder, server, [served()] if models is None else models, tensors() if state is None else state)
            runs.enter_context(closing(run.publisher))
            runs.enter_context(closing(run.follower))
            return run

        yield begin
