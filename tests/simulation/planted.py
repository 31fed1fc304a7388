"""Faults in our own code, to prove that the simulation finds them: `python -m simulation --plant NAME …`."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from deltasync.blocks import encode_changes, overwrite_all
from deltasync.errors import ConflictError
from deltasync.feed import upload
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import PayloadRef
from deltasync.past import Past
from deltasync.replica import mirror
from deltasync.replica.delivery import Delivery
from deltasync.state import Applied
from deltasync.store.leased import LEASE_S, LeasedStore
from deltasync.store.patient import PatientStore
from deltasync.trainer import pipeline, publisher
from deltasync.trainer.pipeline import Pipeline
from deltasync.trainer.versions import Part, VersionWriter
from deltasync.upkeep import prune

from .scheduler import scheduler

Plant = Callable[[], AbstractContextManager[object]]


class _Equal:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _commit_before_payload() -> Iterator[None]:
    """The manifest of a delta is created first, and then its payload is put."""
    put, commit, waiting = Upload.put, Upload.commit, "_planted"

    def later(self: Upload, data: bytes, ref: Any = None, **options: Any) -> object:
        if b'"kind":"delta"' not in bytes(data[:4096]):
            return put(self, data, ref, **options)
        self.__dict__.setdefault(waiting, []).append(data)
        return PayloadRef.of(data)

    def first(self: Upload, manifest: Any, **options: Any) -> object:
        outcome = commit(self, manifest, **options)
        while self.__dict__.get(waiting):
            put(self, self.__dict__[waiting][0])
            self.__dict__[waiting].pop(0)
        return outcome

    with mock.patch.object(Upload, "put", later), mock.patch.object(Upload, "commit", first):
        yield


def _advance_early(self: Pipeline, job: Any, head: Any) -> Any:
    """As `_write_delta`, but the shadow is overwritten before the commit."""
    changes, weights = [] if job.capture is None else job.capture, self.shadow.require_weights()
    encoded = list(encode_changes(weights, changes))
    overwrite_all(weights, changes)
    committed = self.versions.delta(lambda: encoded, head, replace(job.metadata, files=head.files))
    self._advance(changes, committed)
    return committed.manifest, committed.event(held_s=job.held_s)


def _always_conflict(self: Upload, key: str, data: bytes) -> None:
    raise ConflictError(f"{key} exists", key=key)


@contextmanager
def _no_read_back() -> Iterator[None]:
    """A create without an answer has failed, and an object that is there is another writer's."""
    is_not_ours = mock.patch.object(PatientStore, "_has", return_value=False)
    with is_not_ours, mock.patch.object(Upload, "_settle", _always_conflict):
        yield


def _own_clock(store: object) -> float:
    """The clock of the process in place of the store's."""
    return scheduler().now_s + scheduler().current.process.clock_offset_s


def _strict_lease(self: LeasedStore) -> None:
    held = self._read()
    if held is None or held.writer != self._writer or held.expires_unix_s < int(self._clock()) + LEASE_S:
        raise ConflictError("the lease has another time", key=keys.LEASE)


def _trust_record(self: mirror.MappedState, log: Log, applied: Applied) -> None:
    """A mirror in a file is taken for what its record says."""
    layout = mirror.mapped_layout(self.path)
    record = mirror._read_record(self.path)
    if layout is not None and record is not None:
        self.weights, named = mirror.mapped_weights(layout, self.path), record.writing or record.version
        if named is not None:
            self._hold(log.read(named))


def _patch(owner: object, name: str, value: object) -> Plant:
    return lambda: mock.patch.object(owner, name, value)


_total = Part.total
PLANTED: dict[str, Plant] = {
    "commit before payload": _commit_before_payload,
    "shadow advanced before the commit": _patch(Pipeline, "_write_delta", _advance_early),
    "prune by its own clock": _patch(prune, "probe_clock", _own_clock),
    "no read-back after a lost response": _no_read_back,
    "lost commit not looked for": _patch(VersionWriter, "lost_commit", lambda self, parent, digest_delta: None),
    "shadow file trusted without its digest": _patch(publisher, "blocks", SimpleNamespace(digest=lambda w: _Equal())),
    "mirror file trusted without its digest": _patch(mirror.MappedState, "open", _trust_record),
    "payloads not put again after a sleep": _patch(upload, "LATE_S", math.inf),
    "orphans not listed again": _patch(prune, "_is_older", lambda *args: True),
    "changes for a target at another version": _patch(Delivery, "_is_proved_at", lambda self, version: True),
    "replicas not respected by prune": _patch(prune, "is_live", lambda beat, now, **options: False),
    "captures not rebased": _patch(pipeline, "rebase", lambda layout, pending, sent, before: pending),
    "anchor of a shadow that moves": _patch(Past, "keep", lambda self, before: None),
    "last rank left out": _patch(Part, "total", classmethod(lambda cls, parts: _total(parts[:-1] or parts))),
    "lease that knows only one thread": _patch(LeasedStore, "_require_held", _strict_lease),
    "floor by versions alone": _patch(
        prune, "_floor", lambda contents, **keep: max(0, (contents.head or 0) - keep["keep_versions"] + 1)
    ),
}
"""By name, a context in which the fault is there."""
