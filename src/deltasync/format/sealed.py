"""Sealed JSON: the one reader and writer of the small objects of a feed.

A sealed object is canonical JSON that carries its own SHA-256, so every altered byte is detected. It finds damage, not
malice: anyone who can write an object can seal it. Parsing is strict and bounded: no duplicate keys, whole numbers
only, text that can be encoded again.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits

FORMAT = "deltasync/1"
"""The name of the format, in every object of a feed."""

SEAL = "sha256"

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,20}", re.ASCII)


def parse_object(data: bytes, *, what: str, scope: str) -> dict[str, Any]:
    """A JSON object; CorruptError with rule `{scope}.json` or `{scope}.duplicate` on anything else."""
    value = _parse(data, what=what, scope=scope)
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", rule=f"{scope}.json")
    return value


def _parse(data: bytes, *, what: str, scope: str) -> Any:
    # Every value but the first follows one of these bytes, so that their number bounds what the parser allocates.
    if sum(data.count(c) for c in (b",", b"[", b"{")) > limits.JSON_VALUES_MAX:
        raise CorruptError(f"{what} has more than {limits.JSON_VALUES_MAX} values", rule=f"{scope}.json")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise CorruptError(f"{what} has the key {twice!r:.200} twice", rule=f"{scope}.duplicate")
        return found

    def refuse(text: str) -> NoReturn:
        raise CorruptError(f"{what} has the number {text:.40}, which is not whole", rule=f"{scope}.json")

    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=pairs, parse_float=refuse, parse_constant=refuse)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        # ValueError covers bad UTF-8, bad JSON, lone surrogates, and integers of thousands of digits.
        detail = "nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise CorruptError(f"{what} is not valid JSON: {detail}", rule=f"{scope}.json") from error
    return value


def require_understood(record: dict[str, Any], known: Iterable[str], *, what: str, scope: str) -> None:
    """FormatError if `must_understand` lists a field that is not `known`; other unknown fields are ignored."""
    listed = record.get("must_understand", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CorruptError(f"{what}: must_understand is not a list of names", rule=f"{scope}.field")
    unknown = sorted(set(listed) - set(known))
    if unknown:
        raise FormatError(
            f"{what} needs a reader that understands {', '.join(unknown):.200}",
            rule=f"{scope}.must_understand",
            hint="upgrade deltasync",
        )


def is_count(value: object, *, most: int) -> bool:
    """Whether a JSON value is a whole number in 0..most (True and False are not)."""
    return type(value) is int and 0 <= value <= most


def is_sha256(value: object) -> bool:
    """Whether a JSON value is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_decimal(value: object) -> bool:
    """Whether a JSON value is a whole number as text, without sign or leading zeros."""
    return isinstance(value, str) and _DECIMAL.fullmatch(value) is not None


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space, UTF-8: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sealed(fields: dict[str, Any]) -> bytes:
    """The canonical JSON of the fields and of the SHA-256 of the canonical JSON without it."""
    return canonical_json({**fields, SEAL: _hash(fields)})


def require_sealed(data: bytes, fields: dict[str, Any], *, what: str, scope: str) -> None:
    """CorruptError unless `data`, which parses to `fields`, is byte for byte what `sealed` wrote."""
    message = {name: value for name, value in fields.items() if name != SEAL}
    if fields.get(SEAL) != _hash(message) or canonical_json(fields) != data:
        raise CorruptError(f"{what} was altered since it was written", rule=f"{scope}.sha256")


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(fields)).hexdigest()


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
        message = f"{name} of the {self.scope} is {self.values[name]!r:.80}, not {wanted}"
        return CorruptError(message, rule=f"{self.scope}.field")


def _write(fields: dict[str, Any]) -> bytes:
    return sealed({"format": FORMAT, **fields})
