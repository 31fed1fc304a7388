"""The shadow, in memory and in a mapped file."""

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.changes import by_tensor
from support.feeds import paper
from support.helpers import changed, state

from deltasync.checkpoint import create_file
from deltasync.errors import InvalidInputError
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.state import State
from deltasync.trainer.capture import capture, copy_into, lock_shadow, shadow_weights

HEAD: Manifest = paper("anchor", 3)


def equal(a: Weights, b: Weights) -> bool:
    return a.layout == b.layout and all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


@pytest.mark.parametrize("is_mapped", [False, True], ids=["memory", "mapped"])
def test_the_bits_before_an_advance_take_it_back(is_mapped: bool, tmp_path: Path) -> None:
    old, new = Weights.of(state()), Weights.of(changed(state()))
    weights = shadow_weights(old.layout, tmp_path / "shadow" if is_mapped else None)
    copy_into(weights, old)
    shadow = State(weights)
    missed = shadow.missed()
    found = capture(weights, new)
    before = shadow.bits_before(found)
    shadow.apply(found, HEAD)
    assert equal(weights, new)
    assert shadow.at is HEAD
    assert missed == [found]
    assert all(a.held is b.held for a, b in zip(before, found, strict=True))
    for name, (indices, values) in by_tensor(old.layout, before).items():
        assert np.array_equal(values, old.arrays[old.layout.ordinals[name]][indices])
    shadow.apply(before, HEAD)
    assert equal(weights, old)


def test_a_mapped_shadow_is_a_safetensors_file(tmp_path: Path) -> None:
    """All tensors are mapped, also those of odd sizes in front of wide ones, and so all bits are in the file."""
    path = tmp_path / "shadow.safetensors"
    wanted = Weights.of(changed({**state(), "a.odd": np.arange(3, dtype=np.uint8), "b.wide": np.arange(3.0)}))
    copy_into(shadow_weights(wanted.layout, path), wanted)
    assert equal(shadow_weights(wanted.layout, path), wanted)
    # The safetensors library reads it. NumPy has no bfloat16 and fp8, so only the other types are compared.
    plain = {n: a for n, a in state().items() if a.dtype.name in ("float32", "uint8", "int64")}
    other = Weights.of(plain)
    copy_into(shadow_weights(other.layout, path), other)
    read = load_file(path)
    assert read.keys() == plain.keys()
    assert all(np.array_equal(read[name], array) for name, array in plain.items())


FILES = {
    "of another layout": lambda path: copy_into(shadow_weights(Weights.of({"x": np.ones(9)}).layout, path), X),
    "cut off": lambda path: path.write_bytes(_whole(path)[:-5]),
    "missing": lambda path: None,
}
X = Weights.of({"x": np.ones(9)})


def _whole(path: Path) -> bytes:
    copy_into(shadow_weights(Weights.of(state()).layout, path), Weights.of(state()))
    return path.read_bytes()


FOREIGN = {
    "a checkpoint of the same layout": lambda path: create_file(path, Weights.of(state()).layout.tensors),
    "a checkpoint of another layout": lambda path: create_file(path, X.layout.tensors),
    "empty": lambda path: path.write_bytes(b""),
    "not safetensors": lambda path: path.write_bytes(b"\xff" * 4096),
    "a folder": lambda path: path.mkdir(),
    "a link": lambda path: (_whole(path.with_name("other")), path.symlink_to("other")),
    "a FIFO": os.mkfifo,
}


@pytest.mark.parametrize("make", FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_a_shadow_stays_as_it_is(make: object, tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    assert callable(make)
    make(path)
    before = {p.name: p.read_bytes() if p.is_file() else p.lstat().st_mode for p in tmp_path.iterdir()}
    with pytest.raises(InvalidInputError, match="not a mirror or a shadow"):
        shadow_weights(Weights.of(state()).layout, path)
    with pytest.raises(InvalidInputError, match="not a mirror or a shadow"):
        lock_shadow(path)
    assert {p.name: p.read_bytes() if p.is_file() else p.lstat().st_mode for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("spoil", FILES.values(), ids=FILES.keys())
def test_a_file_of_no_use_is_replaced_by_zeros(spoil: object, tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    assert callable(spoil)
    spoil(path)
    weights = shadow_weights(Weights.of(state()).layout, path)
    assert not any(array.any() for array in weights.arrays)
    assert [item.name for item in tmp_path.iterdir()] == ["shadow"]


def test_a_shadow_that_a_killed_process_began_is_removed(tmp_path: Path) -> None:
    layout = Weights.of(state()).layout
    shadow_weights(layout, tmp_path / "shadow")
    os.rename(tmp_path / "shadow", tmp_path / ".shadow.0123456789ab.tmp")
    (tmp_path / ".shadow.ba9876543210.tmp").write_text("precious")
    shadow_weights(layout, tmp_path / "shadow")
    assert {item.name for item in tmp_path.iterdir()} == {".shadow.ba9876543210.tmp", "shadow"}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="nowhere is not a folder"):
        shadow_weights(X.layout, tmp_path / "nowhere" / "shadow")
