"""Sealed JSON: the one reader and writer of the small objects of a feed.

A sealed object is canonical JSON that carries its own SHA-256, so every altered byte is detected. The seal finds
damage, not malice: anyone who can write an object can seal it. Parsing is strict and bounded: no duplicate keys, whole
numbers only, text that can be encoded again.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits

FORMAT = "deltasync/1"
"""The name of the format, in every object of a feed."""

SEAL = "sha256"
"""The field that holds the seal."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,20}", re.ASCII)


def sealed(fields: dict[str, Any]) -> bytes:
    """The canonical JSON of the fields and of the SHA-256 of the canonical JSON without it."""
    return canonical_json({**fields, SEAL: _hash(fields)})


def read_sealed(
    data: bytes,
    scope: str,
    names: Sequence[str],
    *,
    what: str | None = None,
    bytes_max: int = limits.RECORD_BYTES_MAX,
    check_seal: bool = True,
) -> "Fields":
    """The fields of a sealed object, which must have all of `names`.

    CorruptError or FormatError with the rule `{scope}.…` on anything else; messages call the object `what`, by default
    the scope. Without `check_seal` the caller calls `require_seal`, once it has checked the fields.
    """
    what = f"the {scope}" if what is None else what
    if len(data) > bytes_max:
        raise CorruptError(f"{what} has more than {bytes_max} bytes, the most that are allowed", rule=f"{scope}.size")
    values = parse_object(data, what=what, scope=scope)
    if values.get("format") != FORMAT:
        raise FormatError(
            f"the format of {what} is {values.get('format')!r:.80}; this release reads {FORMAT!r}",
            rule=f"{scope}.format",
            hint="upgrade deltasync",
        )
    require_fields(values, names, what=what, scope=scope, optional=("format", SEAL))
    if check_seal:
        require_seal(data, values, what=what, scope=scope)
    return Fields(values, what, scope)


def require_seal(data: bytes, values: dict[str, Any], *, what: str, scope: str) -> None:
    """CorruptError unless `data`, which parses to `values`, is byte for byte what `sealed` wrote."""
    unsealed = dict(values)
    if unsealed.pop(SEAL, None) != _hash(unsealed) or canonical_json(values) != data:
        raise CorruptError(f"{what} was altered after it was written", rule=f"{scope}.sha256")


def require_fields(
    values: dict[str, Any], names: Sequence[str], *, what: str, scope: str, optional: Sequence[str] = ()
) -> None:
    """CorruptError if one of `names` is missing; FormatError if `must_understand` lists a field that is not known.

    Other unknown fields are ignored.
    """
    listed = values.get("must_understand", [])
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise CorruptError(f"must_understand of {what} is not a list of field names", rule=f"{scope}.field")
    unknown = sorted(set(listed).difference(names, optional))
    if unknown:
        raise FormatError(
            f"{what} needs a reader that understands {', '.join(unknown):.200}",
            rule=f"{scope}.must_understand",
            hint="upgrade deltasync",
        )
    missing = [name for name in names if name not in values]
    if missing:
        raise CorruptError(f"{what} lacks {', '.join(missing)}", rule=f"{scope}.field")


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed access to the fields of a JSON object; CorruptError with the rule `{scope}.field` for another type."""

    values: dict[str, Any]
    what: str
    scope: str

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, "a text that is not empty")
        return value

    def any_text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if not is_count(value, most=limits.COUNT_MAX):
            raise self._wrong(name, f"a whole number from 0 to {limits.COUNT_MAX}")
        return int(value)  # type: ignore[arg-type]

    def optional_count(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.count(name)

    def sha256(self, name: str) -> str:
        value = self.values.get(name)
        if not is_sha256(value):
            raise self._wrong(name, "a SHA-256 in lower-case hex")
        return str(value)

    def texts(self, name: str) -> dict[str, str]:
        value = self.values.get(name)
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._wrong(name, "an object of texts")
        return value

    def sha256s(self, name: str) -> list[str]:
        value = self.values.get(name)
        if not isinstance(value, list) or not all(is_sha256(v) for v in value):
            raise self._wrong(name, "a list of SHA-256 in lower-case hex")
        return value

    def optional_object(self, name: str) -> "Fields | None":
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return Fields(value, f"{name} of {self.what}", self.scope)

    def objects(self, name: str) -> "list[Fields]":
        value, objects = self.values.get(name), []
        for i, item in enumerate(value if isinstance(value, list) else [None]):
            if not isinstance(item, dict):
                raise self._wrong(name, "a list of objects")
            objects.append(Fields(item, f"{name} {i} of {self.what}", self.scope))
        return objects

    def _wrong(self, name: str, wanted: str) -> CorruptError:
        message = f"{name} of {self.what} must be {wanted}, not {self.values.get(name)!r:.80}"
        return CorruptError(message, rule=f"{self.scope}.field")


def parse_object(data: bytes, *, what: str, scope: str) -> dict[str, Any]:
    """A JSON object; CorruptError with rule `{scope}.json` or `{scope}.duplicate` on anything else."""
    # Every value but the first follows one of these bytes, so that their number bounds what the parser allocates.
    if data.count(b",") + data.count(b"[") + data.count(b"{") > limits.JSON_VALUES_MAX:
        raise CorruptError(
            f"{what} has more than {limits.JSON_VALUES_MAX} values, the most that are allowed", rule=f"{scope}.json"
        )

    def unique(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(items)
        if len(fields) != len(items):
            twice = next(name for name, count in Counter(name for name, _ in items).items() if count > 1)
            raise CorruptError(f"{what} has the key {twice!r:.200} twice", rule=f"{scope}.duplicate")
        return fields

    def refuse(number: str) -> NoReturn:
        raise CorruptError(f"{what} has the number {number:.40}; only whole numbers are allowed", rule=f"{scope}.json")

    try:
        text = data.decode()
        value = json.loads(text, object_pairs_hook=unique, parse_float=refuse, parse_constant=refuse)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        # ValueError covers bad UTF-8, bad JSON, lone surrogates, and integers of thousands of digits.
        detail = "it is nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise CorruptError(f"{what} is not valid JSON: {detail}", rule=f"{scope}.json") from error
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object", rule=f"{scope}.json")
    # Nesting that the parser just manages, a later `repr` or encoder may not.
    level: list[Any] = [value]
    for _ in range(limits.JSON_DEPTH_MAX):
        inner = []
        for outer in level:
            items = outer.values() if isinstance(outer, dict) else outer
            inner += [item for item in items if isinstance(item, (list, dict)) and item]
        if not inner:
            return value
        level = inner
    raise CorruptError(
        f"{what} is nested more than {limits.JSON_DEPTH_MAX} levels deep, the most that are allowed",
        rule=f"{scope}.json",
    )


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space, UTF-8: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def is_count(value: object, *, most: int) -> bool:
    """Whether a JSON value is a whole number in 0..most (True and False are not)."""
    return type(value) is int and 0 <= value <= most


def is_sha256(value: object) -> bool:
    """Whether a JSON value is a SHA-256 in lower-case hex."""
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def is_decimal(value: object) -> bool:
    """Whether a JSON value is a whole number as text, without sign or leading zeros."""
    return isinstance(value, str) and _DECIMAL.fullmatch(value) is not None


def _hash(fields: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(fields)).hexdigest()


@dataclass(frozen=True, slots=True)
class FeedRecord:
    """`feed.json`: created with the feed, never changed."""

    feed: str
    created_unix_s: int

    def to_bytes(self) -> bytes:
        return sealed({"format": FORMAT, "feed": self.feed, "created_unix_s": self.created_unix_s})

    @classmethod
    def from_bytes(cls, data: bytes) -> "FeedRecord":
        fields = read_sealed(data, "feed", ("feed", "created_unix_s"))
        return cls(fields.text("feed"), fields.count("created_unix_s"))


@dataclass(frozen=True, slots=True)
class FloorRecord:
    """`floor.json` and `copy.json`: payloads that only versions before `version` need may be gone.

    Used in explanations only. The first is written by pruners, the second by relays.
    """

    version: int

    def to_bytes(self) -> bytes:
        return sealed({"format": FORMAT, "version": self.version})

    @classmethod
    def from_bytes(cls, data: bytes) -> "FloorRecord":
        return cls(read_sealed(data, "floor", ("version",)).count("version"))


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """`lease.json`: who may write to a store that cannot fence, and until when by the writer's clock."""

    writer: str
    expires_unix_s: int

    def to_bytes(self) -> bytes:
        return sealed({"format": FORMAT, "writer": self.writer, "expires_unix_s": self.expires_unix_s})

    @classmethod
    def from_bytes(cls, data: bytes) -> "LeaseRecord":
        fields = read_sealed(data, "lease", ("writer", "expires_unix_s"))
        return cls(fields.text("writer"), fields.count("expires_unix_s"))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`replicas/{id}.json`: a replica and the version that it serves. `facts` are for people."""

    replica: str
    version: int | None
    unix_s: int
    facts: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        fields = {"replica": self.replica, "version": self.version, "unix_s": self.unix_s, "facts": dict(self.facts)}
        return sealed({"format": FORMAT, **fields})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Heartbeat":
        fields = read_sealed(data, "heartbeat", ("replica", "version", "unix_s", "facts"))
        replica, version = fields.text("replica"), fields.optional_count("version")
        return cls(replica, version, fields.count("unix_s"), fields.texts("facts"))


@dataclass(frozen=True, slots=True)
class Pin:
    """`pins/{name}.json`: a version that `prune` keeps for good, under a name. `note` is for people, and may be empty.

    `digest` is that of the version, in hex: a feed that was rolled back may have another version under this number.
    """

    name: str
    version: int
    digest: str
    note: str
    created_unix_s: int

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "digest": self.digest,
            "note": self.note,
            "created_unix_s": self.created_unix_s,
        }

    def to_bytes(self) -> bytes:
        return sealed({"format": FORMAT, **self.to_json()})

    @classmethod
    def from_bytes(cls, data: bytes) -> "Pin":
        fields = read_sealed(data, "pin", ("name", "version", "digest", "note", "created_unix_s"))
        note = fields.any_text("note")
        if len(note.encode()) > limits.NOTE_BYTES_MAX:
            raise CorruptError(f"the note of the pin has more than {limits.NOTE_BYTES_MAX} bytes", rule="pin.note")
        return cls(
            fields.text("name"), fields.count("version"), fields.text("digest"), note, fields.count("created_unix_s")
        )
