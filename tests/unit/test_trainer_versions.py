import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support import LONG_S
from support.feeds import Feed, SpyStore, put_anchor, same_weights
from support.helpers import changed, state

from deltasync import blocks
from deltasync.errors import StoreError
from deltasync.feed.upload import RESUME_S, Upload
from deltasync.format import keys, limits
from deltasync.format.index import encode_index
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Block, Payload
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.protocol import Data
from deltasync.trainer import versions as anchors
from deltasync.trainer.versions import Metadata, VersionWriter, delta_payload_bytes

LAYOUTS = {
    "of many types": state(),
    "no tensors": {},
    "no elements": {"a": np.empty((0, 3), np.float16), "b": np.empty(0, np.uint8)},
    "a scalar": {"a": np.array(3, np.int64)},
    "an empty one among others": {"a": np.empty(0, np.float32), "b": np.arange(9, dtype=np.float32)},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 256 elements, shards of 512."""
    monkeypatch.setattr(limits, "PLANES_ELEMENTS", 256)
    monkeypatch.setattr(anchors, "SHARD_ELEMENTS", 512)


def opened() -> tuple[SpyStore, Upload]:
    store = SpyStore()
    upload = Upload(store)
    upload.open()
    store.took()
    return store, upload


def puts(store: SpyStore) -> list[str]:
    return [key for verb, key in store.took() if verb == "put" and key.startswith(keys.PAYLOADS)]


def payload(store: SpyStore, ref: PayloadRef) -> Payload:
    return Payload.parse(store.get(keys.payload_key(ref.sha256)))


@pytest.mark.parametrize("tensors", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_one_shard(tensors: dict[str, np.ndarray]) -> None:
    store, upload = opened()
    weights = Weights.of(tensors)
    refs, digest = put_anchor(upload, weights, 7)
    assert digest == blocks.digest(weights)
    assert len(refs) == 1
    header = payload(store, refs[0]).header
    assert (header.kind, header.version, header.layout, header.digest) == ("shard", 7, weights.layout, digest)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tensors", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_shards(tensors: dict[str, np.ndarray]) -> None:
    """Each covers at least so many elements, no two the same ones, all together every one."""
    store, upload = opened()
    weights = Weights.of(tensors)
    refs, digest = put_anchor(upload, weights, 7)
    assert digest == blocks.digest(weights)
    assert len(set(refs)) == len(refs)
    sizes = [sum(info.elements for info in payload(store, ref).block_infos) for ref in refs]
    assert sum(sizes) == weights.layout.elements
    assert all(size >= 512 for size in sizes[:-1])
    assert len(refs) == (6 if weights.layout.elements > 2000 else 1)
    assert sorted(puts(store)) == sorted(keys.payload_key(ref.sha256) for ref in refs)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tensors", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_weights_come_back(tensors: dict[str, np.ndarray]) -> None:
    feed = Feed()
    manifest = feed.anchor(tensors)
    assert same_weights(load(feed.log, manifest), feed.states[0])


@pytest.mark.usefixtures("small")
def test_the_number_of_shards_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "SHARDS_MAX", 3)
    _, upload = opened()
    assert len(put_anchor(upload, Weights.of(state()), 0)[0]) <= 3


@pytest.mark.usefixtures("small")
def test_a_second_attempt_puts_only_what_is_missing() -> None:
    store, upload = opened()
    weights = Weights.of(state())
    refs, digest = put_anchor(upload, weights, 7)
    assert len(puts(store)) == len(refs)
    missing = [keys.payload_key(refs[i].sha256) for i in (1, 3)]
    for key in missing:
        store.delete(key)
    again = Upload(store)
    assert put_anchor(again, weights, 7) == (refs, digest)
    assert sorted(puts(store)) == sorted(missing)
    assert put_anchor(again, weights, 7) == (refs, digest)
    assert puts(store) == []


@pytest.mark.usefixtures("small")
def test_other_threads_make_the_same_shards() -> None:
    _, upload = opened()
    weights = Weights.of(state())
    assert put_anchor(upload, weights, 7) == put_anchor(upload, weights, 7)


@pytest.mark.usefixtures("small")
def test_no_two_versions_share_a_shard() -> None:
    _, upload = opened()
    weights = Weights.of(state())
    first, digest = put_anchor(upload, weights, 7)
    second, same = put_anchor(upload, weights, 8)
    assert digest == same
    assert not set(first) & set(second)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("how", "is_put_again"), [("just now", False), ("long ago", True), ("another size", True), ("not a payload", True)]
)
def test_what_counts_as_being_there(how: str, is_put_again: bool) -> None:
    store, upload = opened()
    weights = Weights.of(state())
    refs, _ = put_anchor(upload, weights, 7)
    key = keys.payload_key(refs[0].sha256)
    data = store.get(key)
    if how == "another size":
        store.put(key, data[:-1])
    elif how == "not a payload":
        store.delete(key)
        store.put(f"{key}.bak", data)
    elif how == "long ago":
        store.age(key, time.time() - RESUME_S - 60)
    puts(store)
    put_anchor(upload, weights, 7)
    assert (key in puts(store)) == is_put_again
    assert store.get(key) == data


def test_progress_reaches_the_end() -> None:
    _, upload = opened()
    weights = Weights.of(state())
    reports: list[tuple[str, int, int]] = []
    put_anchor(upload, weights, 7, progress=lambda phase, done, total: reports.append((phase, done, total)))
    elements = weights.layout.elements
    assert reports[-1] == ("anchor", elements, elements)


@pytest.mark.usefixtures("small")
def test_the_order_of_shards_has_no_meaning() -> None:
    feed = Feed()
    manifest = feed.anchor(state())
    turned = replace(manifest, payloads=manifest.payloads[::-1], version=0)
    assert same_weights(load(feed.log, turned), feed.states[0])


# --- deltas in several payloads ---------------------------------------------------------------------------------------

SMALLEST = {"DELTA_BYTES_LEAST": 1, "DELTA_BYTES_MOST": 1, "INDEX_SHARE": 0}


def begun(store: SpyStore) -> tuple[VersionWriter, Weights, Manifest]:
    """A feed with version 0."""
    weights, upload = Weights.of(state()), Upload(store)
    upload.open()
    versions = VersionWriter(upload=upload, layout=weights.layout)
    return versions, weights, versions.anchor(weights, None, Metadata()).manifest


def test_payloads_are_put_while_later_blocks_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block is encoded only once the first payload is in the store."""
    for name, value in SMALLEST.items():
        monkeypatch.setattr(anchors, name, value)
    was_put = threading.Event()

    class Noting(SpyStore):
        def put(self, key: str, data: Data) -> None:
            super().put(key, data)
            if b'"kind":"delta"' in bytes(data[:4096]):
                was_put.set()

    store = Noting()
    versions, old, first = begun(store)
    new = Weights.of(changed(state()))
    encoded = blocks.encode_delta(old, new)
    assert len(encoded) > 2
    in_time = []

    def encode() -> Iterator[Block]:
        yield from encoded[:-1]
        in_time.append(was_put.wait(LONG_S))
        yield encoded[-1]

    committed = versions.delta(encode, first, Metadata())
    assert in_time == [True]
    assert len(committed.manifest.payloads) == len(encoded)
    assert committed.manifest.changed == sum(block.changed for block in encoded)
    assert same_weights(load(versions.upload.log, committed.manifest), new)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("changed_elements", "payload_bytes"),
    [(0, MIB // 2), (4 * MIB, MIB // 2), (32 * MIB, 2 * MIB), (128 * MIB, 8 * MIB), (1 << 40, 8 * MIB)],
)
def test_payloads_of_a_delta_grow_with_it(changed_elements: int, payload_bytes: int) -> None:
    layout = Weights.of(state()).layout
    assert delta_payload_bytes(layout, changed_elements) == payload_bytes


def test_payloads_of_a_delta_are_large_beside_their_index() -> None:
    """Models with many experts have tens of thousands of tensors, which each payload lists."""
    weights = Weights.of({f"layers.{i}.weight": np.zeros(1, np.uint8) for i in range(20_000)})
    index = encode_index(weights.layout, ())
    assert 0.9 < delta_payload_bytes(weights.layout, 0) / (anchors.INDEX_SHARE * len(index)) < 1.5


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_put_that_fails_commits_nothing_and_leaves_the_encoder(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALLEST.items():
        monkeypatch.setattr(anchors, name, value)

    class Failing(SpyStore):
        deltas = 0

        def put(self, key: str, data: Data) -> None:
            if b'"kind":"delta"' in bytes(data[:4096]):
                with self._lock:
                    number, self.deltas = self.deltas, self.deltas + 1
                if number == fails:
                    raise StoreError("no", transient=False)
            super().put(key, data)

    store = Failing()
    versions, old, first = begun(store)
    ended = []

    def encode() -> Iterator[Block]:
        try:
            yield from blocks.encode_delta(old, Weights.of(changed(state())))
        finally:
            ended.append(True)

    with pytest.raises(StoreError, match="no"):
        versions.delta(encode, first, Metadata())
    assert ended == [True]
    assert list(versions.upload.log.versions()) == [0]
    fails = -1
    assert versions.delta(encode, first, Metadata()).manifest.version == 1
