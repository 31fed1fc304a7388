import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.feeds import Feed, SpyStore, flip, rank_blocks
from support.helpers import changed, resealed, state, write_sharded

from deltasync import blocks
from deltasync.errors import CorruptError, DeltasyncError
from deltasync.feed.plan import Edge
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.sealed import FloorRecord
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import ObjectInfo
from deltasync.upkeep.prune import Retention, plan_prune, prune
from deltasync.upkeep.survey import reachable
from deltasync.upkeep.verify import Verification, verify

DEPTHS = pytest.mark.parametrize("deep", [False, True], ids=["shallow", "deep"])


def feed_of_8() -> Feed:
    """An anchor, deltas (one of three payloads, one of nothing), a late anchor at 4 and a skip from 1 to 6."""
    feed = Feed.of(3)
    feed.delta(ranks=3)
    feed.delta()
    feed.late_anchor(4)
    feed.delta(feed.states[-1])
    feed.delta()
    feed.skip(1, 6)
    feed.delta()
    return feed


def restorable(feed: Feed) -> tuple[int, ...]:
    """The versions that a restore brings back, by trying."""
    found = []
    for version, weights in enumerate(feed.states):
        try:
            got = load(feed.log, feed.log.read(version))
        except DeltasyncError:
            continue
        assert all((x == y).all() for x, y in zip(got.arrays, weights.arrays, strict=True))
        found.append(version)
    return tuple(found)


def payload_of(feed: Feed, key: str, i: int = 0) -> str:
    manifest = Manifest.from_bytes(feed.store.get(key))
    return keys.payload_key(manifest.payloads[i].sha256)


@DEPTHS
def test_a_feed_without_damage(deep: bool) -> None:
    feed = feed_of_8()
    found = verify(feed.store, deep=deep)
    assert found == Verification(
        head=7,
        deep=deep,
        restorable=tuple(range(8)),
        lost=(),
        pruned=(),
        damages=(),
        unchecked=(),
        orphans=0,
        orphan_bytes=0,
    )
    assert found.is_clean


@DEPTHS
def test_nothing(deep: bool) -> None:
    found = verify(MemoryStore(), deep=deep)
    assert found.is_clean
    assert (found.head, found.restorable, found.lost) == (None, (), ())


def test_a_shallow_look_fetches_no_payload() -> None:
    feed = feed_of_8()
    feed.store.took()  # type: ignore[attr-defined]
    verify(feed.store)
    calls = feed.store.took()  # type: ignore[attr-defined]
    assert not [key for verb, key in calls if verb == "get" and key.startswith(keys.PAYLOADS)]
    verify(feed.store, deep=True)
    fetched = [key for verb, key in feed.store.took() if verb == "get" and key.startswith(keys.PAYLOADS)]  # type: ignore[attr-defined]
    assert len(fetched) == len(set(fetched)) == len(list(feed.store.list(keys.PAYLOADS))), "each once"


V, A, S = keys.version_key, keys.anchor_key, keys.skip_key
Case = tuple[Callable[[Feed], object], str, str, tuple[int, ...]]
"""What is done, the manifest that is blamed, the rule, and the versions that are lost."""

SHALLOW: dict[str, Case] = {
    "first anchor gone": (lambda f: f.store.delete(payload_of(f, V(0))), V(0), "payload.missing", (0, 1, 2, 3)),
    "delta 2 gone": (lambda f: f.store.delete(payload_of(f, V(2))), V(2), "payload.missing", (2, 3)),
    "part of delta 3 gone": (lambda f: f.store.delete(payload_of(f, V(3), 1)), V(3), "payload.missing", (3,)),
    "delta 4 gone": (lambda f: f.store.delete(payload_of(f, V(4))), V(4), "payload.missing", ()),
    "delta 7 gone": (lambda f: f.store.delete(payload_of(f, V(7))), V(7), "payload.missing", (7,)),
    "late anchor gone": (lambda f: f.store.delete(payload_of(f, A(4))), A(4), "payload.missing", ()),
    "skip gone": (lambda f: f.store.delete(payload_of(f, S(1, 6))), S(1, 6), "payload.missing", ()),
    "delta 2 cut": (lambda f: f.store.put(payload_of(f, V(2)), b"short"), V(2), "payload.size", (2, 3)),
    "manifest 2 gone": (lambda f: f.store.delete(V(2)), V(2), "chain.gap", (2, 3)),
    "manifest 2 unreadable": (lambda f: f.store.put(V(2), b"{"), V(2), "manifest.json", (2, 3)),
    "manifest 7 unreadable": (lambda f: f.store.put(V(7), b"{"), V(7), "manifest.json", (7,)),
    "manifest 0 unreadable": (lambda f: f.store.put(V(0), b"{"), V(0), "manifest.json", (0, 1, 2, 3)),
    "late anchor unreadable": (lambda f: f.store.put(A(4), b"{"), A(4), "manifest.json", ()),
    "skip unreadable": (lambda f: f.store.put(S(1, 6), b"{"), S(1, 6), "manifest.json", ()),
    "floor unreadable": (lambda f: f.store.put(keys.FLOOR, b"{"), keys.FLOOR, "floor.json", ()),
    "floor of a copy unreadable": (lambda f: f.store.put(keys.COPY, b"{"), keys.COPY, "floor.json", ()),
    "manifest of another version": (lambda f: f.store.put(V(2), f.store.get(V(3))), V(2), "manifest.key", (2, 3)),
    "a link broken": (lambda f: rewrite(f, V(3), parent_digest="0" * 32), V(3), "chain.link", (3,)),
    "another late anchor": (lambda f: rewrite(f, A(4), digest="0" * 32), A(4), "chain.link", ()),
    "a skip from elsewhere": (lambda f: rewrite(f, S(1, 6), parent_digest="0" * 32), S(1, 6), "chain.link", ()),
}  # fmt: skip


def rewrite(feed: Feed, key: str, **fields: object) -> None:
    feed.store.put(key, resealed(feed.store.get(key), fields))


@DEPTHS
@pytest.mark.parametrize("case", SHALLOW.values(), ids=SHALLOW.keys())
def test_damage_that_a_look_finds(case: Case, deep: bool) -> None:
    damage, key, rule, lost = case
    feed = feed_of_8()
    damage(feed)
    found = verify(feed.store, deep=deep)
    assert not found.is_clean
    assert {(d.key, d.error.rule) for d in found.damages} == {(key, rule)}
    assert found.lost == lost
    assert found.damages[0].takes == lost
    assert found.head == 7
    assert set(found.restorable) | set(lost) == set(range(8))
    assert restorable(feed) == found.restorable


DEEP: dict[str, Case] = {
    "first anchor": (lambda f: flip(f.store, payload_of(f, V(0))), V(0), "payload.sha256", (0, 1, 2, 3)),
    "delta 2": (lambda f: flip(f.store, payload_of(f, V(2))), V(2), "payload.sha256", (2, 3)),
    "second part of delta 3": (lambda f: flip(f.store, payload_of(f, V(3), 1)), V(3), "payload.sha256", (3,)),
    "delta 4": (lambda f: flip(f.store, payload_of(f, V(4))), V(4), "payload.sha256", ()),
    "late anchor": (lambda f: flip(f.store, payload_of(f, A(4))), A(4), "payload.sha256", ()),
    "skip": (lambda f: flip(f.store, payload_of(f, S(1, 6))), S(1, 6), "payload.sha256", ()),
}  # fmt: skip


@pytest.mark.parametrize("case", DEEP.values(), ids=DEEP.keys())
def test_damage_that_only_deep_finds(case: Case) -> None:
    damage, key, rule, lost = case
    feed = feed_of_8()
    damage(feed)
    assert verify(feed.store).is_clean
    found = verify(feed.store, deep=True)
    assert [(d.key, d.error.rule, d.takes) for d in found.damages] == [(key, rule, lost)]
    assert found.lost == lost
    assert found.restorable == restorable(feed)


def test_damages_add_up() -> None:
    """Two damages, of which neither alone would cost version 5 on; both together do."""
    feed = feed_of_8()
    flip(feed.store, payload_of(feed, A(4)))
    flip(feed.store, payload_of(feed, V(4)))
    flip(feed.store, payload_of(feed, S(1, 6)))
    found = verify(feed.store, deep=True)
    assert found.lost == (4, 5, 6, 7)
    assert found.restorable == restorable(feed) == (0, 1, 2, 3)
    assert {d.key for d in found.damages} == {A(4), V(4), S(1, 6)}


def lying_delta(feed: Feed, *, blame: str) -> None:
    """Version 2 as a delta whose manifest and payload are sound by themselves, and wrong."""
    old, new = feed.states[1], feed.states[2]
    manifest = feed.log.read(2)
    if blame == "block.digest":
        # Made against another state: blocks and sums fit together, but not to version 1.
        other = feed.states[0]
        found = blocks.encode_delta(other, new)
        start = manifest.parent_digest
        assert start is not None
        digest = sum((block.digest for block in found), start)
        header = PayloadHeader("delta", new.layout, start, digest, 2)
        wrong = replace(manifest, digest=digest, changed=sum(b.changed for b in found))
    else:
        found = [block for part in rank_blocks(old, new, 2) for block in part]
        header = PayloadHeader("delta", new.layout, manifest.parent_digest, manifest.digest, 2)
        assert manifest.changed is not None
        wrong = replace(manifest, changed=manifest.changed - 1)
    ref = feed.upload.put(write_payload(header, found))
    feed.store.put(V(2), replace(wrong, payloads=(ref,)).to_bytes())


@pytest.mark.parametrize("rule", ["block.digest", "manifest.changed"])
def test_what_does_not_add_up(rule: str) -> None:
    feed = Feed.of(3)
    lying_delta(feed, blame=rule)
    assert verify(feed.store).lost == ()
    found = verify(feed.store, deep=True)
    assert [(d.key, d.error.rule) for d in found.damages] == [(V(2), rule)]
    assert found.lost == (2,)


def test_a_skip_of_another_layout() -> None:
    feed = Feed.of(3)
    other = Feed()
    other.anchor({"a": np.arange(4000, dtype=np.float32)})
    old = other.states[0]
    found = blocks.encode_delta(old, other.next_state())
    start, end = feed.log.read(0), feed.log.read(2)
    digest_delta = end.digest - start.digest - sum((b.digest for b in found), StateDigest.ZERO)
    forged = replace(found[0], digest=found[0].digest + digest_delta)
    header = PayloadHeader("delta", old.layout, start.digest, end.digest, 2)
    ref = feed.upload.put(write_payload(header, [forged, *found[1:]]))
    fields = {"layout_sha256": old.layout.sha256, "elements": old.layout.elements, "payloads": (ref,)}
    feed.skip(0, 2, changed=sum(b.changed for b in found), **fields)
    checked = verify(feed.store, deep=True)
    assert [(d.key, d.error.rule) for d in checked.damages] == [(S(0, 2), "layout.differs")]
    assert checked.lost == ()


def with_files(versions: int) -> tuple[Feed, str]:
    """Every version names the same files beside its weights."""
    feed = Feed.of(versions)
    ref = feed.upload.put(write_files({"config.json": b"{}"}))
    for version in range(versions):
        feed.store.put(V(version), replace(feed.log.read(version), files=ref).to_bytes())
    return feed, keys.payload_key(ref.sha256)


def test_files_take_every_version_that_names_them() -> None:
    feed, key = with_files(4)
    assert verify(feed.store, deep=True).is_clean
    flip(feed.store, key)
    assert verify(feed.store).is_clean
    found = verify(feed.store, deep=True)
    assert {d.key for d in found.damages} == {V(v) for v in range(4)}
    assert found.lost == (0, 1, 2, 3)
    feed.store.delete(key)
    assert verify(feed.store).lost == (0, 1, 2, 3)


@DEPTHS
def test_pruned_is_not_lost(deep: bool) -> None:
    feed = feed_of_8()
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    found = verify(feed.store, deep=deep)
    assert found.is_clean
    assert (found.pruned, found.restorable, found.lost) == ((0, 1, 2, 3), (4, 5, 6, 7), ())


@DEPTHS
def test_damage_above_the_floor_is_lost(deep: bool) -> None:
    feed = feed_of_8()
    prune(feed.store, plan_prune(feed.store, Retention(anchors=1, versions=1)))
    feed.store.delete(payload_of(feed, A(4)))
    found = verify(feed.store, deep=deep)
    assert (found.pruned, found.restorable, found.lost) == ((0, 1, 2, 3), (), (4, 5, 6, 7))
    assert [(d.key, d.takes) for d in found.damages] == [(A(4), (4, 5, 6, 7))]


@DEPTHS
def test_orphans_are_counted_and_no_damage(deep: bool) -> None:
    feed = feed_of_8()
    feed.upload.put(b"x" * 100)
    feed.upload.put(b"y" * 11)
    feed.store.put("payloads/readme.txt", b"stray")
    found = verify(feed.store, deep=deep)
    assert found.is_clean
    assert (found.orphans, found.orphan_bytes) == (2, 111)


# --- bases ------------------------------------------------------------------------------------------------------------


def based(folder: Path) -> Feed:
    feed = Feed()
    feed.base(state(), BaseRef(str(folder)))
    feed.delta()
    feed.delta()
    return feed


def test_a_base_that_is_available(tmp_path: Path) -> None:
    write_sharded(tmp_path / "base", state())
    write_sharded(tmp_path / "copy", state())
    feed = based(tmp_path / "base")
    for base in (None, tmp_path / "copy"):
        found = verify(feed.store, deep=True, base=base)
        assert found.is_clean
        assert (found.restorable, found.unchecked) == ((0, 1, 2), ())
    flip(feed.store, payload_of(feed, V(2)))
    assert verify(feed.store, deep=True).lost == (2,)


def test_a_base_that_is_not_available(tmp_path: Path) -> None:
    """Nothing is lost for that: it is said what was not looked at. Hashes are checked all the same."""
    feed = based(tmp_path / "base")
    missing = tmp_path / "copy"
    assert verify(feed.store).unchecked == ()
    found = verify(feed.store, deep=True, base=missing)
    assert found.is_clean
    assert found.restorable == (0, 1, 2)
    assert len(found.unchecked) == 2
    assert "base of version 0" in found.unchecked[0]
    assert "2 manifests" in found.unchecked[1]
    flip(feed.store, payload_of(feed, V(1)))
    found = verify(feed.store, deep=True, base=missing)
    assert [(d.key, d.error.rule) for d in found.damages] == [(V(1), "payload.sha256")]


def test_an_anchor_after_a_base_that_is_not_available(tmp_path: Path) -> None:
    feed = based(tmp_path / "base")
    feed.late_anchor(1)
    found = verify(feed.store, deep=True, base=tmp_path / "copy")
    assert found.is_clean
    assert "1 manifests" in found.unchecked[1]


def test_another_base_is_a_mismatch(tmp_path: Path) -> None:
    write_sharded(tmp_path / "wrong", changed(state()))
    found = verify(based(tmp_path / "base").store, deep=True, base=tmp_path / "wrong")
    assert [(d.key, d.error.kind, d.error.rule) for d in found.damages] == [(V(0), "mismatch", "base.digest")]


def test_progress_reaches_the_end() -> None:
    feed = feed_of_8()
    calls: list[tuple[str, int, int]] = []
    verify(feed.store, deep=True, progress=lambda phase, done, total: calls.append((phase, done, total)))
    nbytes = sum(info.nbytes for info in feed.store.list(keys.PAYLOADS))
    assert calls[-1] == ("verify", nbytes, nbytes)


def test_json() -> None:
    feed = feed_of_8()
    feed.store.delete(payload_of(feed, V(7)))
    found = json.loads(json.dumps(verify(feed.store).to_json()))
    message = found["damages"][0].pop("message")
    assert V(7) in message
    assert found == {
        "clean": False,
        "deep": False,
        "head": 7,
        "restorable": [0, 1, 2, 3, 4, 5, 6],
        "lost": [7],
        "pruned": [],
        "damages": [{"key": V(7), "kind": "not_found", "rule": "payload.missing"}],
        "takes": [{"versions": [[7, 7]], "keys": [V(7)]}],
        "unchecked": [],
        "orphans": 0,
        "orphan_bytes": 0,
        "young_orphans": 0,
    }


def test_a_damage_is_an_error_of_the_tree() -> None:
    feed = feed_of_8()
    feed.store.put(V(2), b"{")
    (damage,) = verify(feed.store).damages
    assert isinstance(damage.error, CorruptError)
    assert damage.to_json()["kind"] == "corrupt"


def test_a_version_far_away_is_no_endless_walk() -> None:
    """A stray manifest makes a gap of any length: it is reported, and takes no time or memory."""
    feed = Feed.of(3)
    stray = replace(feed.log.read(2), version=2**62, parent=2**62 - 1)
    feed.store.put(keys.version_key(2**62), stray.to_bytes())
    found = verify(feed.store)
    assert [(d.key, d.error.rule) for d in found.damages] == [(V(3), "chain.gap")], "one finding for a gap"
    assert found.damages[0].error.message == f"versions 3 to {2**62 - 1} are missing"
    assert found.restorable == (0, 1, 2)
    with pytest.raises(CorruptError):
        plan_prune(feed.store, Retention(anchors=1, versions=1))


@DEPTHS
@pytest.mark.parametrize("floor", [3, 10**9, 2**63 - 1])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_floor_above_the_head_hides_nothing(floor: int, is_lost: bool, deep: bool) -> None:
    """By it all versions would be pruned on purpose, although nothing can be restored any more."""
    feed = Feed.of(3)
    feed.store.put(keys.FLOOR, FloorRecord(floor).to_bytes())
    if is_lost:
        feed.store.delete(payload_of(feed, V(0)))
    found = verify(feed.store, deep=deep)
    assert not found.is_clean
    rules = {(d.key, d.error.rule) for d in found.damages}
    assert rules == {(keys.FLOOR, "floor.version"), *([(V(0), "payload.missing")] if is_lost else [])}
    assert (found.pruned, found.lost) == ((), (0, 1, 2) if is_lost else ())
    assert found.restorable == (() if is_lost else (0, 1, 2))


def test_a_floor_that_rises_while_the_feed_is_read() -> None:
    """New versions and a prune at the same time are no damage."""

    class Rising(SpyStore):
        feed: Feed | None = None

        def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
            if prefix == keys.PAYLOADS and self.feed is not None:
                feed, self.feed = self.feed, None
                for _ in range(3):
                    feed.delta()
                feed.late_anchor(5)
                prune(self, plan_prune(self, Retention(anchors=1, versions=1)))
            return super().list(prefix, after=after)

    store = Rising()
    store.feed = Feed.of(3, store)
    found = verify(store)
    assert found.is_clean
    assert (found.head, found.restorable) == (5, (5,))


class CountingEdges:
    """Counts the edges that `reachable` looks at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.edges = 0
        monkeypatch.setattr("deltasync.upkeep.verify.reachable", self)

    def __call__(self, edges: Iterable[Edge]) -> set[int]:
        listed = list(edges)
        self.edges += len(listed)
        return reachable(listed)


def stray_versions(feed: Feed, count: int) -> None:
    """Manifests far away from each other, each after a gap of its own."""
    for i in range(count):
        stray = replace(feed.log.read(2), version=2**40 * (i + 1), parent=2**40 * (i + 1) - 1)
        feed.store.put(V(stray.version), stray.to_bytes())


def unreadable_skips(feed: Feed, count: int) -> None:
    for i in range(count):
        feed.store.put(S(0, 10 + i), b"{")


def skips_of_nothing(feed: Feed, count: int) -> None:
    """Skips that can be read and lead to a version of the feed, but whose payload is not there."""
    ref = PayloadRef("ab" * 32, 10)
    for i in range(count):
        manifest = replace(feed.log.read(2), kind="skip", version=2 + i, parent=0, payloads=(ref,))
        manifest = replace(manifest, parent_digest=feed.log.read(0).digest)
        feed.store.put(S(0, 2 + i), manifest.to_bytes())


def unreadable_versions(feed: Feed, count: int) -> None:
    for i in range(count):
        feed.store.put(V(2**40 * (i + 1)), b"junk")


def test_damages_share_the_list_of_lost_versions() -> None:
    """A list for each of n damages would have n versions, and 20,000 junk keys would take gigabytes."""
    feed = Feed.of(3)
    unreadable_versions(feed, 300)
    found = verify(feed.store)
    assert len(found.damages) >= 300
    assert len({id(damage.takes) for damage in found.damages}) == 1
    assert set(found.damages[0].takes) >= {2**40, 300 * 2**40}
    (takes,) = found.to_json()["takes"]
    assert takes["keys"] == [damage.key for damage in found.damages]
    assert [version for first, last in takes["versions"] for version in range(first, last + 1)] == list(found.lost)


def test_json_has_the_versions_that_damages_cost_as_ranges() -> None:
    feed = Feed.of(8)
    for version in (3, 6):
        feed.store.delete(payload_of(feed, V(version)))
    found = verify(feed.store)
    assert {damage.key: damage.takes for damage in found.damages} == {V(3): (3, 4, 5, 6, 7), V(6): (6, 7)}
    assert found.to_json()["takes"] == [
        {"versions": [(3, 7)], "keys": [V(3)]},
        {"versions": [(6, 7)], "keys": [V(6)]},
    ]


@pytest.mark.parametrize("junk", [stray_versions, unreadable_versions, unreadable_skips, skips_of_nothing])
def test_junk_takes_linear_time_and_little_memory(
    junk: Callable[[Feed, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs: list[tuple[int, int]] = []
    for count in (100, 200):
        feed = Feed.of(3)
        junk(feed, count)
        counting = CountingEdges(monkeypatch)
        tracemalloc.start()
        found = verify(feed.store)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert not found.is_clean
        assert set(found.restorable) >= {0, 1, 2}
        assert len(found.damages) <= 2 * count + 1
        costs.append((counting.edges, peak))
    assert costs[1][0] <= 2.5 * costs[0][0], "not quadratic"
    assert costs[1][1] < 20_000_000
