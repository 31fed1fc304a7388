"""The publisher of torch models: weights in any form, bit by bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import LONG_S
from support.feeds import NEVER, Gate, Notes, holds
from torch import nn

from deltasync.errors import ConflictError, InvalidInputError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.state import load
from deltasync.store import open_store
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import FaultyStore
from deltasync.torch.publisher import Publisher
from deltasync.torch.tensors import named_tensors
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.verify import verify

pytestmark = pytest.mark.usefixtures("no_pauses")


class Model(nn.Module):
    """Small, with tied weights, a buffer, a scalar and a parameter that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.up = nn.Linear(16, 40)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.randn(9, 7).t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x).square().mean() + self.up(x).square().mean() + self.turned.square().sum()


def trained(steps: int) -> Iterator[tuple[int, Model]]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model(torch.arange(20)).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1
        yield step, model


def raw(model: nn.Module, dtype: torch.dtype | None) -> dict[str, bytes]:
    """Every tensor as it should be published, by torch alone."""
    found = {}
    for name, tensor in model.state_dict().items():
        if name != "head.weight":
            cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            found[name] = bytes(cast.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
    return found


def published(store: Any, version: int) -> dict[str, bytes]:
    log = Log(store)
    weights = load(log, log.read(version))
    return {spec.name: array.tobytes() for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True)}


FORMS: dict[str, Callable[[Model], Any]] = {
    "a module": lambda model: model,
    "a state dict": lambda model: model.state_dict(),
    "pairs": lambda model: named_tensors(model).items(),
    "an iterator": lambda model: ((name, tensor) for name, tensor in named_tensors(model).items()),
    "parameters of a module": lambda model: [*model.named_parameters(), *model.named_buffers()],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["native", "cast"])
def test_every_version_has_the_bits_of_its_step(form: Callable[[Model], Any], dtype: torch.dtype | None) -> None:
    store, expected = MemoryStore(), []
    with Publisher(store, dtype=dtype, options=PublisherOptions(wait=True)) as to:
        for step, model in trained(5):
            to.publish(form(model), step=step)
            expected.append(raw(model, dtype))
    assert verify(store, deep=True).is_clean
    for version, wanted in enumerate(expected):
        assert published(store, version) == wanted
    assert set(expected[0]) == {"embed.weight", "up.weight", "up.bias", "turned", "count"}


def test_all_forms_may_take_turns() -> None:
    store, expected = MemoryStore(), []
    with Publisher(store, dtype=torch.bfloat16, options=PublisherOptions(wait=True)) as to:
        for step, model in trained(10):
            to.publish(list(FORMS.values())[step % 5](model), step=step)
            expected.append(raw(model, torch.bfloat16))
    for version, wanted in enumerate(expected):
        assert published(store, version) == wanted


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["native", "cast"])
def test_nan_and_infinity_are_weights_like_any_other(dtype: torch.dtype | None) -> None:
    store = MemoryStore()
    model = nn.Linear(8, 8)
    values = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-45, 3.4e38, 0.0]
    with Publisher(store, dtype=dtype, options=PublisherOptions(wait=True)) as to:
        to.publish(model, step=0)
        with torch.no_grad():
            model.weight.view(-1)[:7] = torch.tensor(values)
        to.publish(model, step=1)
        to.publish(model, step=2)
    assert published(store, 1)["weight"] == raw(model, dtype)["weight"]
    assert Log(store).read(2).changed == 0


def test_weights_may_change_as_soon_as_publish_returns() -> None:
    gate = Gate("put", keys.PAYLOADS)
    store = FaultyStore(MemoryStore())
    with Publisher(store) as to:
        model = nn.Linear(8, 8)
        to.publish(model).wait(LONG_S)
        store._plan = gate
        with torch.no_grad():
            model.weight += 1
        expected = raw(model, None)
        to.publish(model)
        gate.await_operation()
        with torch.no_grad():
            model.weight.zero_()
        gate.open()
    assert published(store, 1) == expected


def test_a_url_is_opened_and_closed(tmp_path: Path) -> None:
    url = (tmp_path / "feed").as_uri()
    notes = Notes()
    for step in range(2):
        with Publisher(url, options=PublisherOptions(observer=notes, anchors=NEVER)) as to:
            assert to.head is None
            to.publish({"w": torch.full((3,), float(step))}, step=step).wait(LONG_S)
            assert to.head is not None
            assert to.head.version == step
            assert to.wait(LONG_S)
    assert notes.versions == [0, 1]
    assert published(open_store(url), 1) == {"w": np.full(3, 1, np.float32).tobytes()}


def test_publishing_after_close() -> None:
    to = Publisher(MemoryStore())
    to.publish({"w": torch.ones(3)}).wait(LONG_S)
    to.close()
    to.close()
    for weights in ({"w": torch.ones(3)}, [("w", torch.ones(3))]):
        with pytest.raises(InvalidInputError, match="this publisher is closed"):
            to.publish(weights)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "appeared": (lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(2))), "'extra'"),
    "vanished": (lambda m: m.register_parameter("bias", None), "'bias'"),
    "another shape": (lambda m: setattr(m, "weight", nn.Parameter(torch.ones(4, 9))), r"weight: F32\[4, 9\]"),
    "another type": (lambda m: m.to(torch.float16), "F16"),
    "a new type": (lambda m: setattr(m, "bias", nn.Parameter(torch.ones(4, dtype=torch.complex64))), "complex64"),
    "no data": (lambda m: m.to("meta"), "'bias' has no data"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_parameter_that_is_not_what_it_was(change: Callable[[nn.Module], object], message: str) -> None:
    store = MemoryStore()
    with Publisher(store) as to:
        model = nn.Linear(4, 4)
        to.publish(model, step=0).wait(LONG_S)
        other = nn.Linear(4, 4)
        change(other)
        with pytest.raises(InvalidInputError, match=message):
            to.publish(other, step=1)
        with torch.no_grad():
            model.bias += 1
        assert to.publish(model, step=2).wait(LONG_S).version == 1
    assert published(store, 1) == raw(model, None)


def test_two_publishers_on_one_feed() -> None:
    store = MemoryStore()
    with Publisher(store) as one, Publisher(store) as two:
        one.publish({"w": torch.zeros(3)}).wait(LONG_S)
        two.publish({"w": torch.ones(3)}).wait(LONG_S)
        with pytest.raises(ConflictError):
            one.publish({"w": torch.full((3,), 2.0)}).wait(LONG_S)
        with pytest.raises(ConflictError, match="another trainer writes to this feed"):
            one.publish({"w": torch.full((3,), 3.0)})
    assert published(store, 1) == {"w": np.ones(3, np.float32).tobytes()}
    assert Log(store).require_head().version == 1


def test_nothing_is_done_before_the_first_publication(tmp_path: Path) -> None:
    store = FaultyStore(MemoryStore())
    Publisher(store).close()
    assert store.operations == []
    Publisher((tmp_path / "feed").as_uri()).close()
    assert not (tmp_path / "feed").exists()


def test_an_empty_model_is_a_feed_too() -> None:
    store = MemoryStore()
    with Publisher(store, options=PublisherOptions(wait=True)) as to:
        for step in range(2):
            to.publish({"none": torch.empty(0, 3)}, step=step)
    assert published(store, 1) == {"none": b""}
    assert holds(load(Log(store), Log(store).read(0)), {"none": np.empty((0, 3), np.float32)})
