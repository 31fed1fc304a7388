from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
from support.helpers import (
    BF16,
    LAYOUT,
    State,
    anchor_blocks,
    changed,
    safetensors_bytes,
    same_bits,
    shard_payload,
    state,
    write_sharded,
)

import deltasync
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.format.payload import Payload, PayloadHeader, write_payload
from deltasync.format.weights import Weights

CODECS = ["exp/1", "coo/1"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_round_trip(codec: str, share: float) -> None:
    old, new = state(), changed(state(), share=share)
    kept = {n: a.copy() for n, a in old.items()}
    delta = deltasync.diff(old, new, codec=codec)
    assert same_bits(deltasync.apply(old, delta), new)
    assert same_bits(old, kept), "the old state stays as it is"
    assert deltasync.diff(old, new, codec=codec) == delta


SPECIAL = {
    "-0.0 to +0.0": ([-0.0, 1.0], [0.0, 1.0], 1),
    "an unchanged NaN": ([np.nan, 1.0], [np.nan, 1.0], 0),
    "infinities": ([np.inf, -np.inf], [-np.inf, np.inf], 2),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize(("before", "after", "count"), SPECIAL.values(), ids=SPECIAL.keys())
@pytest.mark.usefixtures("every_kernels")
def test_bits_are_compared_not_numbers(dtype: Any, before: list[float], after: list[float], count: int) -> None:
    old, new = {"x": np.array(before).astype(dtype)}, {"x": np.array(after).astype(dtype)}
    delta = deltasync.diff(old, new)
    assert deltasync.inspect(delta).changed == count
    assert same_bits(deltasync.apply(old, delta), new)


def test_nan_payloads_survive() -> None:
    old = {"x": np.array([0x7FC00000, 0x7FC00001, 5], "<u4").view(np.float32)}
    new = {"x": np.array([0x7FC00001, 0x7FC00001, 0xFFFFFFFF], "<u4").view(np.float32)}
    assert same_bits(deltasync.apply(old, deltasync.diff(old, new)), new)


def test_any_dict_of_arrays() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    old = {"z": base.T, "a": base[:, ::2], "s": np.array(1.5, np.float16), "b": np.array([True, False])}
    new = {n: np.array(a) for n, a in old.items()}
    new["z"][1, 1], new["b"][0] = 99, False
    got = deltasync.apply(old, deltasync.diff(old, new))
    assert same_bits(got, new)
    assert list(got) == list(old)
    got["a"][:] = 0
    assert base.any(), "new arrays share nothing with the old ones"


def test_empty_states() -> None:
    for empty in ({}, {"x": np.empty((0, 3), np.float32)}):
        delta = deltasync.diff(empty, empty)
        assert same_bits(deltasync.apply(empty, delta), empty)


def test_the_digest_follows_the_delta() -> None:
    old, new = state(), changed(state())
    found = deltasync.inspect(deltasync.diff(old, new))
    assert found.parent_digest == deltasync.digest(old)
    assert found.digest == deltasync.digest(new)
    assert found.digest != found.parent_digest


def test_plain_payloads_apply_with_a_few_lines() -> None:
    old, new = state(), changed(state())
    got = {n: a.copy() for n, a in old.items()}
    parts = dict(safetensors.deserialize(deltasync.diff(old, new, codec="coo/1")))
    for name in (n.removesuffix(".indices") for n in parts if n.endswith(".indices")):
        indices = np.frombuffer(parts[f"{name}.indices"]["data"], "<i4")
        got[name].reshape(-1)[indices] = np.frombuffer(parts[f"{name}.values"]["data"], got[name].dtype)
    assert same_bits(got, new)


def checkpoints(tmp_path: Path) -> tuple[State, State, Path, Path]:
    old, new = state(), changed(state())
    write_sharded(tmp_path / "old", old)
    (tmp_path / "new.safetensors").write_bytes(safetensors_bytes(new))
    return old, new, tmp_path / "old", tmp_path / "new.safetensors"


def test_checkpoints_and_dicts_mix(tmp_path: Path) -> None:
    old, new, old_path, new_path = checkpoints(tmp_path)
    delta = deltasync.diff(old, new)
    assert deltasync.diff(old_path, new_path) == delta
    assert deltasync.diff(str(old_path), new) == delta
    assert deltasync.diff(old, new_path) == delta
    assert deltasync.digest(old_path) == deltasync.digest(old)


@pytest.mark.parametrize("codec", CODECS)
def test_apply_writes_a_checkpoint_of_the_same_structure(tmp_path: Path, codec: str) -> None:
    old, new, old_path, _ = checkpoints(tmp_path)
    (tmp_path / "d").write_bytes(deltasync.diff(old, new, codec=codec))
    assert deltasync.apply(old_path, tmp_path / "d", out=tmp_path / "out") == {}
    assert deltasync.digest(tmp_path / "out") == deltasync.digest(new)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in old_path.iterdir())


def test_apply_to_a_checkpoint_gives_raw_bits_where_numpy_has_no_type(tmp_path: Path) -> None:
    old, new, old_path, _ = checkpoints(tmp_path)
    got = deltasync.apply(old_path, deltasync.diff(old, new))
    assert got.keys() == new.keys()
    for name, array in new.items():
        known = array.dtype.kind != "V"
        assert got[name].dtype == (array.dtype if known else np.dtype(f"<u{array.itemsize}"))
        assert got[name].shape == array.shape
        assert got[name].tobytes() == array.tobytes()


def test_an_anchor_needs_the_layout_only(tmp_path: Path) -> None:
    new = state(5)
    weights = Weights.of(new)
    header = PayloadHeader("anchor", weights.layout, None, deltasync.digest(new))
    anchor = write_payload(header, anchor_blocks(weights))
    assert same_bits(deltasync.apply(state(0), anchor), new)
    assert same_bits(deltasync.apply(new, anchor), new)
    with pytest.raises(MismatchError):
        deltasync.apply({"x": np.zeros(3, np.float32)}, anchor)


def test_the_wrong_parent_is_refused_and_nothing_written(tmp_path: Path) -> None:
    old, new, old_path, _ = checkpoints(tmp_path)
    delta = deltasync.diff(new, old)
    with pytest.raises(MismatchError) as caught:
        deltasync.apply(old_path, delta, out=tmp_path / "out")
    assert deltasync.digest(old).hex in caught.value.message
    assert deltasync.digest(new).hex in caught.value.message
    assert caught.value.hint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new.safetensors", "old"]
    with pytest.raises(MismatchError):
        deltasync.apply(old, delta)


DIFFERENT: dict[str, tuple[Any, str, str]] = {
    "name missing": (lambda s: s.pop("embed"), "embed", "not in"),
    "name too many": (lambda s: s.update(extra=np.zeros(3, np.float32)), "extra", "not in"),
    "type": (lambda s: s.update(embed=s["embed"].view(np.uint16)), "embed", r"BF16\[64, 32\].*U16\[64, 32\]"),
    "shape": (lambda s: s.update(embed=s["embed"].reshape(32, 64)), "embed", r"\[64, 32\].*\[32, 64\]"),
}


@pytest.mark.parametrize(("change", "name", "both"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_different_layout_names_the_tensor_and_both_sides(change: Any, name: str, both: str) -> None:
    old, new = state(), state()
    change(new)
    with pytest.raises(MismatchError, match=both) as caught:
        deltasync.diff(old, new)
    assert name in caught.value.message
    assert "old state" in caught.value.message
    assert "new state" in caught.value.message
    with pytest.raises(MismatchError, match=name):
        deltasync.apply(new, deltasync.diff(old, old))


BAD_STATES: dict[str, tuple[Any, type[Exception]]] = {
    "a list": ({"x": [1.0, 2.0]}, InvalidInputError),
    "big-endian": ({"x": np.zeros(3, ">f4")}, InvalidInputError),
    "name not text": ({7: np.zeros(3, np.float32)}, InvalidInputError),
    "name not UTF-8": ({"\ud800": np.zeros(3, np.float32)}, InvalidInputError),
    "complex": ({"x": np.zeros(3, np.complex64)}, FormatError),
    "objects": ({"x": np.array([None])}, FormatError),
    "no such path": ("/no/such/checkpoint", NotFoundError),
}


@pytest.mark.parametrize(("bad", "error"), BAD_STATES.values(), ids=BAD_STATES.keys())
def test_states_that_are_refused(bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        deltasync.digest(bad)


def test_a_damaged_delta_is_refused(tmp_path: Path) -> None:
    old, new, old_path, _ = checkpoints(tmp_path)
    delta = bytearray(deltasync.diff(old, new))
    [(begin, _)] = Payload.parse(bytes(delta)).block_infos[-1].ranges
    delta[begin] ^= 1
    for out in (None, tmp_path / "out"):
        with pytest.raises(CorruptError) as caught:
            deltasync.apply(old_path, bytes(delta), out=out)
        assert caught.value.rule == "block.sha256"
    assert not (tmp_path / "out").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_wrong_calls(tmp_path: Path) -> None:
    old = state()
    delta = deltasync.diff(old, old)
    with pytest.raises(InvalidInputError, match="codec"):
        deltasync.diff(old, old, codec="zip/1")
    with pytest.raises(InvalidInputError, match="count must be from 1"):
        deltasync.set_threads(0)
    with pytest.raises(InvalidInputError, match="checkpoint"):
        deltasync.apply(old, delta, out=tmp_path / "out")
    with pytest.raises(InvalidInputError, match="folder"):
        deltasync.apply(old, tmp_path)
    with pytest.raises(NotFoundError):
        deltasync.apply(old, tmp_path / "no-such-file")


def test_progress_ends_at_the_total() -> None:
    old, new = state(), changed(state())
    last: dict[str, tuple[int, int]] = {}

    def progress(phase: str, done: int, total: int) -> None:
        assert done <= total
        last[phase] = (done, total)

    delta = deltasync.diff(old, new, progress=progress)
    assert last.keys() == {"digest", "encode"}
    deltasync.apply(old, delta, progress=progress)
    assert last.keys() == {"digest", "encode", "apply"}
    assert all(done == total > 0 for done, total in last.values())


def test_inspection_counts_changes() -> None:
    old, new = state(), changed(state())
    expected = {n: int((old[n].view(bits(old[n])) != new[n].view(bits(new[n]))).sum()) for n in old}
    plain = deltasync.inspect(deltasync.diff(old, new, codec="coo/1"))
    assert {t.spec.name: t.changed for t in plain.tensors} == expected
    coded = deltasync.inspect(deltasync.diff(old, new))
    assert coded.changed == sum(expected.values()) == sum(c.changed for c in coded.codecs)
    by_name = {t.spec.name: t.changed for t in coded.tensors}
    assert by_name["layer.0.bias"] == expected["layer.0.bias"]
    assert by_name["embed"] is None, "it shares a block with the other bf16 tensor"
    assert coded.bits_per_changed == 8 * coded.nbytes / coded.changed
    assert deltasync.inspect(deltasync.diff(old, old)).bits_per_changed is None


def bits(array: np.ndarray) -> str:
    return f"<u{array.itemsize}"


def test_a_shard_alone_is_not_a_delta() -> None:
    old = {t.name: np.zeros(t.shape, t.dtype.bits_dtype) for t in LAYOUT.tensors}
    with pytest.raises(InvalidInputError, match="one shard of an anchor"):
        deltasync.apply(old, shard_payload())
