"""The manifest: the small JSON object whose creation is the commit."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from deltasync.errors import CorruptError, FormatError
from deltasync.format import limits
from deltasync.format.digest import StateDigest
from deltasync.format.sealed import FORMAT, Fields, read_sealed, require_seal, sealed

Data = bytes | bytearray | memoryview
Kind = Literal["anchor", "delta", "skip", "base"]
_KINDS: dict[str, Kind] = {"anchor": "anchor", "delta": "delta", "skip": "skip", "base": "base"}


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
    def from_fields(cls, fields: Fields) -> "PayloadRef":
        return cls(fields.sha256("sha256"), fields.count("bytes"))

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "bytes": self.nbytes}


@dataclass(frozen=True, slots=True)
class BaseRef:
    """A checkpoint that a replica already has."""

    checkpoint: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """When weights were captured, by the publisher's clock, and how long each step before the commit took.

    The trainer was held for `held_ms`; the capture then waited for earlier ones. Payloads are put while others are
    encoded: `encode_ms` is the time in which putting waited for the encoder.
    """

    captured_unix_ms: int
    held_ms: int
    queued_ms: int
    encode_ms: int
    put_ms: int

    @classmethod
    def from_fields(cls, fields: Fields) -> "Timeline":
        return cls(*(fields.count(name) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class Manifest:
    """One edge to a version of a feed.

    `parent` and `parent_digest` go together; an anchor may have them too. `changed` counts the elements that differ
    from the parent; an anchor and a base have none. `files` names the files beside the weights (`format.companions`).
    `timeline` is for people; manifests of earlier releases, and of commands, have none.
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
    timeline: Timeline | None = None

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
            **({} if self.timeline is None else {"timeline": asdict(self.timeline)}),
        }

    def to_bytes(self) -> bytes:
        """Sealed canonical JSON: equal manifests have equal bytes. CorruptError for one that a reader would refuse."""
        data = sealed(self.to_json())
        self.from_bytes(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """The inverse of `to_bytes`; CorruptError or FormatError with the broken rule on anything else."""
        # The seal is checked last, so that a manifest of a writer that breaks a rule is refused by that rule.
        found = read_sealed(data, "manifest", _FIELDS, bytes_max=limits.MANIFEST_BYTES_MAX, check_seal=False)
        kind = _KINDS.get(found.text("kind"))
        if kind is None:
            raise FormatError(
                f"{found.values['kind']!r:.80} is not a kind of manifest that this release knows",
                rule="manifest.kind",
                hint="upgrade deltasync",
            )
        parent_digest, files = found.values["parent_digest"], found.optional_object("files")
        timeline = found.optional_object("timeline")
        manifest = cls(
            kind=kind,
            version=found.count("version"),
            parent=found.optional_count("parent"),
            step=found.optional_count("step"),
            layout_sha256=found.sha256("layout_sha256"),
            parent_digest=None if parent_digest is None else StateDigest.from_hex(parent_digest),
            digest=StateDigest.from_hex(found.values["digest"]),
            elements=found.count("elements"),
            changed=found.optional_count("changed"),
            payloads=tuple(PayloadRef.from_fields(item) for item in found.objects("payloads")),
            files=None if files is None else PayloadRef.from_fields(files),
            writer=found.text("writer"),
            created_unix_s=found.count("created_unix_s"),
            base=_base(found.values["base"]),
            extra=found.texts("extra"),
            timeline=None if timeline is None else Timeline.from_fields(timeline),
        )
        _check_kind(manifest)
        require_seal(data, found.values, what=found.what, scope=found.scope)
        return manifest


_FIELDS = tuple(each.name for each in fields(Manifest) if each.name != "timeline")
"""What every manifest has."""


def _base(value: Any) -> BaseRef | None:
    match value:
        case None:
            return None
        case {"checkpoint": str(checkpoint), "revision": str() | None as revision} if checkpoint:
            return BaseRef(checkpoint, revision)
    raise CorruptError(
        f"base of the manifest must be null or {{checkpoint, revision}}, not {value!r:.80}", rule="manifest.field"
    )


def _check_kind(m: Manifest) -> None:
    """CorruptError if the fields do not fit the kind, or each other."""
    if len({ref.sha256 for ref in m.payloads}) != len(m.payloads):
        raise CorruptError("the manifest lists a payload twice", rule="manifest.payloads")
    behind = None if m.parent is None else m.version - m.parent
    if (m.parent is None) != (m.parent_digest is None):
        raise CorruptError("a manifest has both parent and parent_digest, or neither", rule="manifest.parent")
    fits = {
        "delta": behind == 1,
        "skip": behind is not None and behind >= 2,
        "anchor": behind in (None, 1),
        "base": behind is None,
    }
    if not fits[m.kind]:
        raise CorruptError(f"a {m.kind} to version {m.version} cannot start from {m.parent}", rule="manifest.parent")
    if (m.kind == "base") != (m.base is not None):
        raise CorruptError(
            f"a manifest of kind {m.kind} has the base {m.base!r:.80}; exactly those of kind base have one",
            rule="manifest.base",
        )
    is_change = m.kind in ("delta", "skip")
    if is_change != (m.changed is not None) or (m.changed is not None and m.changed > m.elements):
        raise CorruptError(
            f"changed of a {m.kind} of {m.elements} elements is {m.changed}; it must be a number up to that for a "
            "delta or skip, and null for an anchor or base",
            rule="manifest.changed",
        )
    # A change of nothing needs no payload; neither does a base.
    needs_payload = m.kind == "anchor" or (m.kind != "base" and m.digest != m.parent_digest)
    if (needs_payload and not m.payloads) or (m.kind == "base" and m.payloads):
        raise CorruptError(
            f"a {m.kind} has {len(m.payloads)} payloads; it must have {'at least one' if needs_payload else 'none'}",
            rule="manifest.payloads",
        )
