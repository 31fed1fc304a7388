"""What a replica says of itself: heartbeats under a name of its own, and what other threads read."""

import threading
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
from support import join
from support.feeds import Feed
from support.replicas import (
    TorchTarget,
    follower,
    following,
    long_feed,
    small_step,
    target_for,
    wait_until,
)

from deltasync.errors import NotFoundError, StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.sealed import Heartbeat
from deltasync.replica.live import Heartbeats, Live
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Data
from deltasync.testing.faulty import Fault, FaultyStore, never


def test_heartbeats() -> None:
    feed = long_feed(2)
    target = target_for(feed)
    with follower(feed.store, target, replica="one", beat_s=1000.0) as replica:
        replica.advance(to=0)
        (beat,) = feed.log.heartbeats()
        assert (beat.replica, beat.version) == ("one", 0)
        digest = feed.log.read(0).digest.hex
        assert (beat.facts["engine"], beat.facts["digest"]) == ("torch", digest)
        assert {"plan_s", "fetch_s", "decode_s", "stage_s", "commit_s", "pause_s"} <= beat.facts.keys()
        assert beat.facts["moved_version"] == str(beat.version)
        assert abs(int(beat.facts["moved_unix_ms"]) - 1000 * time.time()) < 1000 * 3600
        replica.advance()
        (beat,) = feed.log.heartbeats()
        assert (beat.version, beat.facts["lag"]) == (1, "0")
        puts = len([call for call in feed.store.took() if call[0] == "put"])
        replica.advance()
        assert [call for call in feed.store.took() if call[0] == "put"] == [], puts
    assert feed.log.heartbeats() == [], "who leaves for good keeps nothing back"


def test_a_heartbeat_that_fails_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(1)
    store = FaultyStore(feed.store, lambda op: Fault("refuse") if op.key.startswith(keys.REPLICAS) else None)
    target = target_for(feed)
    with follower(store, target, beat_s=0.0) as replica:
        for version in range(3):
            replica.advance()
            assert target.holds(feed.states[version])
            feed.delta(small_step(feed))
    assert caplog.text.count("cannot write the heartbeat") == 1


def test_a_replica_without_the_right_to_write_says_so_before_it_fetches(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(2)
    refusal = Fault("refuse", transient=False)
    store = FaultyStore(feed.store, lambda op: refusal if op.verb == "put" else None)
    target = target_for(feed)
    with follower(store, target, replica="one", beat_s=0.0) as replica:
        replica.advance(to=0)
        operations = [(operation.verb, operation.key) for operation in store.operations]
        first_payload = next(i for i, (_, key) in enumerate(operations) if key.startswith(keys.PAYLOADS))
        assert ("put", keys.replica_key("one")) in operations[:first_payload]
        replica.advance()
        assert target.holds(feed.states[1])
        assert "cannot write the heartbeat of one" in str(replica.status().heartbeat_problem)
        assert caplog.text.count("cannot write the heartbeat") == 1
        store._plan = never
        replica.advance(to=0)
        assert replica.status().heartbeat_problem is None


def test_two_followers_with_one_name_find_out(caplog: pytest.LogCaptureFixture) -> None:
    feed = long_feed(1)
    with (
        follower(feed.store, target_for(feed), replica="twin", beat_s=0.0) as one,
        follower(feed.store, target_for(feed), replica="twin", beat_s=0.0) as other,
    ):
        one.advance()
        other.advance()
        assert one.status().heartbeat_problem is None, "it has not looked since"
        for _ in range(3):
            one.advance()
            other.advance()
        for replica in (one, other):
            assert "has the name twin, too" in str(replica.status().heartbeat_problem)
        assert caplog.text.count("has the name twin, too") == 2, "each of them says so once"
        one.advance()
        other.close()
        assert [beat.replica for beat in feed.log.heartbeats()] == ["twin"], "the heartbeat of the first one stays"
        one.advance()
        one.advance()
        assert one.status().heartbeat_problem is None, "it is alone again"
    assert feed.log.heartbeats() == []


def test_a_restarted_follower_takes_over_its_name(caplog: pytest.LogCaptureFixture) -> None:
    """The process before it was killed: its heartbeat is still there."""
    feed = long_feed(1)
    feed.log.beat(Heartbeat("one", 0, 1, {"instance": "another"}))
    with follower(feed.store, target_for(feed), replica="one", beat_s=0.0) as replica:
        for _ in range(3):
            replica.advance()
        assert replica.status().heartbeat_problem is None
    assert caplog.text == ""


def test_no_heartbeat_where_there_is_no_feed(tmp_path: Path) -> None:
    with follower(LocalStore(tmp_path / "typo"), target_for(Feed.of(1)), beat_s=0.0) as replica:
        with pytest.raises(NotFoundError):
            replica.advance()
        with following(replica):
            wait_until(lambda: replica.error is not None)
    assert list(tmp_path.iterdir()) == []


def test_a_heartbeat_has_the_digest_of_its_version() -> None:
    """Also where another thread brings the target to the next version while the heartbeat is on its way."""

    class Slow(MemoryStore):
        meanwhile: Callable[[], None] | None = None

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            if key.startswith(keys.REPLICAS) and self.meanwhile is not None:
                meanwhile, self.meanwhile = self.meanwhile, None
                meanwhile()
            return super().get_range(key, offset, length)

        def put(self, key: str, data: Data) -> None:
            if key.startswith(keys.REPLICAS):
                beat = Heartbeat.from_bytes(bytes(data))
                written.append((beat.version, beat.facts.get("digest")))
            super().put(key, data)

    written: list[tuple[int | None, str | None]] = []
    store = Slow()
    feed = long_feed(2, store)
    digests = {version: feed.log.read(version).digest.hex for version in range(2)}
    with follower(store, target_for(feed), beat_s=0.0) as replica:
        replica.advance(to=0)
        # As a scrub does that finds the mirror ahead of the target: without a heartbeat before it.
        other = threading.Thread(target=replica._delivery.to, args=(feed.log.read(1),))

        def advance() -> None:
            other.start()
            wait_until(lambda: replica.status().version == 1)

        store.meanwhile = advance
        replica._live.beat()
        join(other)
    assert 1 in dict(written)
    assert all(digest in (None, digests[version]) for version, digest in written if version is not None)


def alternating(*values: object) -> property:
    """An attribute that another thread has changed whenever it is read again."""
    turns = cycle(values)
    return property(lambda self: next(turns), lambda self, value: None)


def test_what_other_threads_change_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = long_feed(2)
    with follower(feed.store, target_for(feed)) as replica:
        replica.advance()
        monkeypatch.setattr(Live, "pinned", alternating(feed.log.read(0), None), raising=False)
        monkeypatch.setattr(Live, "error", alternating(StoreError("down", transient=True), None), raising=False)
        monkeypatch.setattr(Live, "read_back", alternating((1, 100), (2, 200)), raising=False)
        for _ in range(2):
            status = replica.status()
            assert status.pinned in (0, None)
            assert status.error in ("StoreError: down", None)
            assert (status.proved_version, status.proved_unix_s) in ((1, 100), (2, 200))
            assert replica._live.poll().version in (0, 1)
            facts = replica._live.facts(1)
            assert (facts["proved_version"], facts["proved_unix_s"]) in (("1", "100"), ("2", "200"))
            # Of another version than the one that is live by now: what is said beside a version is about that one.
            assert replica._live.facts(0)["lag"] == "1"


def refusing_store() -> FaultyStore:
    """Every request is refused for good, as with wrong credentials."""
    return FaultyStore(MemoryStore(), lambda operation: Fault("refuse", transient=False))


def test_a_store_that_refuses_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """Following ends with the error: no warning about the heartbeat, which is refused as well, in front of it."""
    with (
        follower(refusing_store(), TorchTarget(Feed.of(1).states[0].layout), beat_s=30.0) as replica,
        pytest.raises(StoreError, match="refused"),
    ):
        replica.follow()
    assert caplog.text == ""


def test_a_heartbeat_that_was_never_written_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    beats = Heartbeats(Log(refusing_store()), "r", beat_s=30.0)
    beats.beat(1, {})
    beats.leave()
    (record,) = caplog.records
    assert record.getMessage().startswith("cannot write the heartbeat of r")


def test_replicas_have_ids_of_their_own() -> None:
    one, other = (follower(MemoryStore(), target_for(Feed.of(1))).replica for _ in range(2))
    assert one != other
    assert keys.parse_replica_key(keys.replica_key(one)) == one
