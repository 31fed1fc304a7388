"""The mirror: the replica host's copy of the weights of a version, in memory or in a mapped file.

Beside a mapped file lies a small record of what it should hold. The record is only a hint: when the file is opened
again, the digest of all weights decides.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deltasync import blocks
from deltasync.errors import CorruptError, FormatError, NotFoundError
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.payload import FORMAT
from deltasync.format.seal import SEAL, require_sealed, sealed
from deltasync.format.strict_json import is_count, is_sha256, parse_object, require_understood
from deltasync.format.weights import Weights
from deltasync.log.log import Log
from deltasync.mapped import mapped_layout, mapped_weights
from deltasync.replay import zeros

_log = logging.getLogger(__name__)
_COUNT_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class MirrorRecord:
    """What a mapped file should hold: `version`, or `writing` if that was finished.

    `applied` names the payloads of an anchor to `writing` that were written already.
    """

    version: int | None = None
    writing: int | None = None
    applied: frozenset[str] = frozenset()

    def to_bytes(self) -> bytes:
        fields = {"version": self.version, "writing": self.writing, "applied": sorted(self.applied)}
        return sealed({"format": FORMAT, **fields})

    @classmethod
    def from_bytes(cls, data: bytes) -> "MirrorRecord":
        """The inverse of `to_bytes`; CorruptError or FormatError on anything else."""
        fields = parse_object(data, what="the mirror's record", scope="mirror")
        if fields.get("format") != FORMAT:
            raise FormatError(f"a mirror of format {fields.get('format')!r:.80}", rule="mirror.format")
        require_understood(
            fields, ("format", "version", "writing", "applied", SEAL), what="the mirror's record", scope="mirror"
        )
        require_sealed(data, fields, what="the mirror's record", scope="mirror")
        version, writing, applied = fields.get("version"), fields.get("writing"), fields.get("applied")
        counts = all(number is None or is_count(number, most=_COUNT_MAX) for number in (version, writing))
        if not counts or not isinstance(applied, list) or not all(is_sha256(text) for text in applied):
            raise CorruptError("the mirror's record has fields of other types", rule="mirror.field")
        return cls(version, writing, frozenset(applied))


class Mirror:
    """`weights` are those of `version`, whose state digest is `digest`; both None while they are of none.

    Not safe for threads: whoever moves or compares it holds the follower's lock.
    """

    def __init__(self, weights: Weights, path: Path | None) -> None:
        self.weights = weights
        self.path = path
        self.version: int | None = None
        self.digest: StateDigest | None = None
        self._record = MirrorRecord()

    @classmethod
    def new(cls, layout: Layout, path: Path | None) -> "Mirror":
        """Room for weights of this layout; a file of another layout is replaced."""
        return cls(zeros(layout) if path is None else mapped_weights(layout, path), path)

    @classmethod
    def reopened(cls, path: Path, log: Log, *, threads: int | None = None) -> "Mirror | None":
        """What an earlier process left in a file, proved against the manifests of the feed; None if there is no file.

        One that holds no version of the feed is loudly given up: it is of no version then.
        """
        layout = mapped_layout(path)
        if layout is None:
            return None
        mirror = cls(mapped_weights(layout, path), path)
        mirror._record = _read_record(path)
        # The manifests first: a store that fails must not cost a digest at every attempt.
        candidates = dict(_candidates(log, mirror._record))
        found = blocks.digest(mirror.weights, threads=threads)
        for version, digest in candidates.items():
            if digest == found:
                mirror._hold(version, digest)
                _log.info("the mirror %s holds version %d", path, version)
                return mirror
        _log.warning(
            "the mirror %s has the digest %s, of no version that it should hold (%s): it is built anew",
            path,
            found,
            ", ".join(map(str, candidates)) if candidates else "none is known",
        )
        return mirror

    @property
    def applied(self) -> frozenset[str]:
        """Payloads of the anchor to `torn_for` that were written before an interruption."""
        return self._record.applied

    @property
    def torn_for(self) -> int | None:
        """The version that was being written when the weights got torn."""
        return self._record.writing if self.version is None else None

    @contextmanager
    def becoming(self, version: int, digest: StateDigest, *, resume: bool = False) -> Iterator[None]:
        """The block overwrites the weights with another version. If it fails, they are of none.

        `resume`: what was applied before an interruption stays noted.
        """
        applied = self._record.applied if resume else frozenset()
        self._note(MirrorRecord(self.version, version, applied))
        self.version = self.digest = None
        yield
        self._hold(version, digest)

    def note_applied(self, sha256: str) -> None:
        """A payload of an anchor is written: it need not be fetched again after an interruption."""
        self._note(MirrorRecord(None, self._record.writing, self._record.applied | {sha256}))

    def give_up(self) -> None:
        """The weights turned out to be of no version, and nothing of them is of use."""
        self.version = self.digest = None
        self._note(MirrorRecord())

    def is_sound(self, *, threads: int | None = None) -> bool:
        """Whether the weights have the digest of their version; reads all of them."""
        return self.digest is not None and blocks.digest(self.weights, threads=threads) == self.digest

    def _hold(self, version: int, digest: StateDigest) -> None:
        self.version, self.digest = version, digest
        # The file's record already names this version as the one being written, which is as good.
        self._record = MirrorRecord(version)

    def _note(self, record: MirrorRecord) -> None:
        self._record = record
        if self.path is not None:
            # Whole or not at all, but not synced: after a power cut the digest decides, whatever is found here.
            temporary = _record_path(self.path).with_suffix(".tmp")
            temporary.write_bytes(record.to_bytes())
            os.replace(temporary, _record_path(self.path))


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _read_record(path: Path) -> MirrorRecord:
    try:
        return MirrorRecord.from_bytes(_record_path(path).read_bytes())
    except FileNotFoundError:
        return MirrorRecord()
    except (CorruptError, FormatError) as error:
        _log.warning("%s is of no use: %s", _record_path(path), error)
        return MirrorRecord()


def _candidates(log: Log, record: MirrorRecord) -> Iterable[tuple[int, StateDigest]]:
    """Versions that the file may hold, with the digests that the feed has for them."""
    for version in (record.version, record.writing):
        if version is not None:
            try:
                yield version, log.read(version).digest
            except (CorruptError, FormatError, NotFoundError) as error:
                _log.warning("cannot prove the mirror by version %d: %s", version, error)
