"""No number that a feed gives allocates memory or reads bytes before it was compared with what is there."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.feeds import Feed, paper
from support.helpers import resealed

from deltasync.errors import CorruptError, DeltasyncError
from deltasync.feed.fetch import PART_BYTES, fetch, fetch_files
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.feed.route import Route
from deltasync.feed.upload import Upload
from deltasync.format import keys, limits
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import INDEX_NAME, Payload
from deltasync.format.safetensors import header_bytes
from deltasync.state import load
from deltasync.store.fencing import LeasedStore
from deltasync.store.memory import MemoryStore
from deltasync.upkeep.prune import Retention, plan_prune
from deltasync.upkeep.verify import verify

HUGE_BYTES = 1 << 43
"""Far more than any machine of a test has."""


class HugeObject(MemoryStore):
    """A store in which the object under `huge_key` has 8 TB of zeros. It counts the bytes that are read."""

    def __init__(self, huge_key: str | None = None) -> None:
        super().__init__()
        self.huge_key = huge_key
        self.read_bytes = 0

    def get(self, key: str) -> bytes:
        assert key != self.huge_key, "the whole object was read"
        data = super().get(key)
        self.read_bytes += len(data)
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if key != self.huge_key:
            return super().get_range(key, offset, length)
        self.read_bytes += length
        assert self.read_bytes <= limits.MANIFEST_BYTES_MAX + 1, "too many bytes were read"
        return bytes(length)

    def create(self, key: str, data: bytes | bytearray | memoryview) -> bool:
        return False if key == self.huge_key else super().create(key, data)


@contextmanager
def peak_below(nbytes: int) -> Iterator[None]:
    """The block allocates less than that at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes, f"{peak} bytes were allocated"


def lease(store: MemoryStore) -> object:
    return LeasedStore(store, "a").take()


def commit(store: MemoryStore) -> object:
    upload = Upload(store)
    return upload.commit(replace(paper("anchor", 0, 9), writer=upload.id))


READS: dict[str, tuple[str, Callable[[MemoryStore], object], int, str]] = {
    # the huge object, what reads it, the most bytes that may be read, the rule that refuses it
    "feed": (keys.FEED, lambda s: Log(s).feed(), limits.RECORD_BYTES_MAX, "feed.size"),
    "floor": (keys.FLOOR, lambda s: Log(s).floor(), limits.RECORD_BYTES_MAX, "floor.size"),
    "copy": (keys.COPY, lambda s: Log(s).floor(), limits.RECORD_BYTES_MAX, "floor.size"),
    "lease": (keys.LEASE, lease, limits.RECORD_BYTES_MAX, "lease.size"),
    "version": (keys.version_key(3), lambda s: Log(s).read(3), limits.MANIFEST_BYTES_MAX, "manifest.size"),
    "head": (keys.version_key(0), lambda s: Log(s).head(after=-1), limits.MANIFEST_BYTES_MAX, "manifest.size"),
    "anchor": (keys.anchor_key(3), lambda s: Log(s).anchor(3), limits.MANIFEST_BYTES_MAX, "manifest.size"),
    "skip": (keys.skip_key(1, 3), lambda s: Log(s).skip(1, 3), limits.MANIFEST_BYTES_MAX, "manifest.size"),
    "a commit that is taken": (keys.version_key(0), commit, limits.MANIFEST_BYTES_MAX, "manifest.size"),
}


@pytest.mark.parametrize(("key", "read", "most", "rule"), READS.values(), ids=READS.keys())
def test_small_objects_are_read_up_to_their_limit(
    key: str, read: Callable[[MemoryStore], object], most: int, rule: str
) -> None:
    store = HugeObject(key)
    with peak_below(4 * most + (1 << 20)), pytest.raises(CorruptError) as caught:
        read(store)
    assert caught.value.rule == rule
    assert store.read_bytes <= most + 1


def test_a_huge_heartbeat_is_passed_over() -> None:
    store = HugeObject(keys.replica_key("a"))
    store.put(keys.replica_key("a"), b"")
    with peak_below(1 << 20):
        assert Log(store).heartbeats() == []
    assert store.read_bytes == limits.RECORD_BYTES_MAX + 1


def test_a_survey_reads_no_manifest_whole() -> None:
    store = HugeObject(keys.version_key(0))
    store.put(keys.version_key(0), b"")
    with peak_below(8 * limits.MANIFEST_BYTES_MAX):
        (damage,) = verify(store).damages
    assert damage.error.rule == "manifest.size"
    store.read_bytes = 0
    with pytest.raises(CorruptError) as caught:
        plan_prune(store, Retention(anchors=1, versions=1))
    assert caught.value.key == keys.version_key(0)


def claiming(nbytes: int) -> tuple[Feed, HugeObject]:
    """A feed of two versions, the second of which promises a payload of that size; the object is small."""
    store = HugeObject()
    feed = Feed.of(2, store)
    manifest = feed.log.read(1)
    ref = manifest.payloads[0].to_json() | {"bytes": nbytes}
    store.put(keys.version_key(1), resealed(store.get(keys.version_key(1)), {"payloads": [ref]}))
    store.read_bytes = 0
    return feed, store


@pytest.mark.parametrize("nbytes", [PART_BYTES, PART_BYTES + 1, 8_600_000_000, 1 << 40, 1 << 62, limits.COUNT_MAX])
def test_a_promised_size_allocates_nothing(nbytes: int) -> None:
    feed, store = claiming(nbytes)
    with peak_below(4 << 20), pytest.raises(CorruptError) as caught:
        fetch(store, feed.log.read(1).payloads[0])
    assert caught.value.rule == "payload.size"
    with peak_below(16 << 20), pytest.raises(CorruptError) as caught:
        load(feed.log, feed.log.read(1))
    assert caught.value.rule == "payload.size"


@pytest.mark.parametrize("nbytes", [8_600_000_000, 1 << 62])
def test_a_promised_size_closes_the_edge_only(nbytes: int) -> None:
    """Another plan is tried, as for every other damage."""
    feed, _ = claiming(nbytes)
    feed.late_anchor(1)
    with peak_below(16 << 20):
        load(feed.log, feed.log.read(1))


def test_an_anchor_that_promises_more_than_it_has() -> None:
    store = HugeObject()
    feed = Feed.of(1, store)
    ref = feed.log.read(0).payloads[0].to_json() | {"bytes": 1 << 62}
    store.put(keys.version_key(0), resealed(store.get(keys.version_key(0)), {"payloads": [ref]}))
    head = feed.log.read(0)
    with peak_below(16 << 20), pytest.raises(Exception, match=r"safetensors\.truncated|payload\.size"):
        Route(feed.log, head).open(plan(feed.log, head).edges[0])
    with peak_below(16 << 20), pytest.raises(DeltasyncError):
        load(feed.log, head)


def test_no_memory_for_a_payload_closes_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    """The object has that size, but this machine has no memory for it."""

    def no_memory(nbytes: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr("deltasync.feed.fetch.bytearray", no_memory, raising=False)
    store = MemoryStore()
    data = bytes(PART_BYTES + 1)
    ref = PayloadRef.of(data)
    store.put(keys.payload_key(ref.sha256), data)
    with pytest.raises(CorruptError) as caught:
        fetch(store, ref)
    assert caught.value.rule == "payload.memory"


def test_files_that_are_too_large_are_not_fetched() -> None:
    store = HugeObject()
    feed = Feed.of(1, store)
    nbytes = limits.FILES_BYTES_MAX + limits.SAFETENSORS_HEADER_BYTES_MAX + 1
    manifest = replace(feed.log.read(0), files=PayloadRef("ab" * 32, nbytes))
    with pytest.raises(CorruptError) as caught:
        fetch_files(store, manifest)
    assert caught.value.rule == "files.size"


def test_an_index_is_limited_before_it_is_read() -> None:
    spec = TensorSpec(INDEX_NAME, DTYPES["U8"], (limits.INDEX_BYTES_MAX + 1,))
    metadata = {"format": "deltasync/1", "kind": "anchor", "layout_sha256": "", "digest": "0" * 32}
    head = header_bytes([spec], metadata | {"elements": "0", "changed": "0"})
    reads: list[int] = []

    def read(offset: int, length: int) -> bytes:
        reads.append(length)
        return head[offset : offset + length].ljust(length, b"\0")

    with pytest.raises(CorruptError) as caught:
        Payload.open(read, len(head) + limits.INDEX_BYTES_MAX + 1)
    assert caught.value.rule == "index.size"
    assert sum(reads) < 1 << 20


@pytest.mark.parametrize("size", [0, 1, 100, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
@pytest.mark.parametrize("promised", [-1, 0, 1])
def test_sizes_around_the_limits_of_a_range(size: int, promised: int) -> None:
    store = MemoryStore()
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    ref = PayloadRef.of(data)
    store.put(keys.payload_key(ref.sha256), data)
    if promised == 0:
        assert fetch(store, ref) == data
    elif size + promised >= 0:
        with pytest.raises(CorruptError) as caught:
            fetch(store, PayloadRef(ref.sha256, size + promised))
        assert caught.value.rule == "payload.size"
