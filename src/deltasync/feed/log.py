"""Read the manifests and records of a feed. Nothing is cached, and no pointer is trusted, only the manifests."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from deltasync.arguments import whole_number
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, NotFoundError
from deltasync.format import keys, limits
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import FeedRecord, FloorRecord, Heartbeat, Pin
from deltasync.parallel import each
from deltasync.store.patient import get_manifest, read_parsed
from deltasync.store.protocol import ObjectInfo, Store

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

READ_THREADS = 16
"""Small reads in progress at once: they wait for the network, not for a core."""

_PAGE = 1000
"""Keys in one response to a listing, on most stores."""

RELAY_ENGINE = "relay"
"""The engine in the heartbeat of a relay, which holds a version as a replica does and serves nothing."""

LIVE_S = 900
"""A replica whose heartbeat is older counts as gone."""


def read_manifest(store: Store, key: str, *, version: int | None = None) -> Manifest:
    """The manifest under a key, proved by its seal; every error of it names the key."""
    return read_stored(store, key, version=version)[0]


def read_stored(store: Store, key: str, *, version: int | None = None) -> tuple[Manifest, bytes]:
    """The manifest under a key as `read_manifest` reads it, and its bytes."""
    try:
        manifest, data = read_parsed(store, key, Manifest.from_bytes, get=get_manifest)
    except (CorruptError, FormatError) as error:
        raise error.at(key, version=version) from error
    # An anchor without a parent may also be added to a version.
    is_late_anchor = manifest.kind == "anchor" and manifest.parent is None and key == keys.anchor_key(manifest.version)
    if manifest_key(manifest) != key and not is_late_anchor:
        message = f"{key} holds a manifest of another key: of a {manifest.kind} to version {manifest.version}"
        raise CorruptError(message, rule="manifest.key", key=key, version=version)
    return manifest, data


def outcome(read: Callable[..., _T], *arguments: Any) -> _T | DeltasyncError:
    """What `read` returns, or its error if a record or manifest is missing, damaged, or of another format."""
    try:
        return read(*arguments)
    except (NotFoundError, CorruptError, FormatError) as error:
        return error


def is_live(heartbeat: Heartbeat, now_unix_s: float, *, live_s: float = LIVE_S) -> bool:
    """Whether a heartbeat that `Log.heartbeats` returned is recent. One from the far future is not."""
    return abs(now_unix_s - heartbeat.unix_s) < live_s


class Log:
    """The manifests and records of one feed."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._reported: set[str] = set()
        """Heartbeats that were reported as unusable: each is reported once, as they are polled."""

    def feed(self) -> FeedRecord | None:
        """The record of the feed; None before its first commit."""
        return self._record(keys.FEED, FeedRecord.from_bytes)

    def feed_id(self) -> str | None:
        """The id of the feed; None before its first commit."""
        record = self.feed()
        return None if record is None else record.feed

    def head(self, *, after: int | None = None) -> Manifest | None:
        """The newest version, or None if there is none after `after`, a version that the caller has seen.

        With `after` and nothing new this is one small request. Without it, a listing gives the version to start from;
        then the next version is read until there is none, as a listing may lag behind.
        """
        newest = None
        version = self._last_listed() if after is None else after + 1
        while version is not None and (manifest := self._find(keys.version_key(version), version=version)) is not None:
            newest, version = manifest, version + 1
        return newest

    def require_head(self) -> Manifest:
        """The newest version; NotFoundError if the feed has none."""
        head = self.head()
        if head is None:
            raise NotFoundError(
                f"there is no version in {self.store.url}",
                hint="check that this is the URL of a feed, and that something was published to it",
            )
        return head

    def read(self, version: int) -> Manifest:
        """The manifest of a version; NotFoundError if it was never committed."""
        manifest = self._find(keys.version_key(version), version=version)
        if manifest is None:
            raise NotFoundError(
                f"version {version} is not in {self.store.url}", version=version, hint="`deltasync log` lists versions"
            )
        return manifest

    def resolve(self, version: int | str | None) -> Manifest:
        """The manifest of a version, given by its number or by the name of a pin; None is the newest one.

        NotFoundError if there is none; CorruptError if the feed now has other weights under the number that was pinned.
        """
        if version is None:
            return self.require_head()
        # Digits are never a name, so that "17" is refused for what it is.
        if not isinstance(version, str) or version.isdecimal():
            return self.read(whole_number("version", version))
        pin = self.pin(version)
        if pin is None:
            raise NotFoundError(
                f"{self.store.url} has no pin {version!r}",
                key=keys.pin_key(version),
                hint="`deltasync pins` lists the names; a version is a number",
            )
        manifest = self.read(pin.version)
        if manifest.digest.hex != pin.digest:
            raise CorruptError(
                f"the pin {pin.name} is of version {pin.version} with the digest {pin.digest}, which now has the "
                f"digest {manifest.digest}",
                rule="pin.digest",
                version=pin.version,
                key=keys.pin_key(pin.name),
                hint="the feed was rolled back or replaced: pin another version",
            )
        return manifest

    def read_many(self, versions: Iterable[int]) -> Iterator[Manifest]:
        """The manifests of several versions, read in parallel, in the order of `versions`."""
        return each(self.read, versions, waiting=READ_THREADS)

    def anchor(self, version: int) -> Manifest | None:
        """The anchor that was added to a version, if there is one."""
        return self._find(keys.anchor_key(version), version=version)

    def skip(self, start: int, end: int) -> Manifest | None:
        """The skip from `start` to `end`, if there is one."""
        return self._find(keys.skip_key(start, end), version=end)

    def versions(self, *, after: int | None = None) -> list[int]:
        """Every version in the listing, or those after a version."""
        return self._listed(keys.VERSIONS, keys.parse_version_key, None if after is None else keys.version_key(after))

    def anchors(self, *, start: int = 0) -> list[int]:
        """Every version, from `start` on, that an anchor was added to."""
        return self._listed(keys.ANCHORS, keys.parse_anchor_key, keys.anchor_key(start - 1) if start else None)

    def skips(self, *, start: int = 0) -> list[tuple[int, int]]:
        """Every skip from version `start` or a later one, as the versions that it leads from and to."""
        after = keys.skip_key(start - 1, limits.VERSION_MAX) if start else None
        return self._listed(keys.SKIPS, keys.parse_skip_key, after)

    def payloads(self) -> Iterator[tuple[str, ObjectInfo]]:
        """The payloads in the listing, by their SHA-256."""
        listed = ((keys.parse_payload_key(item.key), item) for item in self.store.list(keys.PAYLOADS))
        return ((sha256, item) for sha256, item in listed if sha256 is not None)

    def floor(self) -> int:
        """The oldest version from which on everything is promised to be there; 0 if nothing was ever left out.

        A pruner and a relay each have a record of their own, so that neither can lower what the other has written.
        """
        return max(self.floor_of(keys.FLOOR), self.floor_of(keys.COPY))

    def floor_of(self, key: str) -> int:
        """The floor that a pruner (`keys.FLOOR`) or a relay (`keys.COPY`) has written; 0 if it never did."""
        try:
            record = self._record(key, FloorRecord.from_bytes)
        except (CorruptError, FormatError) as error:
            raise error.at(key) from error
        return 0 if record is None else record.version

    def pin(self, name: str) -> Pin | None:
        """The pin of that name, if there is one."""
        key = keys.pin_key(name)
        try:
            pin = self._record(key, Pin.from_bytes)
        except (CorruptError, FormatError) as error:
            raise error.at(key) from error
        if pin is not None and pin.name != name:
            raise CorruptError(f"{key} holds the pin {pin.name!r:.140}", rule="pin.key", key=key)
        return pin

    def pins(self) -> list[Pin]:
        """All pins, by name. CorruptError or FormatError if one cannot be read: it may keep any version."""
        found = each(self.pin, self._listed(keys.PINS, keys.parse_pin_key), waiting=READ_THREADS)
        return [pin for pin in found if pin is not None]

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of every replica that ever wrote one.

        `unix_s` is when the store got it, by the store's clock: the time in the object is a claim. An object that is
        no heartbeat of its key is passed over with a warning, because nothing may depend on such a small object.
        """
        items = [item for item in self.store.list(keys.REPLICAS) if keys.parse_replica_key(item.key) is not None]
        beats = each(self.heartbeat, items, waiting=READ_THREADS)
        return [beat for beat in beats if beat is not None]

    def heartbeat(self, item: ObjectInfo) -> Heartbeat | None:
        """The heartbeat under a key of the listing, as `heartbeats` returns it; None if it is gone or unusable."""
        try:
            beat = self._record(item.key, Heartbeat.from_bytes)
            if beat is None:
                return None
            if keys.replica_key(beat.replica) != item.key:
                raise CorruptError(f"it is the heartbeat of {beat.replica!r:.140}", rule="heartbeat.key")
            return replace(beat, unix_s=int(item.modified_unix_s))
        except (CorruptError, FormatError, InvalidInputError) as error:
            if item.key not in self._reported:
                self._reported.add(item.key)
                logger.warning("ignoring the heartbeat %s: %s", item.key, error)
            return None

    def compare(self, heartbeats: Sequence[Heartbeat]) -> list[bool | None]:
        """Whether each replica has the bits of the version that it serves; None if that is not known.

        False if it reports another digest, or a version that the feed does not have: the feed was rolled back, or the
        replica is one of another feed.
        """
        manifests: dict[int | None, Manifest | None] = {}

        def read(version: int) -> None:
            with suppress(CorruptError, FormatError):
                manifests[version] = self._find(keys.version_key(version), version=version)

        versions = sorted({beat.version for beat in heartbeats if beat.version is not None})
        for _ in each(read, versions, waiting=READ_THREADS):
            pass

        def has_digest(beat: Heartbeat) -> bool | None:
            if beat.version not in manifests:
                return None
            manifest, reported = manifests[beat.version], beat.facts.get("digest")
            if manifest is None:
                return False
            return None if reported is None else reported == manifest.digest.hex

        return [has_digest(beat) for beat in heartbeats]

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write the heartbeat of a replica."""
        self.store.put(keys.replica_key(heartbeat.replica), heartbeat.to_bytes())

    def _listed(self, prefix: str, parse: Callable[[str], _T | None], after: str | None = None) -> list[_T]:
        parsed = (parse(item.key) for item in self.store.list(prefix, after=after))
        return [found for found in parsed if found is not None]

    def _last_listed(self) -> int | None:
        """The newest version in the listing, of which only the end is read.

        Manifests of versions are never deleted, so a long feed has many of them. A version near the end is found by
        looking at some. If one is missing there, the listing is longer, and the result is the same.
        """
        known, end = -1, _PAGE - 1
        while self._exists(end):
            known, end = end, 2 * end
        while end - known > _PAGE:
            middle = (known + end) // 2
            known, end = (middle, end) if self._exists(middle) else (known, middle)
        listed = max(self.versions(after=known) if known >= 0 else self.versions(), default=known)
        return listed if listed >= 0 else None

    def _exists(self, version: int) -> bool:
        try:
            self.store.get_range(keys.version_key(version), 0, 1)
        except NotFoundError:
            return False
        return True

    def _record(self, key: str, parse: Callable[[bytes], _T]) -> _T | None:
        try:
            return read_parsed(self.store, key, parse)[0]
        except NotFoundError:
            return None

    def _find(self, key: str, *, version: int) -> Manifest | None:
        try:
            return read_manifest(self.store, key, version=version)
        except NotFoundError:
            return None


def manifest_key(manifest: Manifest) -> str:
    """The key that a manifest is committed under."""
    if manifest.kind == "skip" and manifest.parent is not None:
        return keys.skip_key(manifest.parent, manifest.version)
    return keys.version_key(manifest.version)


def require_follows(before: Manifest, after: Manifest) -> None:
    """CorruptError unless `after` can be the version that follows `before`."""
    message = None
    if after.parent_digest not in (None, before.digest):
        message = f"was made from digest {after.parent_digest}, but version {before.version} has {before.digest}"
    elif after.kind == "delta" and after.layout_sha256 != before.layout_sha256:
        message = "is a delta with another layout than its parent"
    if message is not None:
        raise CorruptError(
            f"version {after.version} {message}",
            rule="chain.link",
            version=after.version,
            key=keys.version_key(after.version),
        )


CHECK_S = 30.0
"""Seconds after which a head that no version follows is read again: the feed may have been rolled back."""


class Head:
    """The newest version of a feed that was seen: `manifest`, None before the first poll."""

    def __init__(self, log: Log, *, check_s: float = CHECK_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.manifest: Manifest | None = None
        self._log = log
        self._check_s = check_s
        self._clock = clock
        self._checked_s = clock()

    def poll(self) -> Manifest:
        """The newest version; NotFoundError if the feed has none. One small request if the known one is still that.

        Now and then the known head is read again. If the feed has no such version any more, or has it with another
        digest, then it was rolled back, forked or restored: that is reported, and its newest version is the head.
        """
        known = self.manifest
        newer = None if known is None else self._log.head(after=known.version)
        if known is not None and newer is None:
            if self._clock() - self._checked_s < self._check_s:
                return known
            self._checked_s = self._clock()
            try:
                is_replaced = self._log.read(known.version).digest != known.digest
            except NotFoundError:
                is_replaced = True
            except (CorruptError, FormatError) as error:
                # It is damaged, which does not make it another version.
                logger.warning("the newest version cannot be read again: %s", error)
                is_replaced = False
            if not is_replaced:
                return known
        head = newer or self._log.require_head()
        if known is not None and newer is None:
            logger.warning(
                "version %d with the digest %s is no longer in the feed, which was rolled back or replaced: "
                "following version %d with the digest %s",
                known.version,
                known.digest,
                head.version,
                head.digest,
            )
        self.manifest, self._checked_s = head, self._clock()
        return head
