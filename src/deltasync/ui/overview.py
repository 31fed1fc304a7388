"""The state of a feed, polled with few requests: what the page, the report and the terminal show, and its alerts.

The newest versions are read in detail. Of the older ones only every n-th is, n a power of two, so that what is read and
kept stays bounded for a feed of any length. Nothing is written, and no payload is fetched except the index of one.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any, Literal, TypeVar

from deltasync.errors import CorruptError, DeltasyncError, FormatError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log, outcome, require_follows
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat, Pin
from deltasync.parallel import each
from deltasync.replica.events import ReplicaState, replica_state, worst_first
from deltasync.store.protocol import ObjectInfo, Store
from deltasync.ui.index import open_index

_T = TypeVar("_T")

DETAIL = 512
"""The newest versions, of which every manifest is read."""

SAMPLES = 256
"""At most so many of the older versions are read."""

REPLICAS_MAX = 500
"""Replicas whose heartbeats are read: those that wrote last. Each start without a name of its own leaves one more."""

ANCHORS_MAX = 256
PINS_MAX = 256
LISTED_MAX = 200_000
"""Keys that are read of one listing."""

STEPS_MAX = 64
"""New versions that are read one after another. For more, the feed is read as at the start."""

LISTING_S = 30.0
"""How often payloads, anchors and skips are listed: a long feed has many keys."""

_SAME_SECOND_S = 5.0
"""A heartbeat this recent is read again: two of them may have one time in a listing."""

_TRIES = 3
"""Payloads that are tried for the size of all weights."""

BEHIND_VERSIONS = 8
"""A replica that is more versions behind is one to look at."""

SILENT_S = 600.0
SILENT_INTERVALS = 10
"""A publisher is silent after this time and so many times its usual interval."""

ENDED_S = 86_400.0
"""A run without a version for this long has probably ended."""

COPIES_MAX = 20
"""A feed that was never pruned may hold so many full copies of the weights before its size is mentioned."""

_LISTED = 3
"""Alerts of one kind, beside one that counts the others."""

_SHOWN = (
    *("url", "read_unix_s", "feed", "created_unix_s", "head", "floor", "detail_from", "stride", "interval_s"),
    *("versions_per_minute", "delta_bytes", "full_bytes", "stored_bytes", "stored_payloads", "stored_is_cut"),
    *("versions", "anchors", "skips", "pins", "replicas", "older_replicas", "damages"),
)
"""What an overview has as JSON, in this order."""

Level = Literal["critical", "warning", "notice"]
_LEVELS: tuple[Level, ...] = ("critical", "warning", "notice")


@dataclass(frozen=True, slots=True)
class Alert:
    """Something to look at, and what to do about it."""

    level: Level
    kind: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in the feed that cannot be read, is missing, or does not fit."""

    key: str
    version: int | None
    message: str


@dataclass(frozen=True, slots=True)
class Overview:
    """A feed at one moment. `versions` ascend; all those from `detail_from` on, every `stride`-th before."""

    url: str
    read_unix_s: float
    feed: str | None = None
    created_unix_s: int | None = None
    floor: int = 0
    detail_from: int = 0
    stride: int = 1
    versions: tuple[Manifest, ...] = ()
    anchors: tuple[tuple[int, int | None], ...] = ()
    """Versions that an anchor was added to, with its bytes where they were read."""
    skips: tuple[tuple[int, int], ...] = ()
    pins: tuple[tuple[int, str], ...] = ()
    """Pinned versions and the names of their pins, ascending."""
    full_bytes: int | None = None
    """All weights, as the index of a payload gives them."""
    stored_bytes: int = 0
    stored_payloads: int = 0
    stored_is_cut: bool = False
    """Whether there are more payloads than are counted."""
    replicas: tuple[tuple[ReplicaState, int | None], ...] = ()
    """Each with the seconds that passed in training from the version that it serves to the newest one."""
    older_replicas: int = 0
    """Replicas whose heartbeats were not read."""
    damages: tuple[Damage, ...] = ()

    @property
    def head(self) -> Manifest | None:
        """The newest version that could be read."""
        return self.versions[-1] if self.versions else None

    @property
    def interval_s(self) -> float | None:
        """The median time between two versions, of the newest 50."""
        times = [m.created_unix_s for m in self.versions[-51:] if m.version >= self.detail_from]
        gaps = [after - before for before, after in pairwise(times)]
        return None if not gaps else float(statistics.median(gaps))

    @property
    def versions_per_minute(self) -> float | None:
        """Over the newest 50 versions."""
        recent = [m for m in self.versions[-51:] if m.version >= self.detail_from]
        if len(recent) < 2:
            return None
        span_s = recent[-1].created_unix_s - recent[0].created_unix_s
        return None if span_s <= 0 else 60 * (recent[-1].version - recent[0].version) / span_s

    @property
    def delta_bytes(self) -> float | None:
        """The mean size of the newest deltas; None if there are none."""
        sizes = [m.nbytes for m in self.versions if m.kind == "delta" and m.version >= self.detail_from]
        return None if not sizes else sum(sizes) / len(sizes)

    @property
    def age_s(self) -> float | None:
        """Seconds since the newest commit, by the trainer's clock."""
        return None if self.head is None else max(0.0, self.read_unix_s - self.head.created_unix_s)

    @property
    def has_ended(self) -> bool:
        """Whether the run has probably ended: no version for a day and for many times its usual interval."""
        return (self.age_s or 0.0) > max(ENDED_S, SILENT_INTERVALS * (self.interval_s or 0.0))

    def alerts(self) -> list[Alert]:
        """What needs attention, the worst first."""
        hint = "`deltasync verify` shows what it costs; publish an anchor to go on, or put the object back from a copy"
        damages = []
        for damage in self.damages:
            where = damage.key if damage.version is None else f"version {damage.version}, {damage.key}"
            damages.append(Alert("critical", "damage", f"Damage in {where}: {damage.message}", hint))
        found = [*_some(damages, "objects are damaged"), *self._replica_alerts()]
        head, age_s = self.head, self.age_s
        if head is not None and self.has_ended:
            when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(head.created_unix_s))
            message = f"No version since {when} UTC: the run has probably ended"
            found.append(Alert("notice", "ended", message, "nothing, if that was planned"))
        elif age_s is not None and age_s > max(SILENT_S, SILENT_INTERVALS * (self.interval_s or 0.0)):
            usual = "" if self.interval_s is None else f"; usually there is one every {self.interval_s:,.0f} s"
            message = f"The publisher is silent: no version for {age_s / 60:,.0f} min{usual}"
            hint = "look at the trainer's log for failed publications"
            found.append(Alert("warning", "publisher", message, hint))
        if self.floor == 0 and self.full_bytes and self.stored_bytes > COPIES_MAX * self.full_bytes:
            copies = self.stored_bytes / self.full_bytes
            message = f"The feed grows: it holds as much as {copies:,.0f} full copies, and was never pruned"
            found.append(Alert("notice", "grows", message, "`deltasync prune` deletes what no replica needs"))
        return sorted(found, key=lambda alert: _LEVELS.index(alert.level))

    def _replica_alerts(self) -> Iterator[Alert]:
        diverged, behind, silent = [], [], []
        for state, lag_s in self.replicas:
            if state.is_live and state.has_digest is False:
                message = f"Replica {state.id} has other bits than version {state.version} of this feed"
                hint = "scrub or restart it; if it follows another feed, give it another prefix"
                diverged.append(Alert("critical", "diverged", message, hint))
            if state.is_live and state.lag is not None and state.lag > BEHIND_VERSIONS:
                seconds = "" if lag_s is None else f" and {lag_s:,} s"
                message = f"Replica {state.id} is {state.lag:,} versions{seconds} behind"
                hint = "look at its phase times and its log; `deltasync compact` makes catching up cheaper"
                behind.append(Alert("warning", "behind", message, hint))
            # One that stopped long ago was probably ended on purpose.
            if not state.is_live and state.age_s < ENDED_S:
                message = f"Replica {state.id} has not written a heartbeat for {state.age_s // 60:,} min"
                hint = "check whether it runs, and whether it may write to replicas/"
                silent.append(Alert("warning", "silent", message, hint))
        yield from _some(diverged, "replicas have other bits than their version")
        yield from _some(behind, "replicas are behind")
        if not self.has_ended:
            yield from _some(silent, "replicas are silent")

    def to_json(self) -> dict[str, Any]:
        versions = [
            {
                "version": m.version,
                "kind": m.kind,
                "step": m.step,
                "created_unix_s": m.created_unix_s,
                "bytes": m.nbytes,
                "changed": m.changed,
                "elements": m.elements,
            }
            for m in self.versions
        ]
        return {name: getattr(self, name) for name in _SHOWN} | {
            "read_unix_s": round(self.read_unix_s, 3),
            "head": None if self.head is None else self.head.version,
            "versions": versions,
            "replicas": [{**state.to_json(), "lag_s": lag_s} for state, lag_s in self.replicas],
            "damages": [asdict(damage) for damage in self.damages],
        }


def _some(found: Sequence[Alert], more: str) -> Iterator[Alert]:
    """The first of several alerts of one kind, and how many more there are: a fleet must not bury everything else."""
    yield from found[:_LISTED]
    if len(found) > _LISTED:
        yield replace(found[0], message=f"{len(found) - _LISTED:,} more {more}")


def stride_of(head: int) -> int:
    """Every how many-th version is read of those before the newest `DETAIL`."""
    older, stride = head + 1 - DETAIL, 1
    while older > stride * SAMPLES:
        stride *= 2
    return stride


class Watch:
    """Reads one feed. Not for several threads at once."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.time) -> None:
        self.log = Log(store)
        self._clock = clock
        self._clear()

    def _clear(self) -> None:
        self._feed: tuple[str, int] | None = None
        self._manifests: dict[int, Manifest] = {}
        self._of_replicas: dict[int, Manifest] = {}
        self._damages: dict[str, Damage] = {}
        self._misplaced: tuple[Damage, ...] = ()
        self._beats: dict[ObjectInfo, Heartbeat | None] = {}
        self._anchors: dict[int, int | None] = {}
        self._skips: tuple[tuple[int, int], ...] = ()
        self._pins: dict[ObjectInfo, Pin | None] = {}
        self._full_bytes: dict[str, int] = {}
        self._stored = (0, 0, False)
        self._floor = 0
        self._newest: int | None = None
        self._listed_s: float | None = None

    def refresh(self) -> Overview:
        """The feed as it is now. NotFoundError if one that was there is gone; StoreError if the store fails."""
        now_unix_s = self._clock()
        self._require_same_feed()
        if self._newest is None or not self._read_next():
            self._read_all()
        detail_from = 0 if self._newest is None else max(0, self._newest + 1 - DETAIL)
        stride = 1 if self._newest is None else stride_of(self._newest)
        # Older versions that are no longer among every n-th are forgotten.
        self._manifests = {v: m for v, m in self._manifests.items() if v >= detail_from or v % stride == 0}
        if self._listed_s is None or abs(now_unix_s - self._listed_s) >= LISTING_S:
            self._read_listings(detail_from)
            self._listed_s = now_unix_s
        replicas, older = self._replicas(now_unix_s)
        versions = tuple(self._manifests[version] for version in sorted(self._manifests))
        return Overview(
            url=self.log.store.url,
            read_unix_s=now_unix_s,
            feed=None if self._feed is None else self._feed[0],
            created_unix_s=None if self._feed is None else self._feed[1],
            floor=self._floor,
            detail_from=detail_from,
            stride=stride,
            versions=versions,
            anchors=tuple(sorted(self._anchors.items())),
            skips=self._skips,
            pins=tuple(sorted((pin.version, pin.name) for pin in self._pins.values() if pin is not None)),
            full_bytes=self._all_bytes(versions),
            stored_payloads=self._stored[0],
            stored_bytes=self._stored[1],
            stored_is_cut=self._stored[2],
            replicas=replicas,
            older_replicas=older,
            damages=(*self._damages.values(), *self._misplaced),
        )

    def _require_same_feed(self) -> None:
        """Start again if another feed is in its place. NotFoundError if it is gone: nothing new is not the same."""
        record = self._noted(outcome(self.log.feed), keys.FEED)
        if keys.FEED in self._damages:
            return
        if record is None:
            is_gone = self._feed is not None or isinstance(self._find(self._newest or 0), NotFoundError)
            if self._newest is not None and is_gone:
                raise NotFoundError(
                    f"the feed {self.log.store.url} is gone",
                    key=keys.FEED,
                    hint="was it moved or deleted, or is its file system not mounted?",
                )
            return
        if self._feed is not None and self._feed[0] != record.feed:
            self._clear()
        self._feed = (record.feed, record.created_unix_s)

    def _read_all(self) -> None:
        """The versions to show, of a feed that was not read before or has many new ones."""
        try:
            head = self.log.head()
            newest = None if head is None else head.version
        except (CorruptError, FormatError):
            # The newest manifest is damaged: the ones before it may be read.
            newest = max(islice(self.log.versions(), LISTED_MAX), default=None)
        self._newest = newest
        if newest is not None:
            detail_from = max(0, newest + 1 - DETAIL)
            wanted = {*range(0, detail_from, stride_of(newest)), *range(detail_from, newest + 1)}
            self._read(sorted(wanted.difference(self._manifests)))

    def _read_next(self) -> bool:
        """The versions since the last time; False if there are too many of them."""
        if self._newest is None:
            return False
        for _ in range(STEPS_MAX):
            version = self._newest + 1
            key = keys.version_key(version)
            found = outcome(self.log.read, version)
            if isinstance(found, NotFoundError):
                return True
            before = self._manifests.get(version - 1)
            if isinstance(found, Manifest) and before is not None:
                found = outcome(_following, before, found)
            if (manifest := self._noted(found, key, version)) is not None:
                self._manifests[version] = manifest
            self._newest = version
        return False

    def _read(self, versions: Sequence[int]) -> None:
        """Read manifests, and check that neighbours fit. What cannot be read is damage."""
        for version, found in zip(versions, each(self._find, versions, waiting=READ_THREADS), strict=True):
            key = keys.version_key(version)
            before = self._manifests.get(version - 1)
            if (manifest := self._noted(found, key, version)) is not None:
                self._manifests[version] = manifest
                if before is not None:
                    self._noted(outcome(_following, before, manifest), key, version)

    def _noted(self, found: _T | DeltasyncError, key: str, version: int | None = None) -> _T | None:
        """What was read, if it could be; otherwise it is damage until it can be read again."""
        self._damages.pop(key, None)
        if not isinstance(found, DeltasyncError):
            return found
        key = found.key or key
        self._damages[key] = Damage(key, version, str(found))
        return None

    def _read_listings(self, detail_from: int) -> None:
        """Anchors, skips, pins and payloads. What a manifest names must be there, unless `prune` has deleted it.

        Payloads are listed after the manifests were read and before the floor, so that neither a commit nor a `prune`
        at the same time looks like damage.
        """
        # What was damaged may have been put back.
        self._read([d.version for d in islice(list(self._damages.values()), STEPS_MAX) if d.version is not None])
        log = self.log

        def anchor_bytes(version: int) -> int | None:
            anchor = self._noted(outcome(log.anchor, version), keys.anchor_key(version))
            return None if anchor is None else anchor.nbytes

        def read_pin(item: ObjectInfo) -> Pin | None:
            name = keys.parse_pin_key(item.key)
            return None if name is None else self._noted(outcome(log.pin, name), item.key)

        anchors = list(islice(log.anchors(), LISTED_MAX))[-ANCHORS_MAX:]
        new = [version for version in anchors if self._anchors.get(version) is None]
        read = dict(zip(new, each(anchor_bytes, new, waiting=READ_THREADS), strict=True))
        self._anchors = {version: self._anchors.get(version) or read.get(version) for version in anchors}
        self._skips = tuple(islice(log.skips(start=detail_from), 4 * DETAIL))
        pins = list(islice(log.store.list(keys.PINS), PINS_MAX))
        # One that was damaged is read again, and may have been removed.
        self._damages = {key: d for key, d in self._damages.items() if not key.startswith(keys.PINS)}
        self._pins = {item: self._pins.get(item) or read_pin(item) for item in pins}
        wanted = {
            ref.sha256: (version, ref.nbytes)
            for version, m in self._manifests.items()
            if version >= detail_from
            for ref in m.refs
        }
        count, total, damaged = 0, 0, []
        for sha256, item in islice(log.payloads(), LISTED_MAX):
            count, total = count + 1, total + item.nbytes
            version, nbytes = wanted.pop(sha256, (None, item.nbytes))
            if nbytes != item.nbytes:
                damaged.append(Damage(item.key, version, f"it has {item.nbytes} bytes instead of {nbytes}"))
        self._stored = (count, total, count >= LISTED_MAX)
        self._damages.pop(keys.COPY, None)
        floor = self._noted(outcome(log.floor), keys.FLOOR)
        self._floor = self._floor if floor is None else floor
        if count < LISTED_MAX:
            for sha256, (version, _) in wanted.items():
                # Of a delta from before the floor, nothing is promised.
                if version > self._floor:
                    damaged.append(Damage(keys.payload_key(sha256), version, "this payload is missing"))
        self._misplaced = tuple(damaged)

    def _replicas(self, now_unix_s: float) -> tuple[tuple[tuple[ReplicaState, int | None], ...], int]:
        """The replicas that wrote last, and how many there are beside them. Only new heartbeats are read."""
        items = [item for item in self.log.store.list(keys.REPLICAS) if keys.parse_replica_key(item.key) is not None]
        shown = sorted(items, key=lambda item: -item.modified_unix_s)[:REPLICAS_MAX]
        new = [
            item for item in shown if item not in self._beats or abs(now_unix_s - item.modified_unix_s) < _SAME_SECOND_S
        ]
        self._beats = {item: beat for item in shown if (beat := self._beats.get(item)) is not None}
        self._beats |= zip(new, each(self.log.heartbeat, new, waiting=READ_THREADS), strict=True)
        beats = [beat for beat in self._beats.values() if beat is not None]
        served = {beat.version for beat in beats if beat.version is not None}
        known = self._of_replicas | self._manifests
        self._of_replicas = {version: known[version] for version in served if version in known}
        missing = sorted(served.difference(known))
        found = dict(zip(missing, each(self._find, missing, waiting=READ_THREADS), strict=True))
        self._of_replicas |= {version: m for version, m in found.items() if isinstance(m, Manifest)}
        absent = {version for version, m in found.items() if isinstance(m, NotFoundError)}
        head = None if self._newest is None else self._manifests.get(self._newest)
        if head is None and self._manifests:
            head = self._manifests[max(self._manifests)]
        if head is None:
            return (), len(items)
        replicas: list[tuple[ReplicaState, int | None]] = []
        for beat in beats:
            m = None if beat.version is None else self._of_replicas.get(beat.version)
            digest = beat.facts.get("digest")
            has_digest = None if m is None or digest is None else digest == m.digest.hex
            # The feed does not have its version after a rollback, or if it follows another feed.
            state = replica_state(beat, head, False if beat.version in absent else has_digest, now_unix_s)
            replicas.append((state, None if m is None else max(0, head.created_unix_s - m.created_unix_s)))
        return tuple(sorted(replicas, key=lambda pair: worst_first(pair[0]))), len(items) - len(shown)

    def _find(self, version: int) -> Manifest | DeltasyncError:
        return outcome(self.log.read, version)

    def _all_bytes(self, versions: tuple[Manifest, ...]) -> int | None:
        """The size of all weights, from the index of the newest payload."""
        with_payloads = [m for m in versions[-STEPS_MAX:] if m.payloads]
        for m in reversed(with_payloads[-_TRIES:]):
            if m.layout_sha256 in self._full_bytes:
                return self._full_bytes[m.layout_sha256]
            index = outcome(open_index, self.log.store, m.payloads[0])
            if not isinstance(index, DeltasyncError):
                self._full_bytes[m.layout_sha256] = index.header.layout.nbytes
                return index.header.layout.nbytes
        return None


def _following(before: Manifest, after: Manifest) -> Manifest:
    """`after`. CorruptError unless it follows `before`."""
    require_follows(before, after)
    return after
