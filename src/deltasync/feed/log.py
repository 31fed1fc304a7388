"""Read the manifests and records of a feed. Nothing is cached, and no pointer is trusted, only the manifests."""

from collections.abc import Callable, Iterable, Iterator

from deltasync.errors import CorruptError, DeltasyncError, NotFoundError
from deltasync.format import keys
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import FeedRecord, FloorRecord, Heartbeat
from deltasync.parallel import each
from deltasync.store.protocol import Store

READ_THREADS = 16
"""Small reads in progress at once: they wait for the network, not for a core."""


class Log:
    """The manifests and records of one feed."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def feed(self) -> FeedRecord | None:
        """The record of the feed; None before its first commit."""
        data = self._get(keys.FEED)
        return None if data is None else FeedRecord.from_bytes(data)

    def head(self, *, after: int | None = None) -> Manifest | None:
        """The newest version, or None if there is none after `after`, a version that the caller has seen.

        With `after` and nothing new this is one small request. Without it, a listing gives the version to start from;
        then the next version is read until there is none, as a listing may lag behind.
        """
        newest = None
        version = max(self.versions(), default=None) if after is None else after + 1
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

    def read_many(self, versions: Iterable[int]) -> Iterator[Manifest]:
        """The manifests of several versions, read in parallel, in the order of `versions`."""
        return each(self.read, versions, waiting=READ_THREADS)

    def anchor(self, version: int) -> Manifest | None:
        """The anchor that was added to a version, if there is one."""
        return self._find(keys.anchor_key(version), version=version)

    def skip(self, start: int, end: int) -> Manifest | None:
        """The skip from `start` to `end`, if there is one."""
        return self._find(keys.skip_key(start, end), version=end)

    def versions(self) -> list[int]:
        """Every version in the listing."""
        return self._listed(keys.VERSIONS, keys.parse_version_key)

    def anchors(self) -> list[int]:
        """Every version that an anchor was added to."""
        return self._listed(keys.ANCHORS, keys.parse_anchor_key)

    def skips(self) -> list[tuple[int, int]]:
        """Every skip, as the versions that it leads from and to."""
        pairs = (keys.parse_skip_key(item.key) for item in self.store.list(keys.SKIPS))
        return [pair for pair in pairs if pair is not None]

    def floor(self) -> int:
        """The oldest version that `prune` promises to keep; 0 if it never ran."""
        data = self._get(keys.FLOOR)
        return 0 if data is None else FloorRecord.from_bytes(data).version

    def heartbeats(self) -> list[Heartbeat]:
        """The last heartbeat of every replica that ever wrote one."""
        listed = [item.key for item in self.store.list(keys.REPLICAS) if keys.parse_replica_key(item.key) is not None]
        return [_heartbeat(key, data) for key in listed if (data := self._get(key)) is not None]

    def beat(self, heartbeat: Heartbeat) -> None:
        """Write the heartbeat of a replica."""
        self.store.put(keys.replica_key(heartbeat.replica), heartbeat.to_bytes())

    def _listed(self, prefix: str, parse: Callable[[str], int | None]) -> list[int]:
        versions = (parse(item.key) for item in self.store.list(prefix))
        return [version for version in versions if version is not None]

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key)
        except NotFoundError:
            return None

    def _find(self, key: str, *, version: int) -> Manifest | None:
        data = self._get(key)
        return None if data is None else parse_manifest(key, data, version=version)


def parse_manifest(key: str, data: bytes, *, version: int | None = None) -> Manifest:
    """Parse a manifest that was stored under `key`; every error names the key."""
    try:
        manifest = Manifest.from_bytes(data)
    except DeltasyncError as error:
        raise error.at(key, version=version) from error
    if manifest_key(manifest) != key and not _is_late_anchor(manifest, key):
        message = f"{key} holds a manifest of another key: of a {manifest.kind} to version {manifest.version}"
        raise CorruptError(message, rule="manifest.key", key=key, version=version)
    return manifest


def _heartbeat(key: str, data: bytes) -> Heartbeat:
    try:
        return Heartbeat.from_bytes(data)
    except DeltasyncError as error:
        raise error.at(key) from error


def manifest_key(manifest: Manifest) -> str:
    """The key that a manifest is committed under. An anchor without a parent may also be added to a version."""
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


def _is_late_anchor(manifest: Manifest, key: str) -> bool:
    return manifest.kind == "anchor" and manifest.parent is None and key == keys.anchor_key(manifest.version)
