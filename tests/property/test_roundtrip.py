"""States to blocks and back: exact, the same bytes however it is done, and digests that add up."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import repeats, strategies
from support.changes import ByTensor, in_blocks
from support.helpers import anchor_blocks, safetensors_bytes, same_bits
from support.strategies import random_bits, state_pair

import deltasync
from deltasync import blocks
from deltasync.blocks import overwrite
from deltasync.errors import MismatchError
from deltasync.format import limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import DTYPES, DType, Layout, TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Runs, Weights
from deltasync.kernels import available, kernels

CODECS = ["exp/1", "coo/1"]
pytestmark = pytest.mark.soak
some = settings(max_examples=repeats(60, soak=1000), deadline=None)

NUMPY_TYPES: dict[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "BOOL": np.bool_,
    **{n: f"<{n[0].lower()}{d.width}" for n, d in DTYPES.items() if n[1:].isdigit() and n != "BF16"},
}


@contextmanager
def small_blocks() -> Iterator[None]:
    """Limits so low that small states have many blocks."""
    with mock.patch.multiple(limits, CELL_ELEMENTS=48, BLOCK_CHANGES_SOFT=20, PLANES_ELEMENTS=100):
        yield


def copied(weights: Weights) -> Weights:
    return Weights(weights.layout, tuple(a.copy() for a in weights.arrays))


def equal(a: Weights, b: Weights) -> bool:
    return a.layout == b.layout and all(x.tobytes() == y.tobytes() for x, y in zip(a.arrays, b.arrays, strict=True))


def plain(found: list[Block]) -> list[tuple[Any, ...]]:
    return [(b.codec, b.runs.tolist(), b.changed, b.digest, b.data) for b in found]


def changed_of(old: Weights, new: Weights, index_type: Any = np.int64) -> ByTensor:
    """What an accelerator would report: nothing about tensors that did not change."""
    found = {}
    for spec, a, b in zip(old.layout.tensors, old.arrays, new.arrays, strict=True):
        at = np.flatnonzero(a != b)
        if len(at):
            found[spec.name] = (at.astype(index_type), b[at])
    return found


def state_of(weights: Weights) -> dict[str, np.ndarray]:
    return {
        t.name: a.view(NUMPY_TYPES[t.dtype.name]).reshape(t.shape)
        for t, a in zip(weights.layout.tensors, weights.arrays, strict=True)
    }


@pytest.mark.parametrize("codec", CODECS)
@some
@given(strategies.pairs())
def test_a_delta_gives_the_new_state(codec: str, pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    with small_blocks():
        found = blocks.encode_delta(old, new, codec=codec)
        staged, target = copied(old), copied(old)
        for changes in blocks.decode(old, found):
            overwrite(staged, changes)
        blocks.decode_into(target, old, found)
        again = copied(new)
        blocks.decode_into(again, old, found)
    assert equal(staged, new)
    assert equal(target, new)
    assert equal(again, new), "overwriting twice does no harm"
    assert sum((b.digest for b in found), blocks.digest(old)) == blocks.digest(new)
    assert equal(old, new) == (not found)


@some
@given(strategies.weights(), st.sampled_from([1, 3]))
def test_an_anchor_gives_the_state(state: Weights, threads: int) -> None:
    with small_blocks():
        found = anchor_blocks(state)
    target = Weights(state.layout, tuple(np.zeros_like(a) for a in state.arrays))
    blocks.decode_into(target, state, found, relative=False)
    assert equal(target, state)
    assert sum((b.digest for b in found), layout_digest(state.layout)) == blocks.digest(state)
    assert sum(b.changed for b in found) == state.layout.elements


@some
@given(strategies.pairs(), st.sampled_from([np.int64, np.int32, np.uint32, np.uint64]), st.randoms())
def test_known_changes_give_the_same_blocks(pair: tuple[Weights, Weights], index_type: Any, order: Random) -> None:
    """Also if only the tensors that changed are given, in any order."""
    old, new = pair
    with small_blocks():
        detected = blocks.encode_delta(old, new)
        changed = list(changed_of(old, new, index_type).items())
        order.shuffle(changed)
        encoded = list(blocks.encode_changes(old, in_blocks(old.layout, dict(changed))))
    assert plain(encoded) == plain(detected)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=20, deadline=None)
@given(strategies.pairs())
def test_threads_do_not_change_the_bytes(codec: str, pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    with small_blocks():
        found = [plain(blocks.encode_delta(old, new, codec=codec)) for n in (1, 2, 5, 1)]
    assert all(f == found[0] for f in found)


@pytest.mark.skipif(available() == ["reference"], reason="takes long without the native kernels")
@pytest.mark.parametrize("codec", CODECS)
def test_states_longer_than_a_block(codec: str) -> None:
    elements = limits.BLOCK_ELEMENTS_MAX
    layout = Layout.of([TensorSpec("a", DTYPES["I8"], (elements - 5,)), TensorSpec("b", DTYPES["I8"], (3, 50))])
    old = Weights(layout, tuple(np.zeros(t.elements, np.uint8) for t in layout.tensors))
    new = copied(old)
    new.arrays[0][[0, 7, elements // 2, elements - 6]] = 1
    new.arrays[1][[4, 5, 149]] = 2
    found = blocks.encode_delta(old, new, codec=codec)
    assert len(found) == 2
    if codec == "exp/1":
        assert plain(list(blocks.encode_changes(old, in_blocks(layout, changed_of(old, new))))) == plain(found)
    target = copied(old)
    blocks.decode_into(target, old, found)
    assert equal(target, new)
    assert sum((b.digest for b in found), blocks.digest(old)) == blocks.digest(new)


@pytest.mark.parametrize("codec", CODECS)
@some
@given(strategies.pairs())
def test_one_shot(codec: str, pair: tuple[Weights, Weights]) -> None:
    old, new = map(state_of, pair)
    delta = deltasync.diff(old, new, codec=codec)
    assert same_bits(deltasync.apply(old, delta), new)
    assert deltasync.inspect(delta).digest == deltasync.digest(new)
    if same_bits(old, new):
        return
    with pytest.raises(MismatchError) as caught:
        deltasync.apply(new, delta)
    assert caught.value.rule == "payload.parent"


@pytest.mark.parametrize("codec", CODECS)
def test_a_wrong_parent_is_refused_before_anything_is_written(tmp_path: Path, codec: str) -> None:
    old, new = map(state_of, state_pair("BF16", 1000, 0.1))
    delta = deltasync.diff(old, new, codec=codec)
    wrong = {"w": old["w"].copy()}
    wrong["w"].view(np.uint16)[999] ^= 1
    checkpoint = tmp_path / "wrong.safetensors"
    checkpoint.write_bytes(safetensors_bytes(wrong))
    kept = checkpoint.read_bytes()
    with pytest.raises(MismatchError) as caught:
        deltasync.apply(checkpoint, delta, out=tmp_path / "out.safetensors")
    assert caught.value.rule == "payload.parent"
    assert [p.name for p in tmp_path.iterdir()] == ["wrong.safetensors"]
    assert checkpoint.read_bytes() == kept


ARRAYS: dict[str, Any] = {
    "not aligned": np.frombuffer(b"x" + np.arange(50, dtype="<f4").tobytes(), "<f4", 50, 1),
    "every third": np.arange(150, dtype="<f4")[::3],
    "backwards": np.arange(50, dtype="<f4")[::-1],
    "transposed": np.arange(60, dtype="<f4").reshape(5, 12).T,
    "the same everywhere": np.broadcast_to(np.float32(7), (5, 10)),
    "zero dimensions": np.array(3, "<f4"),
    "nothing": np.empty((0, 7), "<f4"),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_of_any_kind(array: np.ndarray) -> None:
    old, new = {"x": array}, {"x": np.array(array + np.float32(1))}
    assert same_bits(deltasync.apply(old, deltasync.diff(old, new)), new)
    assert same_bits(deltasync.apply(new, deltasync.diff(new, old)), old)


def shard_runs(shape: tuple[int, int], cuts: tuple[int, ...], *, by: str) -> list[Runs]:
    """A matrix in shards, cut between rows, between columns (a piece of every row), or anywhere."""
    rows, columns = shape
    total = {"rows": rows, "columns": columns, "anywhere": rows * columns}[by]
    edges = sorted({0, total, *(c % total for c in cuts)})
    spans = list(pairwise(edges))
    if by == "columns":
        return [np.array([(0, r * columns + a, b - a) for r in range(rows)]) for a, b in spans]
    step = columns if by == "rows" else 1
    return [np.array([(0, a * step, (b - a) * step)]) for a, b in spans]


@pytest.mark.parametrize("by", ["rows", "columns", "anywhere"])
@some
@given(
    strategies.dtypes(),
    st.tuples(st.integers(1, 40), st.integers(1, 60)),
    st.lists(st.integers(0, 2400), max_size=4).map(tuple),
    st.integers(0, 2**32 - 1),
)
def test_digests_of_shards_add_up(
    by: str, dtype: DType, shape: tuple[int, int], cuts: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout.of([TensorSpec("w", dtype, shape)])
    state = Weights(layout, (random_bits(rng, dtype, shape[0] * shape[1], "uniform"),))
    shards = shard_runs(shape, cuts, by=by)
    partial = [StateDigest(*kernels().digest(state.region(runs))) for runs in shards]
    assert sum(partial, layout_digest(layout)) == blocks.digest(state)


@some
@given(strategies.weights())
def test_the_digest_does_not_depend_on_threads_or_blocks(state: Weights) -> None:
    whole = blocks.digest(state)
    with small_blocks():
        assert blocks.digest(state) == whole
        assert blocks.digest(state) == whole


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_any_two_flipped_bits_change_the_digest(dtype: DType) -> None:
    layout = Layout.of([TensorSpec("w", dtype, (3000,))])
    old = Weights(layout, (random_bits(np.random.default_rng(0), dtype, 3000, "uniform"),))
    for bit in range(8 * dtype.width):
        for places in ([3, 4], [3, 1500], [0, 1024], [1023, 2999]):
            new = copied(old)
            new.arrays[0][places] ^= dtype.bits_dtype.type(1 << bit)
            assert blocks.digest(old) != blocks.digest(new), (bit, places)


def test_equal_bits_elsewhere_have_another_digest() -> None:
    """Names, types, shapes and places all count."""
    zeros = {"a": np.zeros(6, np.float32), "b": np.zeros(6, np.float32)}
    one = np.array([1, 0, 0, 0, 0, 0], np.float32)
    states = [
        zeros,
        {"a": one, "b": zeros["b"]},
        {"a": zeros["a"], "b": one},
        {"a": one[::-1], "b": zeros["b"]},
        {"a": one.view(np.int32), "b": zeros["b"]},
        {"a": one.reshape(2, 3), "b": zeros["b"]},
        {"a": one, "c": zeros["b"]},
    ]
    assert len({deltasync.digest(s) for s in states}) == len(states)
