"""The small JSON objects of a feed beside its manifests: who it is, who writes it, what is pruned, who reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.payload import FORMAT
from deltasync.format.seal import SEAL, require_sealed, sealed
from deltasync.format.strict_json import is_count, parse_object, require_understood

_COUNT_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class FeedRecord:
    """`feed.json`: created with the feed, never changed."""

    feed: str
    created_unix_s: int

    def to_bytes(self) -> bytes:
        return _write({"feed": self.feed, "created_unix_s": self.created_unix_s})

    @classmethod
    def from_bytes(cls, data: bytes) -> "FeedRecord":
        fields = _Fields(data, "feed", ("feed", "created_unix_s"))
        return cls(fields.text("feed"), fields.count("created_unix_s"))


@dataclass(frozen=True, slots=True)
class FloorRecord:
    """`floor.json`: payloads that only versions before `version` need were given up. It explains; nothing trusts it."""

    version: int

    def to_bytes(self) -> bytes:
        return _write({"version": self.version})

    @classmethod
    def from_bytes(cls, data: bytes) -> "FloorRecord":
        return cls(_Fields(data, "floor", ("version",)).count("version"))


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """`lease.json`: who may write to a store that cannot fence, and until when by the writer's clock."""

    writer: str
    expires_unix_s: int

    def to_bytes(self) -> bytes:
        return _write({"writer": self.writer, "expires_unix_s": self.expires_unix_s})

    @classmethod
    def from_bytes(cls, data: bytes) -> "LeaseRecord":
        fields = _Fields(data, "lease", ("writer", "expires_unix_s"))
        return cls(fields.text("writer"), fields.count("expires_unix_s"))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`replicas/{id}.json`: a replica and the version that it serves. `facts` are for people."""

    replica: str
    version: int | None
    unix_s: int
    facts: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return _write(
            {"replica": self.replica, "version": self.version, "unix_s": self.unix_s, "facts": dict(self.facts)}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "Heartbeat":
        fields = _Fields(data, "heartbeat", ("replica", "version", "unix_s", "facts"))
        version = None if fields.values["version"] is None else fields.count("version")
        return cls(fields.text("replica"), version, fields.count("unix_s"), fields.texts("facts"))


class _Fields:
    """The fields of a record, each asked for by the type that it must have."""

    def __init__(self, data: bytes, scope: str, names: tuple[str, ...]) -> None:
        if len(data) > limits.RECORD_BYTES_MAX:
            raise CorruptError(f"the {scope} has {len(data)} bytes", rule=f"{scope}.size")
        self.scope = scope
        self.values = parse_object(data, what=f"the {scope}", scope=scope)
        found = self.values.get("format")
        if found != FORMAT:
            raise FormatError(f"a {scope} of format {found!r:.80}", rule=f"{scope}.format", hint="upgrade deltasync")
        require_understood(self.values, ("format", *names, SEAL), what=f"the {scope}", scope=scope)
        missing = [name for name in names if name not in self.values]
        if missing:
            raise CorruptError(f"the {scope} lacks {', '.join(missing)}", rule=f"{scope}.field")
        require_sealed(data, self.values, what=f"the {scope}", scope=scope)

    def text(self, name: str) -> str:
        value = self.values[name]
        if not isinstance(value, str) or not value:
            raise self._wrong(name, "a text")
        return value

    def count(self, name: str) -> int:
        if not is_count(self.values[name], most=_COUNT_MAX):
            raise self._wrong(name, "a count")
        return int(self.values[name])

    def texts(self, name: str) -> dict[str, str]:
        value = self.values[name]
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._wrong(name, "a map of texts")
        return value

    def _wrong(self, name: str, wanted: str) -> CorruptError:
        told = f"{name} of the {self.scope} is {self.values[name]!r:.80}, not {wanted}"
        return CorruptError(told, rule=f"{self.scope}.field")


def _write(fields: dict[str, Any]) -> bytes:
    return sealed({"format": FORMAT, **fields})
