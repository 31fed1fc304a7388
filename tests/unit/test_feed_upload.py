import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.feeds import Feed, NoFenceStore, SpyStore, paper
from support.helpers import resealed, state

from deltasync.errors import ConflictError, CorruptError, InvalidInputError, StoreError
from deltasync.feed.upload import LATE_S, RESUME_S, Upload
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import LeaseRecord
from deltasync.format.weights import Weights
from deltasync.store.fencing import LEASE_S, LeasedStore
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data
from deltasync.testing.faulty import Fault, FaultyStore
from deltasync.trainer.versions import Metadata, VersionWriter

ANCHOR = paper("anchor", 0, 1000)
VERSION0, VERSION1 = keys.version_key(0), keys.version_key(1)


class LosesResponses(SpyStore):
    """The next create goes through, or not, and says that it failed."""

    def __init__(self, *, goes_through: bool) -> None:
        super().__init__()
        self.goes_through = goes_through
        self.failures = 0

    def create(self, key: str, data: Data) -> bool:
        if self.failures and not key.startswith(keys.PROBES):
            self.failures -= 1
            if self.goes_through:
                super().create(key, data)
            raise StoreError("the connection broke", transient=True, key=key)
        return super().create(key, data)


class TakesAll(SpyStore):
    """Says that it fences, and does not."""

    def create(self, key: str, data: Data) -> bool:
        self.put(key, data)
        return True


class DeniesItsOwn(SpyStore):
    """A client that asks twice: the first call succeeds, and the second finds that the key exists."""

    def create(self, key: str, data: Data) -> bool:
        super().create(key, data)
        return False


def opened(store: SpyStore, **options: bool) -> Upload:
    upload = Upload(store, **options)
    upload.open()
    store.took()
    return upload


def test_each_writer_has_an_id_of_its_own() -> None:
    assert Upload(MemoryStore()).id != Upload(MemoryStore()).id


def test_the_feed_record_is_made_once() -> None:
    store = SpyStore()
    assert Upload(store).open() is None
    first = store.get(keys.FEED)
    assert Upload(store).open() is None
    assert store.get(keys.FEED) == first
    assert [call for call in store.took() if call[1] == keys.FEED and call[0] != "get"] == [("create", keys.FEED)]
    assert [info.key for info in store.list()] == [keys.FEED], "the probe is gone"


def test_open_gives_the_head() -> None:
    feed = Feed.of(3)
    assert Upload(feed.store).open() == feed.head


def test_one_payload_is_two_requests() -> None:
    store = SpyStore()
    upload = opened(store)
    ref = upload.put(b"payload")
    upload.commit(replace(ANCHOR, payloads=(ref,)))
    assert store.took() == [("put", keys.payload_key(ref.sha256)), ("create", VERSION0)]


def test_put_is_by_content() -> None:
    store = SpyStore()
    upload = opened(store)
    assert upload.put(b"abc") == upload.put(bytearray(b"abc")) == upload.put(memoryview(b"abc"))
    assert store.get(keys.payload_key(upload.put(b"abc").sha256)) == b"abc"


@pytest.mark.parametrize("store", [SpyStore(), NoFenceStore()], ids=["fence", "lease"])
def test_committing_twice_is_fine(store: SpyStore) -> None:
    upload = opened(store)
    upload.commit(ANCHOR)
    upload.commit(ANCHOR)
    assert upload.log.read(0) == ANCHOR


@pytest.mark.parametrize("store", [SpyStore, NoFenceStore], ids=["fence", "lease"])
@pytest.mark.parametrize("same_writer", [False, True])
def test_other_bytes_are_a_conflict(store: Callable[[], SpyStore], same_writer: bool) -> None:
    where = store()
    upload = opened(where)
    first = replace(ANCHOR, writer=upload.id if same_writer else "another")
    upload.commit(first)
    with pytest.raises(ConflictError) as caught:
        upload.commit(replace(first, step=1))
    assert caught.value.key == VERSION0
    assert first.writer in caught.value.message
    assert caught.value.hint
    assert ("earlier attempt of this writer" in caught.value.hint) == same_writer
    assert upload.log.read(0) == first, "the winner stays"


def test_a_version_that_cannot_be_read_is_not_replaced() -> None:
    store = SpyStore()
    upload = opened(store)
    store.put(VERSION0, b"{")
    with pytest.raises(CorruptError) as caught:
        upload.commit(ANCHOR)
    assert caught.value.key == VERSION0
    assert store.get(VERSION0) == b"{"


def test_a_lost_response_is_no_conflict() -> None:
    store = LosesResponses(goes_through=True)
    upload = opened(store)
    store.failures = 1
    upload.commit(ANCHOR)
    assert store.took() == [("create", VERSION0), ("get", VERSION0)]
    assert upload.log.read(0) == ANCHOR


def test_a_create_that_never_arrived_is_an_error_and_can_be_repeated() -> None:
    store = LosesResponses(goes_through=False)
    upload = opened(store)
    store.failures = 1
    with pytest.raises(StoreError):
        upload.commit(ANCHOR)
    upload.commit(ANCHOR)
    assert upload.log.read(0) == ANCHOR


def test_a_lost_response_while_another_writer_was_first() -> None:
    store = LosesResponses(goes_through=True)
    upload = opened(store)
    store.put(VERSION0, replace(ANCHOR, writer="another").to_bytes())
    store.failures = 1
    with pytest.raises(StoreError):
        upload.commit(ANCHOR)
    with pytest.raises(ConflictError):
        upload.commit(ANCHOR)


def test_a_client_that_meets_its_own_write() -> None:
    store = DeniesItsOwn()
    upload = Upload(store)
    upload.commit(ANCHOR)
    assert upload.log.read(0) == ANCHOR


def test_manifests_that_a_reader_would_refuse_are_not_committed() -> None:
    store = SpyStore()
    upload = opened(store)
    with pytest.raises(CorruptError):
        upload.commit(replace(ANCHOR, payloads=()))
    assert store.took() == []


def test_skips_and_late_anchors_have_places_of_their_own() -> None:
    store = SpyStore()
    upload = opened(store)
    late, skip = paper("anchor", 1, 9), paper("skip", 2, 5, start=0)
    written: list[tuple[Manifest, str | None, str]] = [
        (ANCHOR, None, VERSION0),
        (paper("delta", 1, 7), None, VERSION1),
        (late, keys.anchor_key(1), keys.anchor_key(1)),
        (skip, None, keys.skip_key(0, 2)),
    ]
    for manifest, key, place in written:
        upload.commit(manifest, key=key)
        upload.commit(manifest, key=key)
        assert store.get(place) == manifest.to_bytes()
        with pytest.raises(ConflictError):
            upload.commit(replace(manifest, step=77), key=key)
    assert upload.log.anchor(1) == late
    assert upload.log.skip(0, 2) == skip


# --- what waits for a manifest ----------------------------------------------------------------------------------------


class Hours:
    """A clock that is set by hand, and a store that keeps its time."""

    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0
        self.store = SpyStore()
        self.store._clock = lambda: self.now_s
        self.upload = Upload(self.store, clock=lambda: self.now_s)

    def puts(self) -> int:
        return len([key for verb, key in self.store.took() if verb == "put" and key.startswith(keys.PAYLOADS)])


@pytest.mark.parametrize("later_s", [0, LATE_S - 1, LATE_S + 1, -LATE_S - 1])
def test_a_payload_is_late_hours_after_it_was_put_until_it_is_put_again(later_s: float) -> None:
    """A clock that was set back by hours says as little about the time in between."""
    hours = Hours()
    ref = hours.upload.put(b"early")
    hours.now_s += later_s
    refs = [hours.upload.put(b"just now"), ref]
    assert hours.upload.is_late(refs) == (abs(later_s) > LATE_S)
    hours.upload.put(b"early")
    assert not hours.upload.is_late(refs)


def test_payloads_of_another_process_are_late_by_the_time_that_it_says() -> None:
    hours = Hours()
    ref = hours.upload.put(b"mine")
    assert not hours.upload.is_late([ref], since_unix_s=hours.now_s - LATE_S + 1)
    assert hours.upload.is_late([ref], since_unix_s=hours.now_s - LATE_S - 1)
    assert hours.upload.is_late([ref], since_unix_s=hours.now_s + LATE_S + 1)


def test_what_a_manifest_names_is_never_late() -> None:
    hours = Hours()
    ref = hours.upload.put(b"named")
    hours.upload.forget([ref])
    hours.now_s += LATE_S + 1
    assert not hours.upload.is_late([ref])
    assert not hours.upload.has(ref)


def test_what_is_kept_is_put_again_after_an_hour_until_a_manifest_names_it() -> None:
    hours = Hours()
    kept = hours.upload.put(b"files", keep=True)
    hours.upload.put(b"a payload")
    assert hours.puts() == 2
    hours.upload.renew()
    assert hours.puts() == 0
    hours.now_s += RESUME_S + 1
    hours.upload.renew()
    assert hours.puts() == 1
    hours.upload.forget([kept])
    hours.now_s += RESUME_S + 1
    hours.upload.renew()
    assert hours.puts() == 0


def test_payloads_of_an_earlier_attempt_are_as_old_as_the_store_says() -> None:
    """They are found by another process, whose clock is wrong."""
    hours = Hours()
    ref = hours.upload.put(b"left behind")
    other = Upload(hours.store, clock=lambda: hours.now_s - 10 * LATE_S)
    assert not other.has(ref)
    hours.now_s += RESUME_S - 1
    other.resume(RESUME_S)
    assert other.has(ref)
    assert not other.has(replace(ref, nbytes=1))
    hours.now_s += LATE_S - RESUME_S
    assert not other.is_late([ref])
    hours.now_s += 2
    assert other.is_late([ref])
    other.resume(LATE_S)
    assert not other.has(ref)


# --- stores that do not fence -----------------------------------------------------------------------------------------


def test_a_store_that_ignores_the_condition_is_used_under_a_lease_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = TakesAll()
    upload = Upload(store)
    with caplog.at_level(logging.WARNING):
        upload.open()
    assert "ignores create-if-absent" in caplog.text
    upload.commit(ANCHOR)
    with pytest.raises(ConflictError):
        Upload(store).open()
    upload.close()
    assert Upload(store).open() == ANCHOR


@pytest.mark.parametrize("store", [TakesAll, NoFenceStore])
def test_require_fencing(store: Callable[[], SpyStore]) -> None:
    where = store()
    with pytest.raises(StoreError) as caught:
        Upload(where, require_fencing=True).open()
    assert not caught.value.transient
    assert caught.value.hint
    assert list(where.list()) == []
    assert Upload(SpyStore(), require_fencing=True).open() is None


def test_a_store_that_says_that_it_cannot_fence_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        opened(NoFenceStore())
    assert caplog.text == ""


def test_a_commit_under_a_lease_asks_for_it_first() -> None:
    store = NoFenceStore()
    upload = opened(store)
    store.delete(keys.LEASE)
    LeasedStore(store, "another").take()
    with pytest.raises(ConflictError, match="another"):
        upload.commit(ANCHOR)
    assert upload.log.head() is None


def test_closing_gives_back_only_ones_own_lease() -> None:
    store = NoFenceStore()
    upload = opened(store)
    LeasedStore(store, "another", clock=lambda: 10.0**10).take()
    upload.close()
    assert b"another" in store.get(keys.LEASE)
    opened(SpyStore()).close()


@pytest.mark.parametrize(
    ("later_s", "other", "outcome"),
    [
        (0, False, "kept"),
        (LEASE_S / 2 - 1, False, "kept"),
        (LEASE_S / 2 + 1, False, "renewed"),
        (LEASE_S + 1, False, "renewed"),
        (0, True, "refused"),
        (LEASE_S - 1, True, "refused"),
        (LEASE_S + 1, True, "renewed"),
    ],
)
def test_a_lease_in_time(later_s: float, other: bool, outcome: str) -> None:
    store = NoFenceStore()
    LeasedStore(store, "a", clock=lambda: 1000.0).take()
    before = store.get(keys.LEASE)
    lease = LeasedStore(store, "b" if other else "a", clock=lambda: 1000.0 + later_s)
    if outcome == "refused":
        with pytest.raises(ConflictError) as caught:
            lease.take()
        assert caught.value.key == keys.LEASE
        assert f"{LEASE_S - later_s:.0f} s" in caught.value.message
    else:
        lease.take()
    assert (store.get(keys.LEASE) != before) == (outcome == "renewed")


def test_two_that_take_the_lease_at_the_same_moment() -> None:
    class Overtaken(NoFenceStore):
        def put(self, key: str, data: Data) -> None:
            super().put(key, data)
            if b'"a"' in bytes(data):
                super().put(key, resealed(bytes(data), {"writer": "b"}))

    with pytest.raises(ConflictError, match="same time"):
        LeasedStore(Overtaken(), "a").take()


def test_two_threads_of_one_writer_that_renew_the_lease_at_the_same_moment() -> None:
    """One commits versions, the other adds anchors."""

    class Renewed(NoFenceStore):
        def put(self, key: str, data: Data) -> None:
            super().put(key, data)
            super().put(key, LeaseRecord("a", 10**10).to_bytes())

    LeasedStore(Renewed(), "a").take()


@pytest.mark.parametrize("times", [1, 2])
def test_a_probe_that_is_damaged_on_the_way_is_read_again(times: int) -> None:
    """Otherwise a store that fences would be used under a lease, which replaces manifests."""
    flips = [Fault("flip")] * times
    is_probe = {"get_range": keys.PROBES, "get": keys.PROBES}
    store = FaultyStore(
        SpyStore(), lambda op: flips.pop() if flips and op.key.startswith(is_probe.get(op.verb, "-")) else None
    )
    upload = Upload(store)
    upload.open()
    assert not flips
    assert upload._lease is None


# --- stores that keep nothing -----------------------------------------------------------------------------------------


class Forgets(SpyStore):
    """Takes objects under `forgotten` without an error, and does not store them."""

    forgotten: tuple[str, ...] = ()

    def put(self, key: str, data: Data) -> None:
        if key.startswith(self.forgotten):
            self.calls.append(("put", key))
        else:
            super().put(key, data)


def test_a_store_that_keeps_nothing_is_noticed_when_a_feed_is_opened() -> None:
    store = Forgets()
    store.forgotten = ("",)
    with pytest.raises(StoreError, match="does not have") as caught:
        Upload(store).open()
    assert not caught.value.transient
    assert caught.value.hint
    assert list(store.list()) == []


@pytest.mark.parametrize("is_late", [False, True])
def test_an_anchor_whose_payloads_were_not_kept_is_not_committed(is_late: bool) -> None:
    store = Forgets()
    upload = opened(store)
    weights = Weights.of(state())
    versions = VersionWriter(upload=upload, layout=weights.layout)
    if is_late:
        first = versions.anchor(weights, None, Metadata()).manifest
        store.forgotten = (keys.PAYLOADS,)
        for item in list(store.list(keys.PAYLOADS)):
            store.delete(item.key)
        with pytest.raises(StoreError, match="does not have 1 payloads"):
            versions.add_anchor(first, weights)
        assert upload.log.anchors() == []
    else:
        store.forgotten = (keys.PAYLOADS,)
        with pytest.raises(StoreError, match="does not have 1 payloads"):
            versions.anchor(weights, None, Metadata())
        assert upload.log.head() is None


@pytest.mark.parametrize(
    ("files", "found", "hint"),
    [
        (("config.json", "model.safetensors"), "'config.json', 'model.safetensors'", "swapped"),
        (("notes.txt",), "'notes.txt'", "feed"),
        (("a b", "c", "d", "e/f"), "'a b', 'c', 'd', …", "choose an empty or a new folder"),
    ],
)
def test_a_folder_with_other_things_is_no_new_feed(
    tmp_path: Path, files: tuple[str, ...], found: str, hint: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidInputError) as caught:
        Upload(LocalStore(tmp_path)).open()
    assert f"{tmp_path} is not empty and has no feed: it has {found}" in str(caught.value)
    assert hint in str(caught.value.hint)
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"


def test_a_feed_may_have_other_things_beside_it(tmp_path: Path) -> None:
    """They were put there later, or by an attempt that failed before there was a feed."""
    for name in (".hidden", "lost+found/x", "probes/x", "replicas/r.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    Upload(LocalStore(tmp_path)).open()
    (tmp_path / "notes.txt").write_text("mine")
    Upload(LocalStore(tmp_path)).open()


def test_a_new_feed_is_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        Upload(LocalStore(tmp_path / "feed")).open()
    assert [message for message in caplog.messages if "new feed" in message] == [
        f"a new feed begins at {(tmp_path / 'feed').as_uri()}"
    ]


def test_a_folder_that_cannot_be_read_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of Python."""
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError):
        Upload(LocalStore(tmp_path / "file")).open()

    def refuse(path: object) -> list[str]:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert Upload(LocalStore(tmp_path / "new")).open() is None
