"""A torch module as target: any strides, ties, types; nothing is cast, and only the commit is held."""

import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import LONG_S
from support.feeds import Feed
from support.helpers import changed, state
from support.replicas import TORCH_TYPES, follower
from torch import nn

from deltasync.errors import InvalidInputError, MismatchError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Changes, Weights
from deltasync.replica.target import Damage, Staged
from deltasync.torch.module import ModuleTarget, _scatter
from deltasync.torch.tensors import host_bits, layout_of, named_tensors


def weights_of(module: Any) -> Weights:
    """A copy of the bits of a module."""
    tensors = named_tensors(module)
    layout = layout_of(tensors)
    return Weights(layout, tuple(host_bits(tensors[t.name], t.dtype).copy() for t in layout.tensors))


def same(module: Any, weights: Weights) -> bool:
    found = weights_of(module)
    return found.layout == weights.layout and all(
        np.array_equal(a, b) for a, b in zip(found.arrays, weights.arrays, strict=True)
    )


class Tied(nn.Module):
    """Weights that have two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 40, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


def strided() -> dict[str, torch.Tensor]:
    return {
        "transposed": torch.randn(6, 10).to(torch.bfloat16).t(),
        "columns": torch.randn(8, 12)[:, ::3],
        "three": torch.randn(4, 5, 6).permute(2, 0, 1),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 3),
        "fp8": torch.randn(7, 9).to(torch.float8_e4m3fn).t(),
        "bool": torch.rand(5, 5) > 0.5,
        "wide": torch.randn(3, 4, dtype=torch.float64),
    }


MODULES = {
    "a module with ties": Tied,
    "strides of all kinds": strided,
    "compiled": lambda: torch.compile(Tied()),
    "in parts": lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3).half()),
}


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())
def test_follow_a_feed_bit_by_bit(make: Any) -> None:
    module = make()
    feed = Feed()
    feed.anchor(weights_of(module))
    for seed in range(1, 4):
        old = feed.states[-1]
        arrays = changed({t.name: a for t, a in zip(old.layout.tensors, old.arrays, strict=True)}, seed=seed)
        feed.delta(Weights(old.layout, tuple(arrays[t.name] for t in old.layout.tensors)))
    other = make()
    target = ModuleTarget(other)
    replica = follower(feed.store, target)
    assert (target.version, target.engine) == (None, "torch")
    for version in (0, 1, 3, 2):
        replica.advance(to=version)
        assert target.version == version
        assert same(other, feed.states[version])
    assert replica.scrub() == []


@pytest.mark.parametrize("dtype", sorted(TORCH_TYPES.keys() & DTYPES.keys()))
@pytest.mark.parametrize("is_contiguous", [True, False])
def test_every_type_and_any_bits(dtype: str, is_contiguous: bool) -> None:
    """Sparse and whole, with later changes that win; NaNs and signed zeros are bits like others."""
    spec = TensorSpec("x", DTYPES[dtype], (30, 20))
    rng = np.random.default_rng(3)
    # Of a bool only the last bit counts.
    most = 2 if dtype == "BOOL" else 256
    old, one, two = (rng.integers(0, most, spec.nbytes, np.uint8).view(spec.dtype.bits_dtype) for _ in range(3))
    weights = Weights(Layout.of([spec]), (old,))
    tensor = torch.zeros((30, 20) if is_contiguous else (20, 30), dtype=TORCH_TYPES[dtype])
    tensor = tensor if is_contiguous else tensor.t()
    target = ModuleTarget({"x": tensor})
    feed = Feed.of(1)

    def become(changes: tuple[Changes, ...] | None, edges: int) -> None:
        staged = Staged(feed.log.read(0), changes, None if changes is None else 0, weights, None, dict, edges)
        target.stage(staged)
        target.commit(staged)

    become(None, 0)
    assert np.array_equal(host_bits(tensor, spec.dtype), old)
    runs = np.array([[0, 100, 500]], np.int64)
    first = np.sort(rng.choice(500, 90, replace=False)).astype(np.uint32)
    second = np.sort(rng.choice(500, 90, replace=False)).astype(np.uint32)
    assert np.intersect1d(first, second).size > 3
    wanted = old.copy()
    wanted[100 + first] = one[:90]
    wanted[100 + second] = two[:90]
    become((Changes(runs, first, one[:90]), Changes(runs, second, two[:90])), 2)
    assert np.array_equal(host_bits(tensor, spec.dtype), wanted)
    become((Changes(np.array([[0, 7, 11]], np.int64), None, one[:11]),), 1)
    wanted[7:18] = one[:11]
    assert np.array_equal(host_bits(tensor, spec.dtype), wanted)


def test_no_element_is_written_twice_at_once() -> None:
    """Which of two writes wins is for a device to choose."""
    parts = [
        (np.array([1, 4], np.uint32), np.array([10, 11], np.uint16)),
        (np.array([0, 4], np.uint32), np.array([12, 13], np.uint16)),
    ]
    write = _scatter(torch.zeros(6, dtype=torch.bfloat16), parts, is_disjoint=False)
    assert write.indices is not None
    assert dict(zip(write.indices.tolist(), write.values.tolist(), strict=True)) == {0: 12, 1: 10, 4: 13}
    assert len(write.indices) == 3


def test_parameters_stay_the_same_objects() -> None:
    feed, module = Feed(), Tied()
    feed.anchor(weights_of(module))
    feed.delta(Weights(feed.states[0].layout, tuple(a ^ a.dtype.type(1) for a in feed.states[0].arrays)))
    places = {name: p.data_ptr() for name, p in module.named_parameters()}
    follower(feed.store, ModuleTarget(module)).advance()
    assert places == {name: p.data_ptr() for name, p in module.named_parameters()}
    assert module.head.weight is module.embed.weight
    assert module.embed.weight.requires_grad
    assert same(module, feed.states[1])


def test_only_the_commit_is_held() -> None:
    lock, held = threading.Lock(), []

    class Watched(ModuleTarget):
        def stage(self, staged: Staged) -> None:
            held.append(lock.locked())
            super().stage(staged)

    class Hold:
        def __enter__(self) -> None:
            assert lock.acquire(timeout=LONG_S)
            held.append(target.version)

        def __exit__(self, *error: object) -> None:
            held.append(target.version)
            lock.release()

    feed = Feed.of(1)
    target = Watched({n: torch.zeros(a.shape, dtype=TORCH[n]) for n, a in state().items()}, hold=Hold())
    follower(feed.store, target).advance()
    assert held == [False, None, 0]
    assert not lock.locked()


TORCH = {spec.name: TORCH_TYPES[spec.dtype.name] for spec in Weights.of(state()).layout.tensors}

WRONG = {
    "another type": ({"x": torch.zeros(3, dtype=torch.float16)}, r"BF16\[3\]|F16"),
    "another shape": ({"x": torch.zeros(4, dtype=torch.bfloat16)}, "'x' differs"),
    "another name": ({"y": torch.zeros(3, dtype=torch.bfloat16)}, "'x' differs: not in the module"),
    "one more": ({"x": torch.zeros(3, dtype=torch.bfloat16), "y": torch.zeros(1)}, "'y' differs"),
}


@pytest.mark.parametrize(("tensors", "message"), WRONG.values(), ids=WRONG.keys())
def test_another_model_is_refused(tensors: dict[str, torch.Tensor], message: str) -> None:
    layout = Layout.of([TensorSpec("x", DTYPES["BF16"], (3,))])
    with pytest.raises(MismatchError, match=message):
        ModuleTarget(tensors).require(layout)
    ModuleTarget({"x": torch.zeros(3, dtype=torch.bfloat16)}).require(layout)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.bfloat16, torch.float32])
def test_a_scrub_compares_bits(dtype: torch.dtype) -> None:
    """A zero that lost its sign differs; a NaN that stays as it is does not."""
    tensors = {"x": torch.tensor([-0.0, float("nan"), 1.0]).to(dtype)}
    feed = Feed()
    feed.anchor(weights_of(tensors))
    replica = follower(feed.store, ModuleTarget(tensors))
    replica.advance()
    assert replica.scrub() == []
    tensors["x"][0] = 0.0
    assert replica.scrub() == [Damage("x", 1)]
    assert same(tensors, feed.states[0])


def test_a_commit_without_a_stage() -> None:
    feed = Feed.of(1)
    target = ModuleTarget({"x": torch.zeros(3)})
    staged = Staged(feed.log.read(0), (), 0, feed.states[0], None, dict)
    with pytest.raises(InvalidInputError, match="not staged"):
        target.commit(staged)


def test_a_failed_write_leaves_no_version() -> None:
    feed = Feed.of(2)
    tensors = {n: torch.zeros(a.shape, dtype=TORCH[n]) for n, a in state().items()}
    target = ModuleTarget(tensors)
    follower(feed.store, target).advance(to=0)
    # Elements that share their memory: torch refuses to write them.
    whole, tensors["packed"] = tensors["packed"], torch.zeros(1, dtype=torch.uint8).expand(9, 3)
    replica = follower(feed.store, target)
    with pytest.raises(RuntimeError):
        replica.advance()
    assert target.version is None
    tensors["packed"] = whole
    replica.advance()
    assert same(tensors, feed.states[1])


def test_tensors_of_inference_mode() -> None:
    feed = Feed.of(3)
    with torch.inference_mode():
        tensors = {n: torch.zeros(a.shape, dtype=TORCH[n]) for n, a in state().items()}
    target = ModuleTarget(tensors)
    replica = follower(feed.store, target)
    for version in (0, 1, 2):
        replica.advance(to=version)
        assert same(tensors, feed.states[version])


def test_tensors_without_data() -> None:
    with pytest.raises(InvalidInputError, match="'x' has no data"):
        ModuleTarget({"x": torch.zeros(3, device="meta")}).require(Layout.of([TensorSpec("x", DTYPES["F32"], (3,))]))


@pytest.mark.parametrize("hold", [7, "lock", threading.Lock().acquire])
def test_a_hold_must_be_a_context_manager(hold: object) -> None:
    with pytest.raises(InvalidInputError, match="hold must be a context manager"):
        ModuleTarget({"w": torch.zeros(2)}, hold=hold)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "feed", "cast"),
    [
        (torch.float32, torch.bfloat16, "module.bfloat16()"),
        (torch.bfloat16, torch.float32, "module.float()"),
        (torch.float32, torch.float16, "module.half()"),
        (torch.float32, torch.float8_e4m3fn, "module.to(torch.float8_e4m3fn)"),
    ],
)
def test_a_module_of_another_type_is_refused_with_the_cast_that_fits(
    module: torch.dtype, feed: torch.dtype, cast: str
) -> None:
    def layout(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        return {"a": torch.zeros(3, dtype=dtype), "b": torch.zeros(2, dtype=torch.int64)}

    with pytest.raises(MismatchError) as caught:
        ModuleTarget(layout(module)).require(layout_of(layout(feed)))
    assert f"call {cast} before you follow" in str(caught.value.hint)
    assert caught.value.rule == "layout.differs"


def test_a_cast_is_not_proposed_where_it_does_not_help() -> None:
    wanted = layout_of({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.float16)})
    for other in ({"a": torch.zeros(4)}, {"x": torch.zeros(3)}, {"a": torch.zeros(3), "b": torch.zeros(2)}):
        with pytest.raises(MismatchError) as caught:
            ModuleTarget(other).require(wanted)
        assert "call module" not in str(caught.value.hint)
