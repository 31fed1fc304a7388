"""Small feeds whose every version is known bit for bit, and the checks that all tests of faults end with."""

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.feeds import replay
from support.helpers import State, changed, state, write_sharded

from deltasync import blocks
from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.feed.plan import plan
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Capabilities, Data, Store
from deltasync.trainer.checkpoint import publish as publish_checkpoint
from deltasync.upkeep.verify import Verification, verify

_folder = tempfile.TemporaryDirectory(prefix="deltasync-checkpoints-")


class UnfencedStore(MemoryStore):
    """A store that has no create-if-absent, and says so."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False)

    def create(self, key: str, data: Data) -> bool:
        raise StoreError("this store cannot do that", transient=False, hint="do not ask", key=key)


@cache
def nth(n: int) -> State:
    """The weights number `n`: other bits in about one byte of twenty for each number. Of two types: two blocks."""
    whole = state()
    first = {name: whole[name] for name in ("layer.0.up", "layer.0.bias")}
    return first if n == 0 else changed(first, seed=n)


@cache
def widened(n: int) -> State:
    """The same with one tensor more."""
    return {**nth(n), "layer.1.up": np.full((4, 3), n, np.float32)}


@cache
def checkpoint(n: int, make: Callable[[int], State] = nth) -> Path:
    """A folder with those weights."""
    path = Path(_folder.name) / f"{make.__name__}-{n}"
    write_sharded(path, make(n))
    return path


def publish(store: Store, n: int, make: Callable[[int], State] = nth, **options: Any) -> Manifest:
    """Weights number `n` as the next version; `base=True` names them instead."""
    if options.pop("base", False):
        options["base"] = BaseRef(str(checkpoint(n, make)))
    return publish_checkpoint(store, checkpoint(n, make), step=n, **options)


def copy_of(store: Store, kind: type[MemoryStore] = MemoryStore) -> MemoryStore:
    """The same objects in a store of their own."""
    copy = kind()
    for item in store.list():
        copy.put(item.key, store.get(item.key))
    return copy


def objects(store: Store, *prefixes: str) -> dict[str, bytes]:
    """What lies under any of the prefixes, by key."""
    return {item.key: store.get(item.key) for prefix in prefixes for item in store.list(prefix)}


def manifests(store: Store) -> dict[str, bytes]:
    """Everything that says what the feed is."""
    return objects(store, keys.VERSIONS, keys.ANCHORS, keys.SKIPS)


def head_of(store: Store) -> int:
    """The newest version; -1 if there is none."""
    found = Log(store).head()
    return -1 if found is None else found.version


def holds(weights: Weights, wanted: State) -> bool:
    """Whether names, types, shapes and all bits are equal."""
    known = Weights.of(wanted)
    pairs = zip(weights.arrays, known.arrays, strict=True)
    return weights.layout == known.layout and all(np.array_equal(a, b) for a, b in pairs)


def require_exact(store: Store, states: Mapping[int, State], versions: Iterable[int] | None = None) -> None:
    """Every version (or each of `versions`) gives exactly the bits that were published."""
    log = Log(store)
    for version in states if versions is None else versions:
        assert holds(load(log, log.read(version)), states[version]), f"version {version} has other bits"


def require_clean(store: Store) -> Verification:
    """`verify --deep` finds nothing."""
    found = verify(store, deep=True)
    assert found.is_clean, (found.damages, found.lost)
    return found


def require_versions(store: Store, states: Mapping[int, State]) -> None:
    """The feed has these versions and no other, all of them whole."""
    found = require_clean(store)
    assert set(found.restorable) == set(states)
    assert head_of(store) == max(states, default=-1)
    assert not found.unchecked


def require_whole(store: Store, states: Mapping[int, State]) -> None:
    """The feed has these versions and no other; all of them are restorable, bit for bit."""
    require_versions(store, states)
    require_exact(store, states)


class Author:
    """Commits changes one by one at the level of the log, where that is quicker than whole checkpoints."""

    def __init__(self, store: Store) -> None:
        self.upload = Upload(store)
        found = self.upload.open()
        assert found is not None, "the feed has no version to go on from"
        self.head = found
        self.weights = load(self.upload.log, found)

    def commit(self, new: State) -> Manifest:
        """The next version, as a delta."""
        weights = Weights.of(new)
        manifest = change(self.upload, self.head, self.weights, self.head.version + 1, weights)
        self.upload.commit(manifest)
        self.head = manifest
        self.weights = Weights(weights.layout, tuple(array.copy() for array in weights.arrays))
        return manifest

    def catch_up(self) -> None:
        """Move on to what others have committed."""
        log = self.upload.log
        found = log.head(after=self.head.version)
        if found is not None:
            replay(log, plan(log, found, start=self.head.version), self.weights)
            self.head = found


def change(upload: Upload, parent: Manifest, old: Weights, version: int, new: Weights) -> Manifest:
    """The manifest of a delta, or of a skip, whose payload is put and which is not committed."""
    found = blocks.encode_delta(old, new)
    digest = sum((block.digest for block in found), parent.digest)
    header = PayloadHeader("delta", new.layout, parent.digest, digest, version)
    return replace(
        parent,
        kind="delta" if version == parent.version + 1 else "skip",
        version=version,
        parent=parent.version,
        parent_digest=parent.digest,
        digest=digest,
        step=version,
        changed=sum(block.changed for block in found),
        payloads=(upload.put(write_payload(header, found)),) if found else (),
        base=None,
        writer=upload.id,
    )


def add_skip(store: Store, start: int, end: int, states: Mapping[int, State]) -> Manifest:
    """Commit the skip from `start` to `end`."""
    upload = Upload(store)
    old, new = Weights.of(states[start]), Weights.of(states[end])
    manifest = change(upload, upload.log.read(start), old, end, new)
    assert manifest.digest == upload.log.read(end).digest
    upload.commit(manifest)
    return manifest
