"""Capture by torch operations, as it runs on an accelerator. Here the device is the CPU: the same code."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.changes import by_tensor
from support.feeds import paper

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Changes, PackedPositions, zeros
from deltasync.state import State
from deltasync.torch.device import DeviceCapture
from deltasync.torch.tensors import _NAMES, TorchWeights
from deltasync.trainer.capture import capture, copy_into

Tensors = dict[str, torch.Tensor]
HEAD: Manifest = paper("anchor", 0)


@pytest.fixture(params=[1 << 25, 50, 7], ids=lambda size: f"blocks of {size}")
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BLOCK_ELEMENTS_MAX", request.param)


def model(seed: int, dtype: torch.dtype) -> Tensors:
    """Of any bits, with all kinds of strides."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        raw = rng.integers(0, 2 if dtype == torch.bool else 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return torch.from_numpy(raw).view(dtype).reshape(shape)

    return {
        "whole": draw(9, 8),
        "transposed": draw(7, 6).t(),
        "sliced": draw(8, 9)[::2, 1:5],
        "scalar": draw(1)[0],
        "none": draw(2, 2)[:0],
        "counter": torch.tensor(seed),
    }


def shadow_of(tensors: Tensors, cast: torch.dtype | None) -> State:
    source = TorchWeights(tensors, cast=cast)
    weights = zeros(source.layout)
    copy_into(weights, source)
    return State(weights, HEAD)


def plain(found: list[Changes], shadow: State) -> dict[str, tuple[list[int], list[int]]]:
    changed = by_tensor(shadow.require_weights().layout, found)
    return {name: (indices.tolist(), values.tolist()) for name, (indices, values) in changed.items()}


CASTS = {f"{name}": (dtype, None) for dtype, name in _NAMES.items()} | {
    "F32 as BF16": (torch.float32, torch.bfloat16),
    "F64 as F16": (torch.float64, torch.float16),
}


@pytest.mark.usefixtures("_blocks")
@pytest.mark.parametrize(("dtype", "cast"), CASTS.values(), ids=CASTS.keys())
def test_finds_what_the_host_finds(dtype: torch.dtype, cast: torch.dtype | None) -> None:
    old, new = model(0, dtype), model(1, dtype)
    shadow, on_device = shadow_of(old, cast), DeviceCapture()
    assert plain(on_device.find(shadow, old, cast), shadow) == {}
    found = plain(on_device.find(shadow, new, cast), shadow)
    assert found == plain(capture(shadow.require_weights(), TorchWeights(new, cast=cast)), shadow)
    assert "counter" in found


@pytest.mark.usefixtures("_blocks")
def test_a_capture_keeps_two_bytes_for_each_position() -> None:
    old, new = model(0, torch.bfloat16), model(1, torch.bfloat16)
    found = DeviceCapture().find(shadow_of(old, None), new, None)
    assert found
    for changes in found:
        assert isinstance(changes.held, PackedPositions)
        assert changes.held.low.itemsize == 2
        assert changes.held.low.base is None, "a view would keep the wide positions"


def test_follows_the_shadow() -> None:
    """The copy on the device follows every version, also several between two captures."""
    states = [model(seed, torch.bfloat16) for seed in range(7)]
    shadow, on_device = shadow_of(states[0], None), DeviceCapture()
    for number, new in enumerate(states[1:]):
        found = on_device.find(shadow, new, None)
        assert plain(found, shadow) == plain(capture(shadow.require_weights(), TorchWeights(new)), shadow)
        # Every second one is not committed: then the next is captured against the same shadow.
        if number % 2:
            shadow.apply(found, HEAD)
            shadow.apply(capture(shadow.require_weights(), TorchWeights(states[2])), HEAD)


def test_a_capture_is_a_copy() -> None:
    old, new = model(0, torch.float32), model(1, torch.float32)
    shadow, on_device = shadow_of(old, None), DeviceCapture()
    found = on_device.find(shadow, new, None)
    before = plain(found, shadow)
    for tensor in new.values():
        tensor.zero_()
    assert plain(found, shadow) == before


def test_the_copy_on_the_device_is_not_the_shadow() -> None:
    """On the CPU the two could be one by accident, and every change would be lost."""
    old = model(0, torch.float32)
    shadow, on_device = shadow_of(old, None), DeviceCapture()
    on_device.find(shadow, old, None)
    shadow.require_weights().arrays[0][:] ^= 1
    assert plain(on_device.find(shadow, old, None), shadow) == {}


def test_a_copy_that_could_not_be_updated_is_updated_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device ran out of memory. What changed while its copy was behind must not be missed."""
    old, new = model(0, torch.float32), model(1, torch.float32)
    shadow, on_device = shadow_of(old, None), DeviceCapture()
    captured = on_device.find(shadow, new, None)
    assert captured
    shadow.apply(captured, paper("anchor", 1))
    overwrite = DeviceCapture._overwrite

    def fail(self: DeviceCapture, layout: Layout, changes: Changes) -> None:
        monkeypatch.setattr(DeviceCapture, "_overwrite", overwrite)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DeviceCapture, "_overwrite", fail)
    with pytest.raises(torch.OutOfMemoryError):
        on_device.find(shadow, new, None)
    assert plain(on_device.find(shadow, new, None), shadow) == {}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: {**tensors, "more": torch.ones(2)},
        lambda tensors: {name: t for name, t in tensors.items() if name != "whole"},
        lambda tensors: {**tensors, "whole": tensors["whole"].t()},
        lambda tensors: {**tensors, "whole": tensors["whole"].double()},
    ],
    ids=["appeared", "vanished", "another shape", "another type"],
)
def test_other_tensors_are_refused_by_name(change: Callable[[Tensors], Tensors]) -> None:
    tensors = model(0, torch.float32)
    shadow = shadow_of(tensors, None)
    with pytest.raises(InvalidInputError, match=r"more|whole"):
        DeviceCapture().find(shadow, change(tensors), None)
