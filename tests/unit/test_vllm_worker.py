"""The live weights of workers, read and written in checkpoint coordinates: as if they had been loaded from scratch."""

import weakref
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from served_model import Tensors, Workers, changed, changes_between, save, tensors, weights_of

from deltasync.engines import memory
from deltasync.engines.memory import Segment, write_stage
from deltasync.engines.probes import NamedTensors
from deltasync.errors import CorruptError, EngineError, InvalidInputError, MismatchError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.vllm import worker
from deltasync.vllm.target import EngineMap, Rank
from deltasync.vllm.worker import Twins, Window

SIZES = [1, 2]


def described(workers: Workers, state: Tensors) -> EngineMap:
    layout = weights_of(state).layout
    found = EngineMap(
        layout, [Rank.from_json(description) for description in workers.call("describe", layout.to_json())]
    )
    found.require_served()
    return found


def become(workers: Workers, known: EngineMap, old: Tensors, new: Tensors, folder: Path) -> bool:
    """Write what changed through the map; whether something had to be computed."""
    changes = changes_between(weights_of(old), weights_of(new))
    paths = [folder / f"stage-{rank}" for rank in range(len(known.ranks))]
    for rank, path in enumerate(paths):
        write_stage(path, known.segments(rank, changes))
    workers.call("prepare", [str(path) for path in paths])
    is_computed = known.touches_computed(changes)
    if is_computed:
        workers.call("refresh", str(save(new, folder / "mirror-of-the-new.safetensors")))
    workers.call("scatter")
    return is_computed


def ordinals_of(known: EngineMap) -> list[int]:
    return list(range(len(known.layout.tensors)))


def differing(workers: Workers, mirror: str, ordinals: list[int], repair: bool) -> list[dict[str, int]]:
    return [compared["differing"] for compared in workers.call("compare", mirror, ordinals, repair)]


def by_torch(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """As on an accelerator."""
    worker.overwrite_on_device(flat, worker.wide(positions), values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overwrite", [worker.overwrite, by_torch])
def test_changes_end_where_a_new_start_would_put_them(
    size: int,
    overwrite: Callable[..., None],
    every_kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version after version, from none to all elements; bit by bit, whatever the bits mean."""
    monkeypatch.setattr(worker, "overwrite", overwrite)
    names = ["cast", "quantized"]
    state = tensors(0, *names)
    workers = Workers(state, size=size, odd_names=names)
    known = described(workers, state)
    assert known.has_computed
    places = [[p.data_ptr() for p in model.parameters()] for model in workers.models]
    for version, share in enumerate((0.1, 0.02, 0.0, 1.0, 0.3)):
        new = changed(state, version, share)
        assert become(workers, known, state, new, tmp_path) is (share > 0.0)
        assert workers.hold(new)
        assert share == 0.0 or not workers.hold(state)
        state = new
    assert places == [[p.data_ptr() for p in model.parameters()] for model in workers.models]


def test_nothing_is_computed_where_copies_explain_all(tmp_path: Path) -> None:
    state = tensors(0)
    new = changed(state, 1)
    workers = Workers(state)
    known = described(workers, state)
    assert not known.has_computed
    assert become(workers, known, state, new, tmp_path) is False
    assert workers.hold(new)


@pytest.mark.parametrize("size", SIZES)
def test_later_changes_win(size: int, tmp_path: Path) -> None:
    one = tensors(0)
    two = changed(one, 1, 0.3)
    three = changed(two, 2, 0.3)
    workers = Workers(one, size=size)
    known = described(workers, one)
    states = [weights_of(state) for state in (one, two, three)]
    changes = (*changes_between(states[0], states[1]), *changes_between(states[1], states[2]))
    for rank in range(size):
        write_stage(tmp_path / str(rank), known.segments(rank, changes))
    workers.call("prepare", [str(tmp_path / str(rank)) for rank in range(size)])
    workers.call("scatter")
    workers.call("scatter")
    assert workers.hold(three)


@pytest.mark.parametrize("size", SIZES)
def test_whole_tensors(size: int, tmp_path: Path) -> None:
    """Of a model that holds something else."""
    names = ["quantized"]
    old, new = tensors(0, *names), tensors(1, *names)
    workers = Workers(old, size=size, odd_names=names)
    known = described(workers, old)
    mirror = str(save(new, tmp_path / "mirror.safetensors"))
    workers.call("refresh", mirror)
    workers.call("copy", mirror, ordinals_of(known))
    assert workers.hold(new)
    assert differing(workers, mirror, ordinals_of(known), False) == [{}] * size


def test_what_was_computed_for_a_version_that_did_not_go_live_is_dropped(tmp_path: Path) -> None:
    names = ["quantized"]
    old, abandoned = tensors(0, *names), tensors(1, *names)
    new = {**old, "norm.weight": changed(old, 2)["norm.weight"]}
    workers = Workers(old, odd_names=names)
    known = described(workers, old)
    workers.call("refresh", str(save(abandoned, tmp_path / "abandoned.safetensors")))
    write_stage(tmp_path / "stage", known.segments(0, changes_between(weights_of(old), weights_of(new))))
    workers.call("prepare", [str(tmp_path / "stage")])
    workers.call("scatter")
    assert workers.hold(new)


def test_what_was_prepared_is_freed_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["quantized"]
    old, new = tensors(0, *names), tensors(1, *names)
    workers = Workers(old, odd_names=names)
    known = described(workers, old)
    (runtime,) = workers.runtimes
    with monkeypatch.context() as failing:
        failing.setattr(worker, "overwrite", lambda flat, positions, values: None)
        with pytest.raises(EngineError, match="not those that were written"):
            become(workers, known, old, new, tmp_path)
    prepared = [weakref.ref(tensor) for _, *pair in runtime._staged for tensor in pair]
    prepared += [weakref.ref(tensor) for _, tensor in runtime._refreshed]
    assert len(prepared) > 1
    assert all(tensor() is not None for tensor in prepared), "a write that fails can be repeated"
    workers.call("scatter")
    assert workers.hold(new)
    assert [tensor for tensor in prepared if tensor() is not None] == []
    mirror = str(save(old, tmp_path / "mirror.safetensors"))
    workers.call("refresh", mirror)
    prepared = [weakref.ref(tensor) for _, tensor in runtime._refreshed]
    workers.call("copy", mirror, ordinals_of(known))
    assert workers.hold(old)
    assert [tensor for tensor in prepared if tensor() is not None] == []


def test_a_loader_that_writes_to_the_live_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors()
    workers = Workers(state)
    twins, live = workers.runtimes[0]._twins, workers.models[0]
    build = twins.build

    def build_and_write(weights: NamedTensors, window: Window) -> torch.nn.Module:
        live.norm.weight.data += 1
        return build(weights, window)

    monkeypatch.setattr(twins, "build", build_and_write)
    with pytest.raises(EngineError, match="the live model changed"):
        described(workers, state)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("old_type", [torch.float32, torch.float16])
def test_a_feed_of_another_type_than_the_model(size: int, old_type: torch.dtype, tmp_path: Path) -> None:
    """Values are cast as loading casts them; with NaNs, infinities and values that lie between two."""
    one = tensors(0, dtype=old_type)
    two = changed(one, 1, 0.3)
    workers = Workers(one, size=size)
    known = described(workers, one)
    assert not known.has_computed
    become(workers, known, one, two, tmp_path)
    assert workers.hold(two, is_cast=True)
    mirror = str(save(two, tmp_path / "mirror.safetensors"))
    assert differing(workers, mirror, ordinals_of(known), False) == [{}] * size
    workers.call("copy", str(save(one, tmp_path / "one.safetensors")), ordinals_of(known))
    assert workers.hold(one, is_cast=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [1, 5, 1 << 24])
def test_a_flipped_bit_is_found_and_repaired(
    size: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_COMPARE_ELEMENTS", piece)
    state = tensors(0, "quantized")
    workers = Workers(state, size=size, odd_names=["quantized"])
    known = described(workers, state)
    mirror = str(save(state, tmp_path / "mirror.safetensors"))
    compared = workers.call("compare", mirror, ordinals_of(known), False)
    assert [c["differing"] for c in compared] == [{}] * size
    assert sum(elements for c in compared for _, elements in c["elements"]) == known.elements
    last = workers.models[-1]
    # Two elements of one expert, one that is a NaN, one of a part that every worker has, one that was computed.
    last.w13.weight.data[1, -1].view(torch.int16)[2:4] ^= 1 << 14
    last.embed.weight.data.view(torch.int16)[0, 0] ^= 1
    last.qkv.weight.data.view(torch.int16)[-1, -1] ^= 1
    last.quantized.weight.data[0, 0] ^= 1
    wanted = {"embed.weight": 1, "experts.1.up.weight": 2, "v.weight": 1, "quantized.weight": 1}
    found = differing(workers, mirror, ordinals_of(known), False)
    assert found == [{} for _ in range(size - 1)] + [wanted]
    assert not workers.hold(state)
    # Only what is asked for.
    assert differing(workers, mirror, [known.layout.ordinals["norm.weight"]], True) == [{}] * size
    assert not workers.hold(state)
    assert differing(workers, mirror, ordinals_of(known), True) == found
    assert workers.hold(state)


def test_one_stage_for_a_worker_of_its_own(tmp_path: Path) -> None:
    """A worker that follows by itself has one stage, whatever its rank is."""
    state = tensors(0)
    new = changed(state, 1)
    workers = Workers(state, size=2)
    layout = weights_of(state).layout
    second = workers.runtimes[1]
    known = EngineMap(layout, [Rank.from_json(second.describe(layout.to_json()))], is_whole=False)
    known.require_served()
    write_stage(tmp_path / "stage", known.segments(0, changes_between(weights_of(state), weights_of(new))))
    second.prepare([str(tmp_path / "stage")])
    second.scatter()
    ours, theirs = workers.models[1].bits(), Workers(new, size=2).models[1].bits()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_write_that_does_not_arrive_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tensors(0)
    workers = Workers(state)
    known = described(workers, state)
    monkeypatch.setattr(worker, "overwrite", lambda flat, positions, values: None)
    with pytest.raises(EngineError, match="not those that were written"):
        become(workers, known, state, changed(state, 1), tmp_path)


def test_a_mirror_of_another_layout(tmp_path: Path) -> None:
    state = tensors(0)
    workers = Workers(state)
    described(workers, state)
    mirror = save({"norm.weight": state["norm.weight"]}, tmp_path / "mirror.safetensors")
    for method, *args in (("copy", [0]), ("compare", [0], True)):
        with pytest.raises(InvalidInputError, match=r"mirror\.safetensors has another layout"):
            workers.call(method, str(mirror), *args)
    assert workers.hold(state)


def segment(storage: int, first: int, last: int, width: int) -> Segment:
    return Segment(storage, first, np.array([0, last], np.uint32), np.array([1, 2], f"u{width}"))


HOSTILE = {
    "a place behind the end": segment(3, 0, 10_000, 2),
    "just behind the end": segment(1, 0, 24 * 8, 2),
    "far behind the end": segment(1, 1 << 32, 1, 2),
    "a storage that is not there": segment(99, 0, 1, 2),
    "values of another width": segment(1, 0, 1, 4),
    "narrow values": segment(1, 0, 1, 1),
}


@pytest.mark.parametrize("wrong", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_stage_of_another_model_is_refused_before_any_write(wrong: Segment, tmp_path: Path) -> None:
    state = tensors(0)
    workers = Workers(state)
    described(workers, state)
    # The good one comes first.
    write_stage(tmp_path / "stage", [segment(2, 0, 7, 2), wrong])
    with pytest.raises(CorruptError, match=f"storage {wrong.storage}"):
        workers.call("prepare", [str(tmp_path / "stage")])
    workers.call("scatter")
    assert workers.hold(state)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_both_ways_to_overwrite_agree(width: int, every_kernels: str) -> None:
    rng = np.random.default_rng(width)
    old, values = (torch.from_numpy(rng.integers(0, 256, 1000 * width, np.uint8).view(f"i{width}")) for _ in range(2))
    old, values = (old.view(torch.uint8), values.view(torch.uint8)) if width == 1 else (old, values)
    positions = torch.from_numpy(np.sort(rng.choice(1000, 300, replace=False)).astype(np.uint32).view(np.int32))
    ours, theirs = old.clone(), old.clone()
    worker.overwrite(ours, positions, values[:300])
    by_torch(theirs, positions, values[:300])
    assert torch.equal(ours, theirs)
    assert torch.equal(ours[positions.long()], values[:300])
    assert int((ours != old).sum()) <= 300


def test_positions_of_four_bytes_have_no_sign() -> None:
    positions = np.array([0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1], np.uint32)
    assert worker.wide(torch.from_numpy(positions.view(np.int32))).tolist() == positions.tolist()


OTHERS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "one is missing": (lambda s: s.pop("norm.weight"), r"nothing for elements of the model's parameter 'norm\.weight'"),
    "one too many": (lambda s: s.update(bias=torch.zeros(3)), r"does not take 'bias': KeyError"),
    "fewer rows": (lambda s: s.update({"q.weight": s["q.weight"][:5]}), r"does not take 'q\.weight'"),
    "more rows": (lambda s: s.update({"q.weight": torch.zeros(14, 8)}), r"only a part of q\.weight: F32\[14, 8\]"),
    "more columns": (lambda s: s.update({"o.weight": torch.zeros(8, 14)}), r"only a part of o\.weight: F32\[8, 14\]"),
    "other columns": (lambda s: s.update({"norm.weight": torch.zeros(9)}), r"does not take 'norm\.weight'"),
    "integers": (
        lambda s: s.update({"norm.weight": torch.zeros(8).int()}),
        r"torch\.bfloat16 in place of norm\.weight: I32",
    ),
    "the first of two": (lambda s: s.update({"q.weight": s["q.weight"][:5], "a": torch.zeros(3)}), "does not take 'a'"),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_model_is_refused(size: int, change: Callable[[Tensors], object], message: str) -> None:
    state = tensors(0)
    workers = Workers(state, size=size)
    other = dict(state)
    change(other)
    with pytest.raises(MismatchError, match=message):
        described(workers, other)
    assert workers.hold(state)


LAYERS = 28


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Twins:
    """Twins of a model with 28 layers, each of which can be built without the others. A window is 1,000 bytes."""
    monkeypatch.setattr(worker, "_WINDOW_BYTES", 1000)
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: True)
    model = SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS)
    parallel = SimpleNamespace(enable_eplb=False)
    return Twins(SimpleNamespace(model_config=model, parallel_config=parallel, speculative_config=None))


def layout(*, embeddings: int, layer: int) -> Layout:
    """Sizes in bytes."""
    names = {"model.embed_tokens.weight": embeddings, "model.norm.weight": 2}
    names |= {f"model.layers.{n}.mlp.weight": layer for n in range(LAYERS)}
    return Layout.of(TensorSpec(name, DTYPES["BF16"], (size // 2,)) for name, size in names.items())


def nbytes(window: Window) -> int:
    return sum(spec.nbytes for spec in window.tensors)


@pytest.mark.parametrize(
    ("embeddings", "layer", "first"),
    [(100, 100, 8), (998, 100, 1), (5000, 100, 1), (100, 3000, 1), (0, 60, 16)],
)
def test_a_window_has_a_bounded_size(built: Twins, embeddings: int, layer: int, first: int) -> None:
    given = layout(embeddings=embeddings, layer=layer)
    windows = built.windows(given)
    assert (windows[0].first, windows[0].end, windows[-1].end) == (0, first, LAYERS)
    assert all(a.end == b.first for a, b in pairwise(windows))
    assert sorted(spec.name for window in windows for spec in window.tensors) == [t.name for t in given.tensors]
    assert nbytes(windows[0]) <= max(1000, embeddings + 2 + layer)
    assert all(nbytes(window) <= max(1000, layer) for window in windows[1:])


def test_a_small_model_is_one_window(built: Twins) -> None:
    assert built.windows(layout(embeddings=100, layer=20)) == [Window(layout(embeddings=100, layer=20).tensors)]


def test_a_model_that_cannot_be_built_with_few_layers(built: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layers have no experts, and vLLM looks for some."""
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: window.end > 4)
    given = layout(embeddings=5000, layer=100)
    assert [(window.first, window.end) for window in built.windows(given)] == [(0, 10), (10, 20), (20, 28)]
    monkeypatch.setattr(Twins, "_has", lambda self, window, layers: window.end == layers)
    assert built.windows(given) == [Window(given.tensors)]
