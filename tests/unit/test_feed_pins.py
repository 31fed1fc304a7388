import time
from dataclasses import replace
from typing import Any

import pytest
from support.feeds import Feed, NoFenceStore, SpyStore, same_weights
from support.helpers import resealed

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from deltasync.feed.pins import pin, pins, unpin
from deltasync.format import keys, limits
from deltasync.format.companions import write_files
from deltasync.format.sealed import FloorRecord
from deltasync.state import load
from deltasync.store.protocol import Data
from deltasync.upkeep.prune import ORPHAN_S, Retention, plan_prune, prune
from deltasync.upkeep.restore import plan_restore
from deltasync.upkeep.verify import verify


def anchored(versions: int = 12, anchors: tuple[int, ...] = (4, 8)) -> Feed:
    feed = Feed.of(versions)
    for version in anchors:
        feed.late_anchor(version)
    return feed


def prune_to_newest(feed: Feed) -> None:
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))


# --- pins as records --------------------------------------------------------------------------------------------------


def test_a_pin_is_a_name_for_a_version() -> None:
    feed = anchored()
    best = pin(feed.store, 5, name="best", note="reward 0.71")
    same = pin(feed.store, "best")
    assert (same.name, same.version, same.digest) == ("v5", 5, best.digest)
    assert pins(feed.store) == (best, same)
    assert plan_restore(feed.store, version="best")[0] == feed.log.read(5)
    assert unpin(feed.store, "best") == (best,)
    assert unpin(feed.store, 5) == (same,)
    assert pins(feed.store) == ()
    with pytest.raises(NotFoundError):
        plan_restore(feed.store, version="best")


@pytest.mark.parametrize("store", [SpyStore, NoFenceStore])
def test_again_replaces_the_note_and_another_version_is_refused(store: type[SpyStore]) -> None:
    feed = Feed.of(3, store())
    pin(feed.store, 1, name="best", note="old")
    assert pin(feed.store, 1, name="best", note="new").note == "new"
    with pytest.raises(ConflictError, match="of version 1, not of version 2"):
        pin(feed.store, 2, name="best")
    assert [(p.version, p.note) for p in pins(feed.store)] == [(1, "new")]


@pytest.mark.parametrize(
    ("version", "options", "error"),
    [
        (99, {}, NotFoundError),
        (-1, {}, InvalidInputError),
        (True, {}, InvalidInputError),
        (1.5, {}, InvalidInputError),
        ("nobody", {}, NotFoundError),
        ("../floor", {}, InvalidInputError),
        (1, {"name": "17"}, InvalidInputError),
        (1, {"name": ""}, InvalidInputError),
        (1, {"name": "a/b"}, InvalidInputError),
        (1, {"name": "\x1b[31mred"}, InvalidInputError),
        (1, {"name": "a" * 129}, InvalidInputError),
        (1, {"name": 5}, InvalidInputError),
        (1, {"note": 5}, InvalidInputError),
        (1, {"note": "x" * (limits.NOTE_BYTES_MAX + 1)}, InvalidInputError),
    ],
)
def test_bad_input_writes_nothing(version: Any, options: dict[str, Any], error: type[DeltasyncError]) -> None:
    feed = Feed.of(3)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    with pytest.raises(error) as caught:
        pin(feed.store, version, **options)
    assert "\x1b" not in str(caught.value)
    assert not [call for call in feed.store.took() if call[0] in ("put", "create", "delete")]


def test_no_pin_to_remove() -> None:
    feed = Feed.of(2)
    for what in ("best", 1):
        with pytest.raises(NotFoundError, match="no pin"):
            unpin(feed.store, what)


# --- pins and prune ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 3, 4, 6, 8, 11])
def test_a_pinned_version_stays_and_little_else(version: int) -> None:
    feed = anchored()
    pin(feed.store, version, name="best")
    prune_to_newest(feed)
    checked = verify(feed.store, deep=True)
    assert checked.is_clean
    start = max(start for start in (0, 4, 8) if start <= version)
    assert set(checked.restorable) == {*range(start, version + 1), *range(8, 12)}
    assert same_weights(load(feed.log, feed.log.resolve("best")), feed.states[version])
    prune_to_newest(feed)
    assert verify(feed.store, deep=True) == checked, "another prune keeps the same"
    unpin(feed.store, "best")
    prune_to_newest(feed)
    assert verify(feed.store, deep=True).restorable == tuple(range(8, 12))


def test_the_cheapest_way_to_a_pinned_version_is_kept() -> None:
    """A skip leads over three deltas, which are not needed then. Files beside the weights are those of the version."""
    feed = anchored(14, (10,))
    feed.skip(0, 4)
    old, new = (feed.upload.put(write_files({"config.json": text})) for text in (b"1", b"2"))
    for v in range(14):
        manifest = feed.log.read(v)
        feed.store.put(keys.version_key(v), replace(manifest, files=old if v == 4 else new).to_bytes())
    assert isinstance(feed.store, SpyStore)
    for ref in (old, new):
        feed.store.age(keys.payload_key(ref.sha256), time.time() - 2 * ORPHAN_S)
    pin(feed.store, 4)
    prune_to_newest(feed)
    assert verify(feed.store, deep=True).restorable == (0, 4, 10, 11, 12, 13)
    assert feed.store.get(keys.payload_key(old.sha256))
    unpin(feed.store, 4)
    prune_to_newest(feed)
    with pytest.raises(NotFoundError):
        feed.store.get(keys.payload_key(old.sha256))
    assert feed.store.get(keys.payload_key(new.sha256))
    assert verify(feed.store, deep=True).is_clean


def test_a_version_that_is_gone_cannot_be_pinned() -> None:
    feed = anchored()
    prune_to_newest(feed)
    for version in (0, 5, 7):
        with pytest.raises(NotFoundError, match="pruned"):
            pin(feed.store, version)
    assert pins(feed.store) == ()
    assert pin(feed.store, 8).version == 8


def test_a_prune_that_was_planned_before_the_pin() -> None:
    """The pin comes before the deletion: what it needs stays. It comes after the floor was raised: it is refused."""
    feed = anchored()
    found = plan_prune(feed.store, Retention(anchors=1, versions=1))
    pin(feed.store, 5)
    stayed = prune(feed.store, found)
    assert keys.anchor_key(4) in stayed
    assert same_weights(load(feed.log, feed.log.resolve("v5")), feed.states[5])
    assert verify(feed.store, deep=True).is_clean


def test_a_pin_between_any_two_operations_of_a_prune() -> None:
    """Either the version is kept, or the pin is refused and leaves nothing."""
    outcomes = set()
    for moment in range(40):

        class Pinning(SpyStore):
            left = -1
            refused: bool | None = None

            def _count(self) -> None:
                self.left -= 1
                if self.left == 0:
                    try:
                        pin(self, 5, name="best")
                    except NotFoundError:
                        self.refused = True
                    else:
                        self.refused = False

            def put(self, key: str, data: Data) -> None:
                self._count()
                super().put(key, data)

            def delete(self, key: str) -> None:
                self._count()
                super().delete(key)

            def list(self, prefix: str = "", *, after: str | None = None) -> Any:
                self._count()
                return super().list(prefix, after=after)

        store = Pinning()
        feed = Feed.of(12, store)
        for version in (4, 8):
            feed.late_anchor(version)
        store.left = moment
        prune_to_newest(feed)
        outcomes.add(store.refused)
        checked = verify(store, deep=True)
        assert checked.is_clean
        assert [p.name for p in pins(store)] == (["best"] if store.refused is False else [])
        if store.refused is False:
            assert same_weights(load(feed.log, feed.log.resolve("best")), feed.states[5])
    assert outcomes == {True, False, None}


def test_below_the_floor_another_pin_vouches_for_the_version() -> None:
    feed = anchored()
    pin(feed.store, 5, name="best")
    prune_to_newest(feed)
    assert pin(feed.store, "best", name="release").version == 5
    unpin(feed.store, "best")
    prune_to_newest(feed)
    assert same_weights(load(feed.log, feed.log.resolve("release")), feed.states[5])
    with pytest.raises(NotFoundError):
        pin(feed.store, 4, name="near")


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_prune_that_would_break_a_pin_is_refused() -> None:
    feed = anchored()
    pin(feed.store, 5, name="best")
    feed.store.delete(feed.payload_keys(feed.log.read(5))[0])
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    with pytest.raises(CorruptError) as caught:
        prune_to_newest(feed)
    assert (caught.value.rule, caught.value.key) == ("prune.pin", keys.pin_key("best"))
    assert not [call for call in feed.store.took() if call[0] in ("put", "delete")]
    lost = [damage for damage in verify(feed.store).damages if damage.key == keys.pin_key("best")]
    assert [damage.error.rule for damage in lost] == ["pin.lost"]
    unpin(feed.store, "best")
    prune_to_newest(feed)
    assert verify(feed.store).is_clean


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"format": "deltasync/9"}, "pin.format"),
        ({"must_understand": ["until"]}, "pin.must_understand"),
        ({"version": -1}, "pin.field"),
        ({"note": None}, "pin.field"),
        ({"note": "x" * 5000}, "pin.note"),
        ({"name": "other"}, "pin.key"),
        (None, "pin.json"),
    ],
)
def test_a_pin_that_cannot_be_read_stops_a_prune(fields: dict[str, Any] | None, rule: str) -> None:
    feed = anchored()
    data = pin(feed.store, 5, name="best").to_bytes()
    feed.store.put(keys.pin_key("best"), b"{" if fields is None else resealed(data, fields))
    with pytest.raises((CorruptError, FormatError)) as refused:
        feed.log.resolve("best")
    assert refused.value.rule == rule
    with pytest.raises(CorruptError) as caught:
        prune_to_newest(feed)
    assert (caught.value.rule, caught.value.key) == ("prune.damaged", keys.pin_key("best"))
    assert keys.pin_key("best") in [damage.key for damage in verify(feed.store).damages]
    assert unpin(feed.store, "best") == ()
    prune_to_newest(feed)


def test_a_pin_of_a_version_that_was_replaced() -> None:
    feed = anchored()
    data = pin(feed.store, 11, name="best").to_bytes()
    feed.store.put(keys.pin_key("best"), resealed(data, {"digest": "0" * 32}))
    with pytest.raises(CorruptError) as caught:
        plan_restore(feed.store, version="best")
    assert caught.value.rule == "pin.digest"
    assert [damage.error.rule for damage in verify(feed.store).damages] == ["pin.digest"]


def test_other_keys_under_pins_are_ignored() -> None:
    feed = anchored()
    for key in ("pins/17.json", "pins/readme.txt", "pins/a/b.json"):
        feed.store.put(key, b"junk")
    feed.store.put(keys.FLOOR, FloorRecord(0).to_bytes())
    assert pins(feed.store) == ()
    prune_to_newest(feed)
    assert feed.store.get("pins/17.json") == b"junk"
