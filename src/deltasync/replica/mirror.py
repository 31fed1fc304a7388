"""The mirror: the replica host's copy of the weights of a version, in memory or in a mapped file.

A small record beside a mapped file says what the file should hold. The record is only a hint: when the file is opened
again, the digest of all weights decides.

`memory_folder` is for mirrors and stages that several processes of one host map. Any user of the machine can create
files in shared memory, so nothing that is found there is trusted: only a folder that belongs to this user and is closed
to all others is entered, and no link is followed.
"""

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import mapped_layout, mapped_weights, require_mapped
from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.route import Route
from deltasync.files import locked, remove_abandoned_files, temporary_beside
from deltasync.format import limits
from deltasync.format.layout import Layout
from deltasync.format.sealed import FORMAT, read_sealed, sealed
from deltasync.format.weights import Weights
from deltasync.state import Applied, State
from deltasync.store import Feed, opened
from deltasync.store.patient import PatientStore

logger = logging.getLogger(__name__)

_START_S = 60.0
"""How long a start waits for others of this user, which hold the lock while they remove what killed processes left."""
_WAIT_S = 3600.0
"""How long to wait for another process that fills the same mirror: as long as a large model takes to fetch."""
_PATIENCE_S = 60.0
"""How long a read is retried while a mirror is filled."""


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
        names, what = ("version", "writing", "applied"), "the record of the mirror"
        fields = read_sealed(data, "mirror", names, what=what, bytes_max=limits.MANIFEST_BYTES_MAX)
        version, writing = fields.optional_count("version"), fields.optional_count("writing")
        return cls(version, writing, frozenset(fields.sha256s("applied")))


class MappedState(State):
    """A state in a mapped file, which a later process finds again."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def require_ours(self) -> None:
        """InvalidInputError if something is in the place of the file or its record that no mirror has written."""
        record = _record_path(self.path)
        if os.path.lexists(record) and not _is_record(record):
            raise InvalidInputError(
                f"{record} exists and is not the record of a mirror",
                hint="choose another path: the record is beside it",
            )
        # A record is mark enough: a power cut may have taken that of the file.
        if _read_record(self.path) is None:
            require_mapped(self.path)

    def open(self, log: Log, applied: Applied) -> None:
        """Look for the mirror that an earlier process left in the file, and check it against the feed.

        Weights that have the digest of no version that the record names are of no version, and will be replaced.
        """
        self.require_ours()
        remove_abandoned_files(_record_path(self.path), _is_record)
        layout = mapped_layout(self.path)
        if layout is not None:
            weights, record = mapped_weights(layout, self.path), _read_record(self.path) or MirrorRecord()
            # The manifests are read first, so that a store that fails does not cost a digest at every attempt.
            candidates = []
            for version in (record.version, record.writing):
                if version is not None:
                    try:
                        candidates.append(log.read(version))
                    except (CorruptError, FormatError, NotFoundError) as error:
                        logger.warning("cannot check the mirror against version %d: %s", version, error)
            digest = blocks.digest(weights)
            self.weights, self._writing, self._written = weights, record.writing, record.applied
            at = next((manifest for manifest in candidates if manifest.digest == digest), None)
            if at is not None:
                self._hold(at)
                logger.info("the mirror %s holds version %d", self.path, at.version)
            else:
                named = ", ".join(str(manifest.version) for manifest in candidates) if candidates else "it names none"
                message = "the mirror %s has the digest %s, which no version of its record has (%s): rebuilding it"
                logger.warning(message, self.path, digest, named)
                applied.rebuilt += not record.applied

    def _new_weights(self, layout: Layout) -> Weights:
        return mapped_weights(layout, self.path)

    def _note(
        self, version: int | None = None, writing: int | None = None, written: frozenset[str] = frozenset()
    ) -> None:
        # The record appears whole or not at all, but is not synced: after a power cut the digest decides.
        with temporary_beside(_record_path(self.path)) as temporary:
            temporary.write_bytes(MirrorRecord(version, writing, written).to_bytes())
            os.replace(temporary, _record_path(self.path))


def fill_mirror(
    feed: Feed,
    path: Path,
    *,
    base: Path | None = None,
    version: int | None = None,
    on_locked: Callable[[], None] = lambda: None,
) -> int:
    """Bring the mirror in a file to a version, before an engine loads its weights, and return the version.

    By default a version that the mirror holds is kept, and an empty mirror gets the newest one. What the mirror holds
    is proved by its digest. Several processes may fill one mirror: one does it, and the others wait. `on_locked` is
    called once it is this one.
    """
    with ExitStack() as held:
        try:
            held.enter_context(locked(path))
        except InvalidInputError:
            logger.info("waiting for the process that fills the mirror %s", path)
            held.enter_context(locked(path, wait_s=_WAIT_S))
        on_locked()
        store = held.enter_context(opened(feed))
        log = Log(PatientStore(store, _PATIENCE_S, level=logging.INFO))
        mirror = MappedState(path)
        mirror.open(log, Applied())
        if mirror.version is None or version not in (None, mirror.version):
            mirror.advance(Route(log, log.require_head() if version is None else log.read(version), base=base))
        assert mirror.version is not None
        return mirror.version


def _record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def _is_record(path: Path) -> bool:
    """Whether a file is a record, even if it is damaged: a power cut can leave it empty."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as file:
        data = file.read(limits.MANIFEST_BYTES_MAX + 1)
    return not data.strip(b"\0") or (data.startswith(b'{"applied":') and b'"format":"deltasync/' in data)


def _read_record(path: Path) -> MirrorRecord | None:
    """The record of the mirror at `path`; None if there is none that can be used."""
    try:
        return MirrorRecord.from_bytes(_record_path(path).read_bytes())
    except FileNotFoundError:
        return None
    except (CorruptError, FormatError) as error:
        logger.warning("cannot use the record %s: %s", _record_path(path), error)
        return None


@contextmanager
def memory_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new private folder, which is removed at the end of the block.

    It is in shared memory where the system has that, unless a `parent` is given. What killed processes of this user
    have left there is removed first: a mirror is as large as the model, and a second one would fill the memory.
    """
    shared = Path("/dev/shm")
    home = _private_home(parent or (shared if shared.is_dir() else Path(tempfile.gettempdir())))
    with ExitStack() as held:
        with locked(home / "folders", wait_s=_START_S):
            for other in home.iterdir():
                if _is_private(other) and (other / "used.lock").is_file():
                    # The system has released the lock of a process that has ended.
                    with suppress(InvalidInputError), locked(other / "used"):
                        shutil.rmtree(other, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(dir=home))
            held.enter_context(locked(folder / "used"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _private_home(place: Path) -> Path:
    """The folder of this user in a place that is open to all. If another user has taken its name, it gets another."""
    own = place / f"deltasync-{os.geteuid()}"
    for home in (own, *sorted(place.glob(f"{own.name}.*"))):
        if _is_private(home):
            return home
    try:
        own.mkdir(mode=0o700)
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{own.name}.", dir=place))
    return own


def _is_private(path: Path) -> bool:
    """Whether this is a folder, not a link to one, that belongs to this user and that no other user can enter."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and status.st_mode & 0o077 == 0
