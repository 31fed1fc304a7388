"""The manifest: the small JSON object whose creation is the commit."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.sealed import (
    FORMAT,
    SEAL,
    is_count,
    is_sha256,
    parse_object,
    require_sealed,
    require_understood,
    sealed,
)

Data = bytes | bytearray | memoryview
Kind = Literal["anchor", "delta", "skip", "base"]
_KINDS: dict[str, Kind] = {"anchor": "anchor", "delta": "delta", "skip": "skip", "base": "base"}
_COUNT_MAX = (1 << 63) - 1
_FIELDS = (
    "format",
    "kind",
    "version",
    "parent",
    "step",
    "layout_sha256",
    "parent_digest",
    "digest",
    "elements",
    "changed",
    "payloads",
    "files",
    "writer",
    "created_unix_s",
    "base",
    "extra",
)


@dataclass(frozen=True, slots=True)
class PayloadRef:
    """A payload by the SHA-256 of the whole file, and its size."""

    sha256: str
    nbytes: int

    @classmethod
    def of(cls, data: Data) -> "PayloadRef":
        """The name of these bytes."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def from_json(cls, value: Any) -> "PayloadRef":
        if not isinstance(value, dict) or "bytes" not in value:
            raise CorruptError(f"{value!r:.80} is not {{sha256, bytes}}", rule="manifest.field")
        return cls(_sha256(value, "sha256"), _count(value, "bytes"))

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class BaseRef:
    """A checkpoint that a replica already has."""

    checkpoint: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """One way to reach a version of a feed.

    `parent` and `parent_digest` go together; an anchor may have them too. `changed` counts the elements that differ
    from the parent; an anchor and a base have none. `files` names the files beside the weights (`format.companions`).
    """

    kind: Kind
    version: int
    layout_sha256: str
    digest: StateDigest
    elements: int
    writer: str
    created_unix_s: int
    changed: int | None = None
    parent: int | None = None
    parent_digest: StateDigest | None = None
    step: int | None = None
    payloads: tuple[PayloadRef, ...] = ()
    files: PayloadRef | None = None
    base: BaseRef | None = None
    extra: Mapping[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """What a replica has to fetch, without this manifest and the files beside the weights."""
        return sum(ref.nbytes for ref in self.payloads)

    @property
    def refs(self) -> tuple[PayloadRef, ...]:
        """Every object under `payloads/` that this manifest needs."""
        return self.payloads if self.files is None else (*self.payloads, self.files)

    def to_json(self) -> dict[str, Any]:
        """The fields as docs/format.md names them."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "version": self.version,
            "parent": self.parent,
            "step": self.step,
            "layout_sha256": self.layout_sha256,
            "parent_digest": None if self.parent_digest is None else self.parent_digest.hex,
            "digest": self.digest.hex,
            "elements": self.elements,
            "changed": self.changed,
            "payloads": [ref.to_json() for ref in self.payloads],
            "files": None if self.files is None else self.files.to_json(),
            "writer": self.writer,
            "created_unix_s": self.created_unix_s,
            "base": None if self.base is None else {"checkpoint": self.base.checkpoint, "revision": self.base.revision},
            "extra": dict(self.extra),
        }

    def to_bytes(self) -> bytes:
        """Sealed canonical JSON: equal manifests have equal bytes. CorruptError for one that a reader would refuse."""
        fields = self.to_json()
        _require_size(data := sealed(fields))
        _from_fields(fields)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """The inverse of `to_bytes`; CorruptError or FormatError with the broken rule on anything else."""
        _require_size(data)
        fields = parse_object(data, what="the manifest", scope="manifest")
        manifest = _from_fields(fields)
        require_sealed(data, fields, what="the manifest", scope="manifest")
        return manifest


def _require_size(data: bytes) -> None:
    if len(data) > limits.MANIFEST_BYTES_MAX:
        raise CorruptError(f"a manifest of {len(data)} bytes", rule="manifest.size")


def _from_fields(fields: dict[str, Any]) -> Manifest:
    if fields.get("format") != FORMAT:
        raise FormatError(f"a manifest of format {fields.get('format')!r:.80}", rule="manifest.format")
    require_understood(fields, (*_FIELDS, SEAL), what="the manifest", scope="manifest")
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise CorruptError(f"the manifest lacks {', '.join(missing)}", rule="manifest.field")
    kind = _KINDS.get(_text(fields, "kind"))
    if kind is None:
        raise FormatError(f"a manifest of kind {fields['kind']!r:.80}", rule="manifest.kind", hint="upgrade deltasync")
    parent_digest = fields["parent_digest"]
    manifest = Manifest(
        kind=kind,
        version=_count(fields, "version"),
        parent=_optional_count(fields, "parent"),
        step=_optional_count(fields, "step"),
        layout_sha256=_sha256(fields, "layout_sha256"),
        parent_digest=None if parent_digest is None else StateDigest.from_hex(parent_digest),
        digest=StateDigest.from_hex(fields["digest"]),
        elements=_count(fields, "elements"),
        changed=_optional_count(fields, "changed"),
        payloads=_payloads(fields["payloads"]),
        files=None if fields["files"] is None else PayloadRef.from_json(fields["files"]),
        writer=_text(fields, "writer"),
        created_unix_s=_count(fields, "created_unix_s"),
        base=None if fields["base"] is None else _base(fields["base"]),
        extra=_extra(fields["extra"]),
    )
    _check_kind(manifest)
    return manifest


def _check_kind(m: Manifest) -> None:
    """Which fields go with which kind."""
    behind = None if m.parent is None else m.version - m.parent
    if (m.parent is None) != (m.parent_digest is None):
        raise CorruptError("parent and parent_digest go together", rule="manifest.parent")
    fits = {
        "delta": behind == 1,
        "skip": behind is not None and behind >= 2,
        "anchor": behind in (None, 1),
        "base": behind is None,
    }
    if not fits[m.kind]:
        raise CorruptError(f"a {m.kind} to version {m.version} from {m.parent}", rule="manifest.parent")
    if (m.kind == "base") != (m.base is not None):
        raise CorruptError(f"a manifest of kind {m.kind} and base {m.base!r:.80}", rule="manifest.base")
    is_change = m.kind in ("delta", "skip")
    if is_change != (m.changed is not None) or (m.changed is not None and m.changed > m.elements):
        raise CorruptError(f"a {m.kind} of {m.changed} changed elements of {m.elements}", rule="manifest.changed")
    # A change of nothing needs no payload; neither does a base.
    needs_payload = m.kind == "anchor" or (m.kind != "base" and m.digest != m.parent_digest)
    if (needs_payload and not m.payloads) or (m.kind == "base" and m.payloads):
        raise CorruptError(f"a {m.kind} with {len(m.payloads)} payloads", rule="manifest.payloads")


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not value:
        raise CorruptError(f"{name} is {value!r:.80}, not a text", rule="manifest.field")
    return value


def _count(fields: dict[str, Any], name: str) -> int:
    value = fields[name]
    if not is_count(value, most=_COUNT_MAX):
        raise CorruptError(f"{name} is {value!r:.80}, not a count", rule="manifest.field")
    return int(value)


def _optional_count(fields: dict[str, Any], name: str) -> int | None:
    return None if fields[name] is None else _count(fields, name)


def _sha256(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not is_sha256(value):
        raise CorruptError(f"{name} is {value!r:.80}, not a SHA-256 in hex", rule="manifest.field")
    return str(value)


def _payloads(value: Any) -> tuple[PayloadRef, ...]:
    if not isinstance(value, list):
        raise CorruptError("payloads is not a list", rule="manifest.field")
    refs = tuple(PayloadRef.from_json(item) for item in value)
    if len({ref.sha256 for ref in refs}) != len(refs):
        raise CorruptError("a payload is listed twice", rule="manifest.payloads")
    return refs


def _base(value: Any) -> BaseRef:
    match value:
        case {"checkpoint": str(checkpoint), "revision": str() | None as revision} if checkpoint:
            return BaseRef(checkpoint, revision)
    raise CorruptError(f"base is {value!r:.80}, not {{checkpoint, revision}}", rule="manifest.field")


def _extra(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CorruptError("extra is not a map of texts", rule="manifest.field")
    return value
