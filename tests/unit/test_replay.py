import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from feeds import Feed, SpyStore, flip, rank_blocks, same_weights
from helpers import State, changed, state, write_sharded
from safetensors.numpy import load_file

import deltasync
from deltasync import blocks, checkpoint_output
from deltasync.bases import open_base
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import (
    CorruptError,
    DeltasyncError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
)
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.digest import layout_digest
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.records import FloorRecord
from deltasync.format.weights import Weights
from deltasync.prune import plan_prune, prune
from deltasync.replay import load
from deltasync.restore import plan_restore, restore


def restored(feed: Feed, version: int | None = None, **options: Any) -> Weights:
    target = feed.log.require_head() if version is None else feed.log.read(version)
    return load(feed.log, target, **options)


def refused(feed: Feed, manifest: Manifest, **options: Any) -> DeltasyncError:
    with pytest.raises(DeltasyncError) as caught:
        load(feed.log, manifest, **options)
    return caught.value


# --- every version, by every way --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown() -> Feed:
    """Anchors, deltas of one and of several payloads, one of nothing, a skip, another layout."""
    feed = Feed.of(3)
    feed.delta(ranks=2)
    feed.delta(feed.states[-1])
    feed.late_anchor(4)
    feed.delta(ranks=3)
    feed.skip(2, 5)
    feed.anchor(state(9) | {"new": np.arange(5, dtype=np.uint16)})
    feed.delta()
    return feed


@pytest.mark.parametrize("version", range(8))
def test_every_version_bit_by_bit(grown: Feed, version: int) -> None:
    assert same_weights(restored(grown, version), grown.states[version])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads(grown: Feed, threads: int) -> None:
    assert same_weights(restored(grown, threads=threads), grown.states[-1])


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_several_payloads_lead_to_one_version(ranks: int) -> None:
    feed = Feed.of(1)
    manifest = feed.delta(ranks=ranks)
    assert len(manifest.payloads) == ranks
    assert same_weights(restored(feed), feed.states[1])
    turned = replace(manifest, payloads=manifest.payloads[::-1])
    assert same_weights(load(feed.log, turned), feed.states[1])


def test_a_delta_of_nothing_has_no_payload() -> None:
    feed = Feed.of(2)
    manifest = feed.delta(feed.states[-1])
    assert (manifest.payloads, manifest.changed) == ((), 0)
    feed.delta()
    assert same_weights(restored(feed, 2), feed.states[2])
    assert same_weights(restored(feed, 3), feed.states[3])


def test_progress_counts_bytes_then_elements(grown: Feed) -> None:
    told: list[tuple[str, int, int]] = []
    restored(grown, 2, progress=lambda phase, done, total: told.append((phase, done, total)))
    ends = {phase: (done, total) for phase, done, total in told}
    assert list(ends) == ["restore", "digest"]
    assert all(done == total for done, total in ends.values())


# --- payloads that do not belong --------------------------------------------------------------------------------------


def two_ranks() -> tuple[Feed, Weights, list[list[Any]]]:
    feed = Feed.of(1)
    new = feed.next_state()
    return feed, new, rank_blocks(feed.states[0], new, 2)


def told_by(feed: Feed, new: Weights, refs: list[PayloadRef], **fields: Any) -> Manifest:
    """A delta to `new` that names these payloads."""
    found = blocks.encode_delta(feed.states[0], new)
    count = sum(block.changed for block in found)
    manifest = feed.new("delta", new, blocks.digest(new), payloads=tuple(refs), changed=count)
    return replace(manifest, **fields)


def good(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, part) for part in parts])


def overlapping(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    whole = blocks.encode_delta(feed.states[0], new)
    return told_by(feed, new, [feed.put_change(0, 1, whole), feed.put_change(0, 1, parts[1])])


def one_is_missing(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0])])


def other_count(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    manifest = good(feed, new, parts)
    assert manifest.changed is not None
    return replace(manifest, changed=manifest.changed + 1)


def other_parent(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    elsewhere = blocks.digest(new)
    gained = sum((block.digest for block in parts[1]), elsewhere)
    wrong = feed.put_change(0, 1, parts[1], parent_digest=elsewhere, digest=gained)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), wrong])


def other_version(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.put_change(0, 2, parts[1])])


def other_kind(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), *feed.log.read(0).payloads])


def other_layout(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    other = Weights.of({"x": np.zeros(4, np.float32)})
    start = blocks.digest(feed.states[0])
    header = PayloadHeader("delta", other.layout, start, start, 1)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.writer.put(write_payload(header, []))])


def other_layout_of_that_size(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    other = Weights.of({"x": np.zeros(new.layout.elements, np.float32)})
    start = blocks.digest(feed.states[0])
    header = PayloadHeader("delta", other.layout, start, start, 1)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.writer.put(write_payload(header, []))])


def not_a_payload(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.writer.put(write_files({"a": b"b"}))])


def gone(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    manifest = good(feed, new, parts)
    feed.store.delete(keys.payload_key(manifest.payloads[1].sha256))
    return manifest


def cut(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    manifest = good(feed, new, parts)
    key = keys.payload_key(manifest.payloads[1].sha256)
    feed.store.put(key, feed.store.get(key)[:-1])
    return manifest


def longer(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    manifest = good(feed, new, parts)
    key = keys.payload_key(manifest.payloads[1].sha256)
    feed.store.put(key, feed.store.get(key) + b"x")
    return manifest


def damaged(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    manifest = good(feed, new, parts)
    flip(feed.store, keys.payload_key(manifest.payloads[1].sha256))
    return manifest


Build = Callable[[Feed, Weights, list[list[Any]]], Manifest]
WRONG: list[tuple[Build, type[DeltasyncError], str | None]] = [
    (overlapping, CorruptError, "runs.overlap"),
    (one_is_missing, CorruptError, "manifest.digest"),
    (other_count, CorruptError, "manifest.changed"),
    (other_parent, CorruptError, "manifest.parent_digest"),
    (other_version, CorruptError, "manifest.payload_version"),
    (other_kind, CorruptError, "manifest.payload_kind"),
    (other_layout, CorruptError, "manifest.layout"),
    (other_layout_of_that_size, CorruptError, "manifest.layout"),
    (not_a_payload, FormatError, "payload.kind"),
    (gone, NotFoundError, None),
    (cut, CorruptError, "payload.size"),
    (longer, CorruptError, "payload.size"),
    (damaged, CorruptError, "payload.sha256"),
]


@pytest.mark.parametrize(("build", "error", "rule"), WRONG, ids=[w[0].__name__ for w in WRONG])
def test_payloads_that_do_not_belong(build: Build, error: type[DeltasyncError], rule: str | None) -> None:
    feed, new, parts = two_ranks()
    assert same_weights(load(feed.log, good(feed, new, parts)), new)
    found = refused(feed, build(feed, new, parts))
    assert (type(found), found.rule) == (error, rule)


def anchor_of(feed: Feed, refs: tuple[PayloadRef, ...], **fields: Any) -> Manifest:
    """An anchor of version 1 that names these payloads."""
    weights = feed.states[0]
    return replace(feed.new("anchor", weights, blocks.digest(weights), payloads=refs), version=1, **fields)


def shard(feed: Feed, blocks_of_it: list[Any], version: int | None = 1) -> PayloadRef:
    layout = feed.states[0].layout
    digest = sum((block.digest for block in blocks_of_it), layout_digest(layout))
    return feed.writer.put(write_payload(PayloadHeader("shard", layout, None, digest, version), blocks_of_it))


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ("whole", None),
        ("one anchor", None),
        ("a hole of zeros", "manifest.cover"),
        ("a shard is missing", "manifest.digest"),
        ("a shard twice", "runs.overlap"),
        ("another version", "manifest.payload_version"),
        ("a delta", "manifest.payload_kind"),
    ],
)
def test_shards_that_do_not_belong(how: str, rule: str | None) -> None:
    tensors = state() | {"layer.0.fp8": np.zeros_like(state()["layer.0.fp8"])}
    feed = Feed()
    feed.anchor(tensors)
    weights = feed.states[0]
    found = list(blocks.encode_anchor(weights))
    zeros = next(b for b in found if weights.layout.tensors[b.runs[0, 0]].name == "layer.0.fp8")
    others = [b for b in found if b is not zeros]
    whole = PayloadHeader("anchor", weights.layout, None, blocks.digest(weights), 1)
    refs = {
        "whole": lambda: [shard(feed, found[:2]), shard(feed, found[2:])],
        "one anchor": lambda: [feed.writer.put(write_payload(whole, found))],
        "a hole of zeros": lambda: [shard(feed, others)],
        "a shard is missing": lambda: [shard(feed, found[:1])],
        "a shard twice": lambda: [shard(feed, found), shard(feed, found[:1])],
        "another version": lambda: [shard(feed, found, 2)],
        "a delta": lambda: [shard(feed, found), feed.put_change(0, 1, [])],
    }  # fmt: skip
    manifest = anchor_of(feed, tuple(refs[how]()))
    if rule is None:
        assert same_weights(load(feed.log, manifest), weights)
    else:
        assert refused(feed, manifest).rule == rule


def test_payloads_that_add_up_to_another_digest_than_the_version_has() -> None:
    feed, new, parts = two_ranks()
    manifest = good(feed, new, parts)
    found = refused(feed, replace(manifest, digest=blocks.digest(feed.states[0])))
    assert (found.rule, found.version) == ("manifest.digest", 1)


def test_a_skip_to_a_version_of_another_layout_is_refused_not_followed() -> None:
    """Runs of the skip's own layout lie outside of the weights that it would be applied to."""
    feed = Feed()
    feed.anchor({"a": np.arange(4, dtype=np.float32)})
    feed.delta()
    feed.anchor({"a": np.arange(400, dtype=np.float32), "b": np.arange(9, dtype=np.float32)})
    feed.delta()
    old, new = feed.states[2], feed.states[3]
    found = blocks.encode_delta(old, new)
    start, end = feed.log.read(1), feed.log.read(3)
    gained = sum((block.digest for block in found), start.digest)
    header = PayloadHeader("delta", new.layout, start.digest, gained, 3)
    ref = feed.writer.put(write_payload(header, found))
    skip = replace(
        feed.new("skip", new, gained, payloads=(ref,)),
        version=3,
        parent=1,
        parent_digest=start.digest,
        changed=sum(block.changed for block in found),
    )
    feed.writer.commit(skip)
    lying = replace(end, digest=gained)
    feed.store.put(keys.version_key(3), lying.to_bytes())
    found_error = refused(feed, lying)
    assert (type(found_error), found_error.rule) == (MismatchError, "layout.differs")


# --- other ways -------------------------------------------------------------------------------------------------------


def test_a_payload_is_fetched_again_once() -> None:
    """A byte that flips on the wire is not damage in the store."""

    class Flipping(SpyStore):
        flips = 0

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            data = super().get_range(key, offset, length)
            if self.flips and key.startswith(keys.PAYLOADS) and length > len(data):
                self.flips -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
            return data

    store = Flipping()
    feed = Feed.of(2, store)
    store.flips = 1
    assert same_weights(restored(feed), feed.states[1])
    store.flips = 2
    assert refused(feed, feed.log.read(0)).rule == "payload.sha256"


WAYS: dict[str, Callable[[Feed], str]] = {
    "newest anchor": lambda f: f.payload_keys(f.late_anchor(3))[0],
    "skip": lambda f: f.payload_keys(f.skip(0, 4))[0],
}


@pytest.mark.parametrize("what", WAYS)
@pytest.mark.parametrize("how", ["flipped", "gone", "cut"])
def test_another_way_where_one_is_damaged(what: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    feed = Feed.of(5)
    key = WAYS[what](feed)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    restored(feed)
    assert ("get", key) in feed.store.took(), "the way that is taken while all is well"
    if how == "flipped":
        flip(feed.store, key)
    elif how == "gone":
        feed.store.delete(key)
    else:
        feed.store.put(key, feed.store.get(key)[:100])
    assert same_weights(restored(feed), feed.states[4])
    assert "looking for another way" in caplog.text


def test_a_whole_feed_by_what_is_left() -> None:
    """The first anchor, a delta in the middle and a skip are damaged: the late anchor and another skip do."""
    feed = Feed.of(9)
    for version in (0, 4, 6):
        flip(feed.store, feed.payload_keys(feed.log.read(version))[0])
    flip(feed.store, feed.payload_keys(feed.skip(3, 8))[0])
    feed.skip(2, 7)
    feed.late_anchor(2)
    assert same_weights(restored(feed), feed.states[8])


def test_without_any_way_the_first_error_is_told() -> None:
    feed = Feed.of(3)
    feed.late_anchor(2)
    for version in range(3):
        flip(feed.store, feed.payload_keys(feed.log.read(version))[0])
    anchor = feed.log.anchor(2)
    assert anchor is not None
    key = feed.payload_keys(anchor)[0]
    flip(feed.store, key)
    found = refused(feed, feed.log.read(2))
    assert (found.rule, found.key) == ("payload.sha256", key)


def test_a_pruned_version_says_that_it_was_pruned() -> None:
    feed = Feed.of(6)
    feed.late_anchor(3)
    prune(feed.store, plan_prune(feed.store, keep_anchors=1, keep_versions=1))
    assert same_weights(restored(feed), feed.states[5])
    for version in range(3):
        found = refused(feed, feed.log.read(version))
        assert isinstance(found, NotFoundError)
        assert found.version == version
        assert "pruned" in found.message
        assert "3" in found.message


def test_damage_is_not_called_pruned() -> None:
    feed = Feed.of(3)
    flip(feed.store, feed.payload_keys(feed.log.read(0))[0])
    feed.store.put(keys.FLOOR, FloorRecord(2).to_bytes())
    assert refused(feed, feed.log.read(1)).rule == "payload.sha256"


def test_a_damaged_version_before_the_target() -> None:
    """The manifest of version 2 is unreadable; a skip leads over it."""
    feed = Feed.of(5)
    feed.skip(1, 3)
    feed.store.put(keys.version_key(2), b"{")
    assert same_weights(restored(feed), feed.states[4])
    assert isinstance(refused_read(feed, 2), CorruptError)


def refused_read(feed: Feed, version: int) -> DeltasyncError:
    with pytest.raises(DeltasyncError) as caught:
        feed.log.read(version)
    return caught.value


# --- restore: a folder ------------------------------------------------------------------------------------------------


def published(feed: Feed, files: dict[str, bytes]) -> Manifest:
    """The next version, with files beside its weights."""
    ref = feed.writer.put(write_files(files))
    new = feed.next_state()
    found = blocks.encode_delta(feed.states[-1], new)
    version = len(feed.states)
    refs = (feed.put_change(version - 1, version, found),)
    count = sum(block.changed for block in found)
    manifest = feed.new("delta", new, blocks.digest(new), payloads=refs, changed=count, files=ref)
    feed.writer.commit(manifest)
    feed.states.append(new)
    feed.head = manifest
    return manifest


FILES = {"config.json": b'{"a": 1}', "tokenizer/vocab.txt": b"x\ny", "empty": b""}


def test_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    feed = Feed.of(2)
    manifest = published(feed, FILES)
    assert restore(feed.store, tmp_path / "out") == manifest
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {*FILES, "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in FILES.items())
    assert same_weights(open_checkpoint(tmp_path / "out").weights, feed.states[2])
    assert deltasync.state_digest(tmp_path / "out") == manifest.digest


@pytest.mark.parametrize("version", range(3))
def test_each_version_with_its_own_files(tmp_path: Path, version: int) -> None:
    feed = Feed.of(1)
    published(feed, {"config.json": b"1"})
    published(feed, {"config.json": b"2"})
    restore(feed.store, tmp_path / "out", version=version)
    config = tmp_path / "out" / "config.json"
    assert (config.read_bytes() if config.exists() else None) == [None, b"1", b"2"][version]


def without_fp8() -> Feed:
    """Of types that the NumPy side of safetensors reads."""
    feed = Feed()
    feed.anchor({n: a for n, a in state().items() if n != "layer.0.fp8"})
    feed.delta()
    feed.delta()
    return feed


def test_several_files_as_transformers_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_output, "SHARD_BYTES", 2000)
    feed = without_fp8()
    restore(feed.store, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == feed.states[2].layout.nbytes
    assert not (tmp_path / "out" / "model.safetensors").exists()
    read: State = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "out" / name)
        assert {t for t, at in index["weight_map"].items() if at == name} == set(part)
        assert sum(a.nbytes for a in part.values()) <= 2000 or len(part) == 1
        read |= part
    assert len(set(index["weight_map"].values())) == 3
    assert all(a.dtype == state()[n].dtype and a.shape == state()[n].shape for n, a in read.items())
    assert same_weights(Weights.of(read), feed.states[2])


def test_one_file_as_safetensors_reads_it(tmp_path: Path) -> None:
    feed = without_fp8()
    restore(feed.store, tmp_path / "out", version=0)
    assert same_weights(Weights.of(load_file(tmp_path / "out" / "model.safetensors")), feed.states[0])


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_output_that_is_free(tmp_path: Path, there: str) -> None:
    if there == "an empty folder":
        (tmp_path / "out").mkdir()
    restore(Feed.of(1).store, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_output_that_is_taken(tmp_path: Path, there: str) -> None:
    precious = tmp_path / "out" if there == "a file" else tmp_path / "out" / "file"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    with pytest.raises(InvalidInputError, match="out"):
        restore(Feed.of(1).store, tmp_path / "out")
    assert precious.read_text() == "precious"


def test_nothing_appears_unless_all_is_well(tmp_path: Path) -> None:
    feed = Feed.of(3)
    flip(feed.store, feed.payload_keys(feed.log.read(2))[0])
    with pytest.raises(CorruptError):
        restore(feed.store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["flipped", "gone", "not files"])
def test_files_that_are_damaged(tmp_path: Path, how: str) -> None:
    feed = Feed.of(1)
    manifest = published(feed, FILES)
    assert manifest.files is not None
    key = keys.payload_key(manifest.files.sha256)
    if how == "flipped":
        flip(feed.store, key)
    elif how == "gone":
        feed.store.delete(key)
    else:
        wrong = replace(manifest, files=manifest.payloads[0])
        feed.store.put(keys.version_key(1), wrong.to_bytes())
    error = {"flipped": CorruptError, "gone": NotFoundError, "not files": FormatError}[how]
    with pytest.raises(error):
        restore(feed.store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [3, 10**9])
def test_a_version_that_is_not_there(tmp_path: Path, version: int) -> None:
    with pytest.raises(NotFoundError, match=f"version {version}"):
        restore(Feed.of(3).store, tmp_path / "out", version=version)


def test_plan_restore_fetches_no_payload() -> None:
    feed = Feed.of(4)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    target, way = plan_restore(feed.store, version=2)
    assert target.version == 2
    assert [e.end for e in way.edges] == [0, 1, 2]
    assert not [key for _, key in feed.store.took() if key.startswith(keys.PAYLOADS)]


# --- bases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "base", state())
    write_sharded(tmp_path / "wrong", changed(state()))
    write_sharded(tmp_path / "other", {"x": np.zeros(3, np.float32)})
    return tmp_path


def based(name: str, revision: str | None = None) -> Feed:
    feed = Feed()
    feed.base(state(), BaseRef(name, revision))
    feed.delta()
    feed.delta()
    return feed


def test_a_base_by_the_folder_that_the_feed_names(folder: Path) -> None:
    feed = based(str(folder / "base"))
    for version in range(3):
        restore(feed.store, folder / f"out{version}", version=version)
        assert same_weights(open_checkpoint(folder / f"out{version}").weights, feed.states[version])
    assert same_weights(open_checkpoint(folder / "base").weights, feed.states[0]), "the base itself is only read"


def test_a_base_by_a_copy_of_it(folder: Path) -> None:
    feed = based("org/model", "main")
    restore(feed.store, folder / "out", base=folder / "base")
    assert same_weights(open_checkpoint(folder / "out").weights, feed.states[2])


@pytest.mark.parametrize(
    ("name", "given", "error", "rule"),
    [
        ("nowhere/at-all", "wrong", MismatchError, "base.digest"),
        ("nowhere/at-all", "other", MismatchError, "base.layout"),
        ("nowhere/at-all", "missing", NotFoundError, None),
        ("base", "wrong", MismatchError, "base.digest"),
        ("wrong", None, MismatchError, "base.digest"),
        ("other", None, MismatchError, "base.layout"),
    ],
)
def test_another_base(
    folder: Path, name: str, given: str | None, error: type[DeltasyncError], rule: str | None
) -> None:
    feed = based(str(folder / name))
    with pytest.raises(error) as caught:
        restore(feed.store, folder / "out", base=None if given is None else folder / given)
    assert caught.value.rule == rule
    assert not (folder / "out").exists()


def test_a_missing_base_where_an_anchor_is(folder: Path) -> None:
    feed = based(str(folder / "nowhere"))
    feed.late_anchor(1)
    restore(feed.store, folder / "out", base=folder / "no-such-copy")
    assert same_weights(open_checkpoint(folder / "out").weights, feed.states[2])
    with pytest.raises(NotFoundError):
        restore(feed.store, folder / "out0", version=0, base=folder / "no-such-copy")


@pytest.mark.parametrize("has_hub", [False, True])
def test_a_base_on_the_hub_that_is_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hub: bool) -> None:
    """Offline, or without the client: what it is, its revision, and what to do."""
    if has_hub:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFoundError) as caught:
        restore(based("org/model", "abc").store, tmp_path / "out")
    assert "'org/model' at revision 'abc'" in caught.value.message
    assert caught.value.hint is not None
    assert "--base" in caught.value.hint
    assert ("deltasync[hf]" in caught.value.hint) == (not has_hub)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "not a name!", "x" * 300])
def test_a_base_that_is_neither_folder_nor_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError) as caught:
        restore(based(name).store, tmp_path / "out")
    assert len(str(caught.value)) < 1000


def test_open_base_of_another_kind() -> None:
    with pytest.raises(InvalidInputError):
        open_base(Feed.of(1).log.read(0))
