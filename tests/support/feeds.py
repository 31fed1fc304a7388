"""Feeds made version by version; stores that stop at an operation, or are read after each; states by number."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from deltasync import blocks
from deltasync.blocks import detect
from deltasync.codecs import exp
from deltasync.errors import DeltasyncError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.plan import Plan
from deltasync.feed.route import Route
from deltasync.feed.upload import RESUME_S, Upload
from deltasync.format import keys
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.manifest import BaseRef, Kind, Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.weights import Readable, Weights
from deltasync.state import State as HeldState
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Capabilities, Data, ObjectInfo, Store, WrapperStore
from deltasync.testing.faulty import Fault, FaultyStore, Operation, never
from deltasync.trainer import versions
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.events import PublishEvent
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.upkeep.verify import verify

from . import LONG_S
from .helpers import State, changed, sha256, state

LAYOUT_SHA256 = "ab" * 32
NOW_UNIX_S = 1_700_000_000


def replay(log: Log, plan: Plan, weights: Weights) -> None:
    """Overwrite weights that hold the start of a plan with its end, and prove them."""
    HeldState(weights, scratch=True).follow(Route(log, log.read(plan.edges[-1].end)), plan)


class SpyStore(MemoryStore):
    """Notes every call as (verb, key), and leaves keys out of listings where `hidden` says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []
        self.hidden: Callable[[str], bool] = lambda key: False

    def put(self, key: str, data: Data) -> None:
        self.calls.append(("put", key))
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self.calls.append(("create", key))
        return super().create(key, data)

    def get(self, key: str) -> bytes:
        self.calls.append(("get", key))
        return super().get(key)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self.calls.append(("list", prefix))
        return (info for info in super().list(prefix, after=after) if not self.hidden(info.key))

    def delete(self, key: str) -> None:
        self.calls.append(("delete", key))
        super().delete(key)

    def age(self, key: str, modified_unix_s: float) -> None:
        """Let an object have been put at another time."""
        with self._lock:
            self._objects[key] = (self._objects[key][0], modified_unix_s)

    def took(self) -> "Sequence[tuple[str, str]]":
        """The calls since the last time this was asked."""
        calls, self.calls = self.calls, []
        return calls


class NoFenceStore(SpyStore):
    """A store without create-if-absent."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False)

    def create(self, key: str, data: Data) -> bool:
        raise AssertionError("this must not be called")


def put_anchor(
    upload: Upload, weights: Readable, version: int, **options: Any
) -> tuple[tuple[PayloadRef, ...], StateDigest]:
    """Put the shards of an anchor of all weights, or of those of one process; returns them, and their digest."""
    upload.resume(RESUME_S)
    part = versions.put_anchor(upload, weights, version, **options)
    layout = weights.layout if options.get("shards") is None else options["shards"].layout
    return part.payloads, layout_digest(layout) + part.digest_delta


class Feed:
    """A feed with real payloads. `states[v]` is what version v must come out as."""

    def __init__(self, store: Store | None = None) -> None:
        self.store: Store = SpyStore() if store is None else store
        self.log = Log(self.store)
        self.upload = Upload(self.store)
        self.upload.open()
        self.states: list[Weights] = []
        self.head: Manifest | None = None

    @classmethod
    def of(cls, versions: int, store: Store | None = None) -> "Feed":
        """An anchor and deltas."""
        feed = cls(store)
        feed.anchor(state())
        for _ in range(versions - 1):
            feed.delta()
        return feed

    def anchor(self, tensors: dict[str, np.ndarray] | Weights) -> Manifest:
        """The next version as all weights, of any layout."""
        weights = tensors if isinstance(tensors, Weights) else Weights.of(tensors)
        refs, digest = put_anchor(self.upload, weights, len(self.states))
        return self._commit(self.new("anchor", weights, digest, payloads=refs), weights)

    def base(self, tensors: dict[str, np.ndarray], ref: BaseRef) -> Manifest:
        weights = Weights.of(tensors)
        return self._commit(self.new("base", weights, blocks.digest(weights), base=ref), weights)

    def delta(self, new: Weights | None = None, *, ranks: int = 1) -> Manifest:
        """The next version as a change, encoded by several ranks that each have a stripe of every tensor."""
        old = self.states[-1]
        after = self.next_state() if new is None else new
        groups = [blocks.encode_delta(old, after)] if ranks == 1 else rank_blocks(old, after, ranks)
        version, digest = len(self.states), blocks.digest(after)
        refs = [self.put_change(len(self.states) - 1, version, group) for group in groups if group]
        count = sum(block.changed for group in groups for block in group)
        return self._commit(self.new("delta", after, digest, payloads=tuple(refs), changed=count), after)

    def late_anchor(self, version: int) -> Manifest:
        """An anchor that is added to a version."""
        refs, digest = put_anchor(self.upload, self.states[version], version)
        committed = self.log.read(version)
        manifest = replace(self.new("anchor", self.states[version], digest, payloads=refs), version=version)
        manifest = replace(manifest, parent=None, parent_digest=None, files=committed.files)
        self.upload.commit(manifest, key=keys.anchor_key(version))
        return manifest

    def skip(self, start: int, end: int, **fields: Any) -> Manifest:
        """The change between two versions that are there; `fields` replace those of its manifest."""
        old, new = self.states[start], self.states[end]
        found = blocks.encode_delta(old, new)
        manifest = replace(
            self.new("skip", new, blocks.digest(new), payloads=(self.put_change(start, end, found),)),
            version=end,
            parent=start,
            parent_digest=blocks.digest(old),
            changed=sum(block.changed for block in found),
        )
        manifest = replace(manifest, **fields)
        self.upload.commit(manifest)
        return manifest

    def put_change(self, start: int, end: int, group: Sequence[Block], **fields: Any) -> PayloadRef:
        """A payload of kind delta for version `end`; `fields` replace those of its header."""
        before = blocks.digest(self.states[start])
        digest = sum((block.digest for block in group), before)
        header = PayloadHeader("delta", self.states[start].layout, before, digest, end)
        return self.upload.put(write_payload(replace(header, **fields), group))

    def next_state(self) -> Weights:
        """Some flipped bits on top of the newest state."""
        arrays = {t.name: a for t, a in zip(self.states[-1].layout.tensors, self.states[-1].arrays, strict=True)}
        flipped = changed(arrays, seed=len(self.states))
        return Weights(self.states[-1].layout, tuple(flipped[t.name] for t in self.states[-1].layout.tensors))

    def new(self, kind: Kind, weights: Weights, digest: StateDigest, **fields: Any) -> Manifest:
        """The manifest of the next version."""
        manifest = Manifest(
            kind=kind,
            version=len(self.states),
            layout_sha256=weights.layout.sha256,
            digest=digest,
            elements=weights.layout.elements,
            writer=self.upload.id,
            created_unix_s=NOW_UNIX_S,
            parent=None if self.head is None else self.head.version,
            parent_digest=None if self.head is None else self.head.digest,
        )
        return replace(manifest, **fields)

    def payload_keys(self, manifest: Manifest) -> list[str]:
        return [keys.payload_key(ref.sha256) for ref in manifest.payloads]

    def _commit(self, manifest: Manifest, weights: Weights) -> Manifest:
        # First: another thread may see the version as soon as it is committed.
        self.states.append(weights)
        try:
            self.upload.commit(manifest)
        except BaseException:
            self.states.pop()
            raise
        self.head = manifest
        return manifest


def rank_blocks(old: Weights, new: Weights, ranks: int) -> list[list[Block]]:
    """The change as independent ranks encode it: rank r has the r-th stripe of every tensor."""
    groups = []
    for rank in range(ranks):
        by_dtype: dict[str, list[tuple[int, int, int]]] = {}
        for ordinal, spec in enumerate(old.layout.tensors):
            first, last = rank * spec.elements // ranks, (rank + 1) * spec.elements // ranks
            if first < last:
                by_dtype.setdefault(spec.dtype.name, []).append((ordinal, first, last - first))
        runs = [np.array(rows, np.int64) for rows in by_dtype.values()]
        groups.append([exp.encode(old, changes) for piece in runs for changes in detect(old, new, piece)])
    return groups


def same_weights(a: Weights, b: Weights) -> bool:
    return a.layout == b.layout and all((x == y).all() for x, y in zip(a.arrays, b.arrays, strict=True))


def paper(kind: Kind, end: int, nbytes: int = 0, *, start: int | None = None, **fields: Any) -> Manifest:
    """A manifest whose payload is nowhere: enough for a planner. Version v has the digest (v, v)."""
    start = end - 1 if kind == "delta" else start
    is_change = kind in ("delta", "skip")
    manifest = Manifest(
        kind=kind,
        version=end,
        layout_sha256=LAYOUT_SHA256,
        digest=StateDigest(end, end),
        elements=1000,
        changed=1 if is_change else None,
        parent=start if is_change else None,
        parent_digest=StateDigest(start, start) if is_change and start is not None else None,
        payloads=() if kind == "base" else (PayloadRef(sha256(f"{kind} {start} {end}".encode()), nbytes),),
        base=BaseRef("folder") if kind == "base" else None,
        writer="paper",
        created_unix_s=NOW_UNIX_S,
    )
    return replace(manifest, **fields)


def store_of(*manifests: Manifest, late: Sequence[Manifest] = ()) -> SpyStore:
    """A store that holds these manifests where they belong; `late` ones under `anchors/`."""
    store = SpyStore()
    for manifest in manifests:
        store.put(manifest_key(manifest), manifest.to_bytes())
    for manifest in late:
        store.put(keys.anchor_key(manifest.version), manifest.to_bytes())
    store.took()
    return store


def flip(store: Store, key: str, at: int = -1) -> None:
    """Damage one byte of an object."""
    data = bytearray(store.get(key))
    data[at] ^= 1
    store.put(key, data)


def restored(feed: Feed, version: int | None = None, **options: Any) -> Weights:
    """A version, or the head, from the store alone."""
    target = feed.log.require_head() if version is None else feed.log.read(version)
    return load(feed.log, target, **options)


def refused(feed: Feed, manifest: Manifest, **options: Any) -> DeltasyncError:
    """The error that a version is refused with."""
    with pytest.raises(DeltasyncError) as caught:
        load(feed.log, manifest, **options)
    return caught.value


class WatchedStore(WrapperStore):
    """Any store. `look` is called with that store after each put, create and delete, one call at a time.

    Also after one that failed: it may have happened all the same. What `look` raises reaches the caller that wrote.
    """

    def __init__(self, store: Store, look: Callable[[Store], None]) -> None:
        super().__init__(store)
        self._look = look
        self._lock = threading.Lock()

    def put(self, key: str, data: Data) -> None:
        with self._watched():
            self._store.put(key, data)

    def create(self, key: str, data: Data) -> bool:
        with self._watched():
            return self._store.create(key, data)

    def delete(self, key: str) -> None:
        with self._watched():
            self._store.delete(key)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._look(self._store)


NEVER = AnchorPolicy(bytes_ratio=None, versions=None)
HARD = Fault("refuse", transient=False)


def nth(number: int) -> State:
    """The weights of a step. Neighbours differ in few bits, some of them in the same ones."""
    return changed(state(), seed=number, share=0.03) if number else state()


def publisher(store: Store, **options: Any) -> FeedPublisher:
    """Without anchors but the first, unless asked for."""
    return FeedPublisher(store, PublisherOptions(**{"anchors": NEVER, "retry_s": 5.0, **options}))


def publish(to: FeedPublisher, number: int, **options: Any) -> Any:
    return to.publish(WeightsSource(Weights.of(nth(number))), step=number, **options)


def begun(plan: Any = None, **options: Any) -> tuple[FaultyStore, FeedPublisher]:
    """A feed whose version 0 is step 0; faults begin afterwards."""
    store = FaultyStore(MemoryStore())
    to = publisher(store, **options)
    publish(to, 0).wait(LONG_S)
    assert to.wait(LONG_S)
    store._plan = never if plan is None else plan
    return store, to


def holds(weights: Weights, wanted: State) -> bool:
    known = Weights.of(wanted)
    pairs = zip(weights.arrays, known.arrays, strict=True)
    return weights.layout == known.layout and all(np.array_equal(a, b) for a, b in pairs)


def require_steps(store: Store, steps: Mapping[int, int], make: Callable[[int], State] = nth) -> list[Manifest]:
    """The feed has these versions and no other, each with the weights of its step; `verify --deep` finds nothing.

    A deep verification has replayed every version and compared it with its digest, so the digest is compared here. The
    newest version is also loaded and compared bit by bit.
    """
    log, manifests = Log(store), []
    found = verify(store, deep=True)
    assert found.is_clean, (found.damages, found.lost)
    assert set(found.restorable) == set(steps)
    for version, step in steps.items():
        manifests.append(log.read(version))
        assert manifests[-1].step == step
        assert manifests[-1].digest == _digest(make, step), f"version {version} is not step {step}"
    if steps:
        assert holds(load(log, manifests[-1]), make(step)), f"version {version} is not step {step}"
    return manifests


@cache
def _digest(make: Callable[[int], State], step: int) -> StateDigest:
    return blocks.digest(Weights.of(make(step)))


class Gate:
    """A plan of faults that stops the first operation of one kind until the gate is opened."""

    def __init__(self, verb: str, prefix: str) -> None:
        self._verb, self._prefix = verb, prefix
        self._reached, self._open = threading.Event(), threading.Event()

    def __call__(self, operation: Operation) -> None:
        if operation.verb == self._verb and operation.key.startswith(self._prefix) and not self._reached.is_set():
            self._reached.set()
            assert self._open.wait(LONG_S)

    def await_operation(self) -> None:
        assert self._reached.wait(LONG_S), "nothing reached the gate"

    def open(self) -> None:
        self._open.set()


class Outage:
    """A plan of faults for operations that `hits` names, until `is_over`."""

    def __init__(self, fault: Fault, hits: Callable[[Operation], bool] = lambda operation: True) -> None:
        self.is_over = False
        self._fault, self._hits = fault, hits

    def __call__(self, operation: Operation) -> Fault | None:
        return None if self.is_over or not self._hits(operation) else self._fault


class Notes(list[PublishEvent]):
    """An observer that keeps the events that it gets."""

    def __call__(self, event: PublishEvent) -> None:
        self.append(event)

    @property
    def versions(self) -> list[int]:
        return [event.version for event in self]
