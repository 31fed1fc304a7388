"""Keys of a feed's objects, relative to its prefix. No other module builds or parses a key.

Parsers return None for a key that no builder returns, so that stray objects in the feed are ignored.
"""

import re
from collections.abc import Iterable

from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.format.sealed import is_sha256

FEED = "feed.json"
FLOOR = "floor.json"
COPY = "copy.json"
LEASE = "lease.json"
VERSIONS = "versions/"
ANCHORS = "anchors/"
SKIPS = "skips/"
PAYLOADS = "payloads/"
REPLICAS = "replicas/"
PINS = "pins/"
PROBES = "probes/"

_VERSION = re.compile(r"versions/([0-9]{20})\.json", re.ASCII)
_ANCHOR = re.compile(r"anchors/([0-9]{20})\.json", re.ASCII)
_SKIP = re.compile(r"skips/([0-9]{20})-([0-9]{20})\.json", re.ASCII)
_PAYLOAD = re.compile(r"payloads/([0-9a-f]{64})\.safetensors", re.ASCII)
_REPLICA_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_PIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,127}", re.ASCII)


def version_key(version: int) -> str:
    """The manifest of a version: its creation is the commit."""
    _require_version(version)
    return f"{VERSIONS}{version:020d}.json"


def anchor_key(version: int) -> str:
    """The manifest of an anchor that was added to a version after its commit."""
    _require_version(version)
    return f"{ANCHORS}{version:020d}.json"


def skip_key(start: int, end: int) -> str:
    """The manifest of the change from version `start` to `end`, which is at least 2 later."""
    _require_version(start)
    _require_version(end)
    if end - start < 2:
        raise InvalidInputError(f"a skip must join versions at least 2 apart, not {start} and {end}", rule="key.skip")
    return f"{SKIPS}{start:020d}-{end:020d}.json"


def payload_key(sha256: str) -> str:
    """A payload, by the SHA-256 of the whole file."""
    if not is_sha256(sha256):
        raise InvalidInputError(f"{sha256!r:.80} is not a SHA-256 in hex", rule="key.payload")
    return f"{PAYLOADS}{sha256}.safetensors"


def replica_key(replica_id: str) -> str:
    """The heartbeat of a replica."""
    if _REPLICA_ID.fullmatch(replica_id) is None:
        raise InvalidInputError(
            f"{replica_id!r:.80} is not a replica id",
            rule="key.replica",
            hint="use up to 128 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )
    return f"{REPLICAS}{replica_id}.json"


def pin_key(name: str) -> str:
    """The pin of a version. A name begins with a letter, so that it is never taken for a version."""
    if not isinstance(name, str) or _PIN_NAME.fullmatch(name) is None:
        raise InvalidInputError(
            f"{name!r:.80} is not the name of a pin",
            rule="key.pin",
            hint="use up to 128 letters, digits, dots, dashes and underscores, beginning with a letter",
        )
    return f"{PINS}{name}.json"


def probe_key(probe_id: str) -> str:
    """A short-lived object that a writer creates to find out whether the store can fence."""
    return f"{PROBES}{probe_id}"


def parse_version_key(key: str) -> int | None:
    """The version whose manifest this is."""
    match = _VERSION.fullmatch(key)
    return None if match is None else _bounded(match[1])


def parse_anchor_key(key: str) -> int | None:
    """The version whose anchor this is."""
    match = _ANCHOR.fullmatch(key)
    return None if match is None else _bounded(match[1])


def parse_skip_key(key: str) -> tuple[int, int] | None:
    """The two versions that this skip joins."""
    match = _SKIP.fullmatch(key)
    if match is None:
        return None
    start, end = _bounded(match[1]), _bounded(match[2])
    return None if start is None or end is None or end - start < 2 else (start, end)


def is_manifest_key(key: str) -> bool:
    """Whether a manifest may be under this key: of a version, an anchor or a skip."""
    return parse_version_key(key) is not None or parse_anchor_key(key) is not None or parse_skip_key(key) is not None


def parse_payload_key(key: str) -> str | None:
    """The SHA-256 of the payload under this key."""
    match = _PAYLOAD.fullmatch(key)
    return None if match is None else match[1]


def parse_replica_key(key: str) -> str | None:
    """The id of the replica whose heartbeat this is."""
    name = key.removeprefix(REPLICAS).removesuffix(".json")
    return name if _REPLICA_ID.fullmatch(name) is not None and key == f"{REPLICAS}{name}.json" else None


def ranges(versions: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending versions as ranges, each of a first and a last one."""
    found: list[tuple[int, int]] = []
    for version in versions:
        if found and found[-1][1] == version - 1:
            found[-1] = found[-1][0], version
        else:
            found.append((version, version))
    return found


def parse_pin_key(key: str) -> str | None:
    """The name of the pin under this key."""
    name = key.removeprefix(PINS).removesuffix(".json")
    return name if _PIN_NAME.fullmatch(name) is not None and key == f"{PINS}{name}.json" else None


def _bounded(digits: str) -> int | None:
    return int(digits) if int(digits) <= limits.VERSION_MAX else None


def _require_version(version: int) -> None:
    if not 0 <= version <= limits.VERSION_MAX:
        raise InvalidInputError(f"version must be from 0 to {limits.VERSION_MAX}, not {version}", rule="key.version")
