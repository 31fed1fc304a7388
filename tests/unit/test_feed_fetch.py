"""Payloads that belong to another version are refused, and large objects in ranges are the same bytes, or an error."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.feeds import Feed, flip, rank_blocks, refused, same_weights
from support.helpers import anchor_blocks, state

from deltasync import blocks
from deltasync.errors import CorruptError, DeltasyncError, FormatError, MismatchError, NotFoundError, StoreError
from deltasync.feed import fetch
from deltasync.feed.fetch import get_whole
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.digest import layout_digest
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.memory import MemoryStore


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
    digest_delta = sum((block.digest for block in parts[1]), elsewhere)
    wrong = feed.put_change(0, 1, parts[1], parent_digest=elsewhere, digest=digest_delta)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), wrong])


def other_version(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.put_change(0, 2, parts[1])])


def other_kind(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), *feed.log.read(0).payloads])


def other_layout(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    other = Weights.of({"x": np.zeros(4, np.float32)})
    start = blocks.digest(feed.states[0])
    header = PayloadHeader("delta", other.layout, start, start, 1)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.upload.put(write_payload(header, []))])


def other_layout_of_that_size(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    other = Weights.of({"x": np.zeros(new.layout.elements, np.float32)})
    start = blocks.digest(feed.states[0])
    header = PayloadHeader("delta", other.layout, start, start, 1)
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.upload.put(write_payload(header, []))])


def not_a_payload(feed: Feed, new: Weights, parts: list[list[Any]]) -> Manifest:
    return told_by(feed, new, [feed.put_change(0, 1, parts[0]), feed.upload.put(write_files({"a": b"b"}))])


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
    return feed.upload.put(write_payload(PayloadHeader("shard", layout, None, digest, version), blocks_of_it))


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
    found = anchor_blocks(weights)
    zeros = next(b for b in found if weights.layout.tensors[b.runs[0, 0]].name == "layer.0.fp8")
    others = [b for b in found if b is not zeros]
    whole = PayloadHeader("anchor", weights.layout, None, blocks.digest(weights), 1)
    refs = {
        "whole": lambda: [shard(feed, found[:2]), shard(feed, found[2:])],
        "one anchor": lambda: [feed.upload.put(write_payload(whole, found))],
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
    digest_delta = sum((block.digest for block in found), start.digest)
    header = PayloadHeader("delta", new.layout, start.digest, digest_delta, 3)
    ref = feed.upload.put(write_payload(header, found))
    skip = replace(
        feed.new("skip", new, digest_delta, payloads=(ref,)),
        version=3,
        parent=1,
        parent_digest=start.digest,
        changed=sum(block.changed for block in found),
    )
    feed.upload.commit(skip)
    lying = replace(end, digest=digest_delta)
    feed.store.put(keys.version_key(3), lying.to_bytes())
    found_error = refused(feed, lying)
    assert (type(found_error), found_error.rule) == (MismatchError, "layout.differs")


@pytest.mark.parametrize(
    ("largest", "at_once"), [(0, 16), (1, 16), (2 << 20, 16), (4 << 20, 8), (10 << 20, 3), (1 << 40, 3)]
)
def test_small_payloads_are_fetched_many_at_once(largest: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes are promises of a manifest: a large one must not lead to more memory."""
    windows: list[int | None] = []

    def noted(work: Any, items: Any, *, waiting: int | None = None, **options: Any) -> Iterator[Any]:
        windows.append(waiting)
        return iter(())

    monkeypatch.setattr(fetch, "each", noted)
    refs = (PayloadRef("a" * 64, largest), PayloadRef("b" * 64, largest // 2))
    feed = Feed.of(1)
    manifest = replace(feed.new("delta", feed.states[0], blocks.digest(feed.states[0]), changed=0), payloads=refs)
    assert list(fetch.fetch_payloads(feed.store, [manifest])) == []
    assert windows == [at_once]


@pytest.mark.parametrize(("versions", "ranges"), [(1, 16), (3, 5), (20, 1)])
def test_few_small_payloads_are_fetched_in_several_ranges(
    versions: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = Feed.of(1 + versions)
    manifests = [feed.log.read(version) for version in range(1, 1 + versions)]
    monkeypatch.setattr(fetch, "SPLIT_BYTES", 1)
    reads: Counter[str] = Counter()
    read = feed.store.get_range

    def counted(key: str, offset: int, length: int) -> bytes:
        reads[key] += 1
        return read(key, offset, length)

    monkeypatch.setattr(feed.store, "get_range", counted)
    assert len(list(fetch.fetch_payloads(feed.store, manifests))) == versions
    assert list(reads.values()) == [ranges] * versions


PART = 1000


class Watched(MemoryStore):
    """Notes each range, and from which thread it was asked for; fails at one offset if one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.fail_at = -1

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges.append((offset, length))
        self.threads.add(threading.get_ident())
        if offset == self.fail_at:
            raise StoreError("failed", transient=True)
        return super().get_range(key, offset, length)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(fetch, "PART_BYTES", PART)
    monkeypatch.setattr(fetch, "SPLIT_BYTES", PART // 4)
    return Watched()


def pattern(size: int) -> bytes:
    return bytes(n * 7 % 251 for n in range(size))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7])
def test_the_same_bytes(store: Watched, size: int) -> None:
    store.put("key", pattern(size))
    assert get_whole(store, "key", size) == pattern(size)
    assert len(store.ranges) == max(1, -(-size // PART))
    # One byte more than all, once: that is how a longer object is found.
    assert sum(length for _, length in store.ranges) == size + 1


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7, 100 * PART])
def test_parts_come_in_order_while_others_are_fetched(store: Watched, size: int) -> None:
    store.put("key", pattern(size))
    parts: list[bytes] = []
    asked: list[int] = []

    def on_part(part: memoryview) -> None:
        parts.append(bytes(part))
        asked.append(len(store.ranges))

    assert get_whole(store, "key", size, on_part=on_part) == pattern(size)
    assert b"".join(parts) == pattern(size)
    assert asked[0] < 100, "the first part was not held back until all had come"


@pytest.mark.parametrize(
    ("size", "ranges", "expected"),
    [(0, 9, 1), (1, 9, 1), (250, 9, 1), (251, 9, 2), (PART, 9, 4), (PART, 3, 3), (PART, 1, 1)],
)
def test_a_small_object_in_several_ranges(store: Watched, size: int, ranges: int, expected: int) -> None:
    store.put("key", pattern(size))
    parts: list[bytes] = []
    assert get_whole(store, "key", size, ranges=ranges, on_part=lambda part: parts.append(bytes(part))) == pattern(size)
    assert b"".join(parts) == pattern(size)
    assert len(store.ranges) == expected
    assert sum(length for _, length in store.ranges) == size + 1


@pytest.mark.parametrize("ranges", [1, 4])
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
@pytest.mark.parametrize("off_by", [-PART - 1, -1, 1, PART, 10 * PART])
def test_another_size_is_corrupt(store: Watched, size: int, off_by: int, ranges: int) -> None:
    if size + off_by < 0:
        off_by = -size if size else 1
    store.put("key", pattern(size + off_by))
    with pytest.raises(CorruptError, match=r"^key has .* bytes, not") as caught:
        get_whole(store, "key", size, ranges=ranges)
    assert caught.value.key == "key"


@pytest.mark.parametrize("size", [10, 10 * PART])
def test_missing(store: Watched, size: int) -> None:
    with pytest.raises(NotFoundError):
        get_whole(store, "key", size)


def test_an_error_of_one_range_is_raised_and_ends_the_rest(store: Watched) -> None:
    store.put("key", pattern(100 * PART))
    store.fail_at = 2 * PART
    with pytest.raises(StoreError, match="failed"):
        get_whole(store, "key", 100 * PART)
    assert len(store.ranges) < 100
