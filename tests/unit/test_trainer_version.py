import time
from dataclasses import replace

import numpy as np
import pytest
from support.feeds import Feed, SpyStore, same_weights
from support.helpers import state

from deltasync import blocks
from deltasync.feed.replay import load
from deltasync.feed.writer import Writer
from deltasync.format import keys, limits
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights
from deltasync.trainer import version as anchors
from deltasync.trainer.version import put_anchor

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


def opened() -> tuple[SpyStore, Writer]:
    store = SpyStore()
    writer = Writer(store)
    writer.open()
    store.took()
    return store, writer


def puts(store: SpyStore) -> list[str]:
    return [key for verb, key in store.took() if verb == "put" and key.startswith(keys.PAYLOADS)]


def payload(store: SpyStore, ref: PayloadRef) -> Payload:
    return Payload.parse(store.get(keys.payload_key(ref.sha256)))


@pytest.mark.parametrize("tensors", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_one_shard(tensors: dict[str, np.ndarray]) -> None:
    store, writer = opened()
    weights = Weights.of(tensors)
    refs, digest = put_anchor(writer, weights, 7)
    assert digest == blocks.digest(weights)
    assert len(refs) == 1
    header = payload(store, refs[0]).header
    assert (header.kind, header.version, header.layout, header.digest) == ("shard", 7, weights.layout, digest)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("tensors", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_shards(tensors: dict[str, np.ndarray]) -> None:
    """Each covers at least so many elements, no two the same ones, all together every one."""
    store, writer = opened()
    weights = Weights.of(tensors)
    refs, digest = put_anchor(writer, weights, 7)
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
    _, writer = opened()
    assert len(put_anchor(writer, Weights.of(state()), 0)[0]) <= 3


@pytest.mark.usefixtures("small")
def test_a_second_attempt_puts_only_what_is_missing() -> None:
    store, writer = opened()
    weights = Weights.of(state())
    refs, digest = put_anchor(writer, weights, 7)
    assert len(puts(store)) == len(refs)
    missing = [keys.payload_key(refs[i].sha256) for i in (1, 3)]
    for key in missing:
        store.delete(key)
    again = Writer(store)
    assert put_anchor(again, weights, 7) == (refs, digest)
    assert sorted(puts(store)) == sorted(missing)
    assert put_anchor(again, weights, 7) == (refs, digest)
    assert puts(store) == []


@pytest.mark.usefixtures("small")
def test_other_threads_make_the_same_shards() -> None:
    _, writer = opened()
    weights = Weights.of(state())
    assert put_anchor(writer, weights, 7) == put_anchor(writer, weights, 7)


@pytest.mark.usefixtures("small")
def test_no_two_versions_share_a_shard() -> None:
    _, writer = opened()
    weights = Weights.of(state())
    first, digest = put_anchor(writer, weights, 7)
    second, same = put_anchor(writer, weights, 8)
    assert digest == same
    assert not set(first) & set(second)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("how", "is_put_again"), [("just now", False), ("long ago", True), ("another size", True), ("not a payload", True)]
)
def test_what_counts_as_being_there(how: str, is_put_again: bool) -> None:
    store, writer = opened()
    weights = Weights.of(state())
    refs, _ = put_anchor(writer, weights, 7)
    key = keys.payload_key(refs[0].sha256)
    data = store.get(key)
    if how == "another size":
        store.put(key, data[:-1])
    elif how == "not a payload":
        store.delete(key)
        store.put(f"{key}.bak", data)
    elif how == "long ago":
        store.age(key, time.time() - anchors.RESUME_S - 60)
    puts(store)
    put_anchor(writer, weights, 7)
    assert (key in puts(store)) == is_put_again
    assert store.get(key) == data


def test_progress_reaches_the_end() -> None:
    _, writer = opened()
    weights = Weights.of(state())
    reports: list[tuple[str, int, int]] = []
    put_anchor(writer, weights, 7, progress=lambda phase, done, total: reports.append((phase, done, total)))
    elements = weights.layout.elements
    assert reports[-1] == ("anchor", elements, elements)


@pytest.mark.usefixtures("small")
def test_the_order_of_shards_has_no_meaning() -> None:
    feed = Feed()
    manifest = feed.anchor(state())
    turned = replace(manifest, payloads=manifest.payloads[::-1], version=0)
    assert same_weights(load(feed.log, turned), feed.states[0])
