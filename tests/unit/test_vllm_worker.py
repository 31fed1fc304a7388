"""The live weights of workers, read and written in checkpoint coordinates: as if they had been loaded from scratch."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.loading import Tensors, Workers, changed, changes_between, reloading, save, tensors, weights_of

from deltasync.errors import CorruptError, InvalidInputError, MismatchError
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.vllm import worker
from deltasync.vllm.stage import Segment, write_stage
from deltasync.vllm.target import EngineMap, Rank

__all__ = ["reloading"]

SIZES = [1, 2]
PACKED = ["packed.a", "packed.b"]


def described(workers: Workers, state: Tensors) -> EngineMap:
    layout = weights_of(state).layout
    found = EngineMap(
        layout, [Rank.from_json(description) for description in workers.call("describe", layout.to_json())]
    )
    found.require_served()
    return found


def proved(workers: Workers, state: Tensors, truth: Path) -> EngineMap:
    found = described(workers, state)
    for names in workers.call("prove", str(truth)):
        found.keep(names)
    return found


def become(workers: Workers, known: EngineMap, old: Tensors, new: Tensors, folder: Path) -> list[str]:
    """Write what changed through the map; the tensors that it does not know."""
    changes = changes_between(weights_of(old), weights_of(new))
    paths = [folder / f"stage-{rank}" for rank in range(known.ranks)]
    for rank, path in enumerate(paths):
        write_stage(path, known.segments(rank, changes))
    workers.call("prepare", [str(path) for path in paths])
    workers.call("scatter")
    return known.touched_unknown(changes)


def by_torch(flat: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """As on an accelerator."""
    worker.overwrite_on_device(flat, worker.wide(positions), values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("overwrite", [worker.overwrite, by_torch])
def test_changes_end_where_a_new_start_would_put_them(
    size: int,
    overwrite: Callable[..., None],
    every_kernels: str,
    reloading: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Version after version, from none to all elements; bit by bit, whatever the bits mean."""
    monkeypatch.setattr(worker, "overwrite", overwrite)
    names = ["cast", "quantized"]
    state = tensors(0, *names)
    workers = Workers(state, size=size, odd_names=names)
    known = proved(workers, state, save(state, tmp_path / "truth.safetensors"))
    assert known.unknown == ["cast.weight", *PACKED, "quantized.weight"]
    places = [[p.data_ptr() for p in model.parameters()] for model in workers.models]
    for version, share in enumerate((0.1, 0.02, 0.0, 1.0, 0.3)):
        new = changed(state, version, share)
        unknown = become(workers, known, state, new, tmp_path)
        if unknown:
            mirror = save(new, tmp_path / f"mirror-{version}.safetensors")
            workers.call("load", str(mirror), unknown)
        assert workers.hold(new)
        assert share == 0.0 or not workers.hold(state)
        state = new
    assert places == [[p.data_ptr() for p in model.parameters()] for model in workers.models]


@pytest.mark.parametrize("size", SIZES)
def test_later_changes_win(size: int, tmp_path: Path) -> None:
    one = tensors(0)
    two = changed(one, 1, 0.3)
    three = changed(two, 2, 0.3)
    workers = Workers(one, size=size)
    known = described(workers, one)
    known.keep(set(one) - set(PACKED))
    states = [weights_of(state) for state in (one, two, three)]
    changes = (*changes_between(states[0], states[1]), *changes_between(states[1], states[2]))
    for rank in range(size):
        write_stage(tmp_path / str(rank), known.segments(rank, changes))
    workers.call("prepare", [str(tmp_path / str(rank)) for rank in range(size)])
    workers.call("scatter")
    workers.call("scatter")
    assert workers.hold({name: one[name] if name in PACKED else three[name] for name in one})


@pytest.mark.parametrize("size", SIZES)
def test_whole_tensors(size: int, tmp_path: Path) -> None:
    """Of a model that holds something else."""
    old, new = tensors(0), tensors(1)
    workers = Workers(old, size=size)
    known = described(workers, old)
    known.keep(set(old) - set(PACKED))
    mirror = str(save(new, tmp_path / "mirror.safetensors"))
    workers.call("copy", mirror, known.known)
    assert workers.hold({name: old[name] if name in PACKED else new[name] for name in old})
    assert workers.call("compare", mirror, known.known, False) == [[]] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("old_type", [torch.float32, torch.float16])
def test_a_feed_of_another_type_than_the_model(size: int, old_type: torch.dtype, tmp_path: Path) -> None:
    """Values are cast as loading casts them; with NaNs, infinities and values that lie between two."""
    one = tensors(0, dtype=old_type)
    two = changed(one, 1, 0.3)
    truth = save(one, tmp_path / "truth.safetensors")
    workers = Workers(one, size=size)
    known = proved(workers, one, truth)
    assert known.unknown == PACKED
    become(workers, known, one, two, tmp_path)
    assert workers.hold({name: one[name] if name in PACKED else two[name] for name in one}, is_cast=True)
    mirror = str(save(two, tmp_path / "mirror.safetensors"))
    assert workers.call("compare", mirror, known.known, False) == [[]] * size
    workers.call("copy", str(truth), known.known)
    assert workers.hold(one, is_cast=True)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("piece", [1, 5, 1 << 24])
def test_a_flipped_bit_is_found_and_repaired(
    size: int, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "_COMPARE_ELEMENTS", piece)
    state = tensors(0)
    workers = Workers(state, size=size)
    known = described(workers, state)
    known.keep(set(state) - set(PACKED))
    mirror = str(save(state, tmp_path / "mirror.safetensors"))
    assert workers.call("compare", mirror, known.known, False) == [[]] * size
    last = workers.models[-1]
    # Two elements of one expert, one that is a NaN, one of a part that every worker has.
    last.w13.weight.data[1, -1].view(torch.int16)[2:4] ^= 1 << 14
    last.embed.weight.data.view(torch.int16)[0, 0] ^= 1
    last.qkv.weight.data.view(torch.int16)[-1, -1] ^= 1
    ordinals = known.layout.ordinals
    wanted = [[ordinals["embed.weight"], 1], [ordinals["experts.1.up.weight"], 2], [ordinals["v.weight"], 1]]
    found = workers.call("compare", mirror, known.known, False)
    assert [sorted(counts) for counts in found] == [[] for _ in range(size - 1)] + [sorted(wanted)]
    assert not workers.hold(state)
    # Only what is asked for.
    assert workers.call("compare", mirror, [ordinals["norm.weight"]], True) == [[]] * size
    assert not workers.hold(state)
    assert workers.call("compare", mirror, known.known, True) == found
    assert workers.hold(state)


@pytest.mark.parametrize("size", SIZES)
def test_only_what_lies_as_it_was_loaded_is_proved(size: int, tmp_path: Path) -> None:
    state = tensors(0)
    truth = save(state, tmp_path / "truth.safetensors")
    workers = Workers(state, size=size)
    described(workers, state)
    for names in workers.call("prove", str(truth)):
        assert set(names) == set(state) - set(PACKED)
    workers.models[-1].o.weight.data.copy_(workers.models[-1].o.weight.data.flip(1).clone())
    proved_by_rank = workers.call("prove", str(truth))
    assert [set(state) - set(names) for names in proved_by_rank] == [set(PACKED)] * (size - 1) + [{*PACKED, "o.weight"}]


def test_proofs_that_cannot_be_had(tmp_path: Path) -> None:
    state = tensors(0)
    workers = Workers(state)
    described(workers, state)
    assert workers.call("prove", str(tmp_path / "none")) == [None]
    assert workers.call("prove", "someone/some-model") == [None]
    (tmp_path / "empty").mkdir()
    assert workers.call("prove", str(tmp_path / "empty")) == [None]
    # One is missing there. One has another type, which says nothing of where it lies.
    other = {
        **{name: t for name, t in state.items() if name != "o.weight"},
        "norm.weight": state["norm.weight"].float(),
    }
    (names,) = workers.call("prove", str(save(other, tmp_path / "other.safetensors")))
    assert set(state) - set(names) == {*PACKED, "o.weight"}


def test_one_stage_for_a_worker_of_its_own(tmp_path: Path) -> None:
    """A worker that follows by itself has one stage, whatever its rank is."""
    state = tensors(0)
    new = changed(state, 1)
    workers = Workers(state, size=2)
    layout = weights_of(state).layout
    second = workers.runtimes[1]
    known = EngineMap(layout, [Rank.from_json(second.describe(layout.to_json()))], is_whole=False)
    known.require_served()
    known.keep(set(state) - set(PACKED))
    write_stage(tmp_path / "stage", known.segments(0, changes_between(weights_of(state), weights_of(new))))
    second.prepare([str(tmp_path / "stage")])
    second.scatter()
    wanted = Workers({name: state[name] if name in PACKED else new[name] for name in state}, size=2)
    ours, theirs = workers.models[1].bits(), wanted.models[1].bits()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_is_computed_is_never_known(is_whole: bool) -> None:
    """Also if the workers do not hold the whole model."""
    state = tensors(0, "quantized")
    layout = weights_of(state).layout
    descriptions = Workers(state, odd_names=["quantized"]).call("describe", layout.to_json())
    known = EngineMap(layout, [Rank.from_json(descriptions[0])], is_whole=is_whole)
    known.require_served()
    assert known.unknown == ["quantized.weight"]


def test_the_loader_is_given_whole_modules(reloading: list[str], tmp_path: Path) -> None:
    """A tensor brings along those that share its module, and leaves all others."""
    old, new = tensors(0, "quantized"), tensors(1, "quantized")
    mirror = str(save(new, tmp_path / "mirror.safetensors"))
    for names, taken in {
        "packed.b": set(PACKED),
        "k.weight": {"q.weight", "k.weight", "v.weight"},
        "experts.0.up.weight": {f"experts.{e}.{part}.weight" for e in range(3) for part in ("gate", "up")},
        "quantized.weight": {"quantized.weight"},
        "nothing": set(new),
    }.items():
        workers = Workers(old, odd_names=["quantized"])
        described(workers, old)
        reloading.clear()
        workers.call("load", mirror, [names])
        assert reloading == ["initialize", "finalize"]
        assert workers.hold({name: new[name] if name in taken else old[name] for name in old})


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
    "a place behind the end": segment(2, 0, 10_000, 2),
    "just behind the end": segment(0, 0, 24 * 8, 2),
    "far behind the end": segment(0, 1 << 32, 1, 2),
    "a storage that is not there": segment(99, 0, 1, 2),
    "values of another width": segment(0, 0, 1, 4),
    "narrow values": segment(0, 0, 1, 1),
}


@pytest.mark.parametrize("wrong", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_stage_of_another_model_is_refused_before_any_write(wrong: Segment, tmp_path: Path) -> None:
    state = tensors(0)
    workers = Workers(state)
    described(workers, state)
    # The good one comes first.
    write_stage(tmp_path / "stage", [segment(1, 0, 7, 2), wrong])
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
    "one is missing": (lambda s: s.pop("norm.weight"), r"nothing for the model's parameter 'norm\.weight'"),
    "one too many": (lambda s: s.update(bias=torch.zeros(3)), r"does not take bias: F32\[3\]: KeyError"),
    "fewer rows": (lambda s: s.update({"q.weight": s["q.weight"][:5]}), r"does not take q\.weight: BF16\[5, 8\]"),
    "more rows": (lambda s: s.update({"q.weight": torch.zeros(14, 8)}), r"only a part of q\.weight: F32\[14, 8\]"),
    "more columns": (lambda s: s.update({"o.weight": torch.zeros(8, 14)}), r"only a part of o\.weight: F32\[8, 14\]"),
    "other columns": (lambda s: s.update({"norm.weight": torch.zeros(9)}), r"does not take norm\.weight: F32\[9\]"),
    "integers": (
        lambda s: s.update({"norm.weight": torch.zeros(8).int()}),
        r"torch\.bfloat16 in place of norm\.weight: I32",
    ),
    "the first of two": (lambda s: s.update({"q.weight": s["q.weight"][:5], "a": torch.zeros(3)}), "does not take a:"),
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


def test_nothing_is_asked_of_an_empty_model() -> None:
    """A layout of one empty tensor fits: there is nothing to write."""
    layout = Layout.of([TensorSpec("nothing", DTYPES["BF16"], (0, 8))])
    descriptions = Workers(tensors(0)).call("describe", layout.to_json())
    assert EngineMap(layout, [Rank.from_json(descriptions[0])]).unknown == []
