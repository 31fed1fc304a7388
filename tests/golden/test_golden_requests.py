"""The requests that each operation makes, in order. A request costs money, and a round trip to another continent.

Requests that are made at the same time come in any order. So those in a row that have one verb and one folder are
sorted, and those in a row that read or list manifests, too. Payloads are named after the manifests that name them.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from golden import check, fixed_state, fixed_tensors, options
from support import LONG_S
from support.feeds import NoFenceStore
from support.helpers import write_sharded

import deltasync
from deltasync import FolderTarget, Follower, Retention, Store
from deltasync import store as stores
from deltasync.cli import main as cli
from deltasync.format import keys
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import WrapperStore
from deltasync.store.protocol import Data, ObjectInfo
from deltasync.torch import ModuleTarget, Publisher


def kind_of(verb: str, key: str) -> str:
    """Requests of one kind in a row may have been made at the same time."""
    folder, _, _ = key.partition("/")
    reads_manifests = verb in ("get", "list") and folder in ("versions", "anchors", "skips")
    return "read manifests" if reads_manifests else f"{verb} {folder}"


class RecordingStore(WrapperStore):
    """Any store. `lines` has what was asked for since they were last taken."""

    def __init__(self, store: Store, name: str = "") -> None:
        super().__init__(store)
        self._name = name
        self._lock = threading.Lock()
        self._calls: list[tuple[str, str, str]] = []
        self._payloads: dict[str, str] = {}

    def put(self, key: str, data: Data) -> None:
        self._note("put", key)
        super().put(key, data)

    def create(self, key: str, data: Data) -> bool:
        self._note("create", key)
        return super().create(key, data)

    def get(self, key: str) -> bytes:
        self._note("get", key)
        return super().get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self._note("get", key, f" [{offset}:+{length}]")
        return super().get_range(key, offset, length)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        self._note("list", prefix, "" if after is None else f" after {after}")
        return super().list(prefix, after=after)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        super().delete(key)

    def _note(self, verb: str, key: str, more: str = "") -> None:
        with self._lock:
            self._calls.append((verb, key, more))

    def lines(self) -> "Sequence[str]":
        calls, self._calls = self._calls, []
        self._name_payloads()
        named = [(verb, self._named(key), more) for verb, key, more in calls]
        groups = groupby(named, lambda call: kind_of(*call[:2]))
        return [f"{self._name}{verb} {key}{more}" for _, group in groups for verb, key, more in sorted(group)]

    def _named(self, key: str) -> str:
        if key.startswith(keys.PROBES):
            return f"{keys.PROBES}…"
        return key.replace("0000000000000000", "…") if key not in self._payloads else self._payloads[key]

    def _name_payloads(self) -> None:
        """Payloads are named after the manifests that name them."""
        for prefix in (keys.VERSIONS, keys.ANCHORS, keys.SKIPS):
            for item in self._store.list(prefix):
                named = json.loads(self._store.get(item.key))
                of = f"{named['kind']} {named['version']}" + (
                    f" from {named['parent']}" if prefix == keys.SKIPS else ""
                )
                refs = [*enumerate(named["payloads"]), *([("files", named["files"])] if named["files"] else [])]
                for number, ref in refs:
                    self._payloads.setdefault(keys.payload_key(ref["sha256"]), f"payloads/({of}, {number})")


Act = Callable[[], object]


class Book:
    """What was asked of some stores, operation by operation."""

    def __init__(self, *stores: RecordingStore) -> None:
        self.stores = stores
        self._pages: list[str] = []

    def note(self, title: str, act: Act) -> None:
        for store in self.stores:
            store.lines()
        act()
        lines = [line for store in self.stores for line in store.lines()]
        self._pages.append("\n".join([f"# {title}", *lines, ""]))

    def check(self, name: str) -> None:
        check(name, "\n".join(self._pages))


def publish(publisher: Publisher, step: int, **given: Any) -> Act:
    return lambda: publisher.publish(fixed_tensors(step), step=step, **given).wait(LONG_S)


def trained(store: Store, versions: int, **given: Any) -> Store:
    with Publisher(store, options=options(**given)) as publisher:
        for step in range(versions):
            publish(publisher, step)()
    return store


def test_a_publisher(tmp_path: Path) -> None:
    store = RecordingStore(MemoryStore())
    book = Book(store)
    with Publisher(store, options=options()) as publisher:
        book.note("the first version", publish(publisher, 0))
        book.note("a delta", publish(publisher, 1))
        book.note("a delta without a change", publish(publisher, 1))
        book.note(
            "a delta and an anchor, then close", lambda: (publish(publisher, 2, anchor=True)(), publisher.close())
        )
    with Publisher(store, options=options()) as publisher:
        book.note("a delta after a restart", publish(publisher, 3))
        book.note("close", publisher.close)
    with Publisher(store, options=options(must_exist=True, files={}, shadow_path=tmp_path / "shadow")) as publisher:
        book.note("a delta after a restart, with a file for the shadow that is not there yet", publish(publisher, 4))
    with Publisher(store, options=options(shadow_path=tmp_path / "shadow")) as publisher:
        book.note("a delta after a restart, with a file that has the shadow", publish(publisher, 5))
    for i in range(2):
        write_sharded(tmp_path / str(i), fixed_state(6 + i))
    book.note("a checkpoint", lambda: deltasync.publish(store, tmp_path / "0", step=6))
    parent, new = tmp_path / "0", tmp_path / "1"
    book.note(
        "a checkpoint, with its parent at hand", lambda: deltasync.publish(store, new, parent=parent, anchor=True)
    )
    unfenced = RecordingStore(NoFenceStore())
    book.stores = (unfenced,)
    with Publisher(unfenced, options=options()) as publisher:
        book.note("the first version, in a store that cannot fence", publish(publisher, 0))
        book.note("a delta, in a store that cannot fence", publish(publisher, 1))
        book.note("close, in a store that cannot fence", publisher.close)
    book.check("requests_publisher.txt")


def test_a_follower(tmp_path: Path) -> None:
    store = RecordingStore(trained(MemoryStore(), 3))
    book = Book(store)
    with Follower(store, ModuleTarget(fixed_tensors()), replica="r", beat_s=3600, scrub_s=None) as replica:
        book.note("the first advance", replica.advance)
        book.note("nothing new", replica.advance)
        trained_on(store, [3])
        book.note("one version", replica.advance)
        book.note("back to a version", lambda: replica.advance(to=1))
        book.note("forth to a version", lambda: replica.advance(to=3))
        book.note("pin a version", lambda: replica.pin(2))
        book.note("to the pinned version", replica.advance)
        replica.pin(None)
        trained_on(store, range(4, 44))
        deltasync.compact(store, levels=(4, 16))
        book.note("42 versions, over skips", replica.advance)
        book.note("scrub", replica.scrub)
        book.note("close", replica.close)
    for title, goal in (("the first advance of a folder with a mirror in a file", 42), ("after a restart", 43)):
        target = FolderTarget(tmp_path / "live")
        with Follower(store, target, replica="r", mirror=tmp_path / "mirror", beat_s=3600, scrub_s=None) as replica:
            book.note(title, lambda replica=replica, goal=goal: replica.advance(to=goal))
        target.close()
    book.check("requests_follower.txt")


def trained_on(store: RecordingStore, steps: Iterable[int]) -> None:
    with Publisher(store, options=options()) as publisher:
        for step in steps:
            publish(publisher, step)()


COMMANDS = ("log feed", "show feed", "show feed best --timeline", "status feed", "watch feed --once", "pins feed")


def test_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = RecordingStore(trained(MemoryStore(), 4))
    trained_on(store, range(4, 9))
    deltasync.compact(store, levels=(4,))
    with Publisher(store, options=options()) as publisher:
        publish(publisher, 9, anchor=True)()
    monkeypatch.setattr(stores, "open_store", lambda url: store)
    book = Book(store)
    book.note("restore the newest version", lambda: deltasync.restore(store, tmp_path / "newest"))
    book.note("restore an older version", lambda: deltasync.restore(store, tmp_path / "older", version=7, files=False))
    book.note("verify", lambda: deltasync.verify(store))
    book.note("verify --deep", lambda: deltasync.verify(store, deep=True))
    book.note("pin", lambda: deltasync.pin(store, 5, name="best"))
    book.note("pin again, with a note", lambda: deltasync.pin(store, 5, name="best", note="why"))
    with Follower(store, ModuleTarget(fixed_tensors()), replica="r", beat_s=3600, scrub_s=None) as replica:
        replica.advance(to=6)
        for command in (
            "log feed",
            "show feed",
            "show feed best --timeline",
            "status feed",
            "watch feed --once",
            "pins feed",
        ):
            book.note(command, lambda command=command: cli.main(command.split()))
        book.note("report", lambda: cli.main(["report", "feed", "-o", str(tmp_path / "report.html")]))
    book.note("unpin", lambda: deltasync.unpin(store, "best"))
    capsys.readouterr()
    book.check("requests_readers.txt")


def test_upkeep() -> None:
    store, copy = RecordingStore(trained(MemoryStore(), 9)), RecordingStore(MemoryStore(), "copy: ")
    book = Book(store, copy)
    book.note("compact", lambda: deltasync.compact(store, levels=(4, 8)))
    book.note("compact again", lambda: deltasync.compact(store, levels=(4, 8)))
    book.note("relay to an empty place", lambda: deltasync.relay(store, copy))
    trained_on(store, [9])
    book.note("relay one version", lambda: deltasync.relay(store, copy))
    book.note("relay nothing", lambda: deltasync.relay(store, copy))
    with Publisher(store, options=options()) as publisher:
        publish(publisher, 10, anchor=True)()
    book.note(
        "relay an anchor, skips and heartbeats", lambda: deltasync.relay(store, copy, skips=True, heartbeats=True)
    )
    deltasync.pin(store, 2)
    retention, plans = Retention(anchors=1, versions=1), []
    book.note("plan a prune", lambda: plans.append(deltasync.plan_prune(store, retention)))
    book.note("prune", lambda: deltasync.prune(store, plans[0]))
    book.note("plan a prune when there is nothing to delete", lambda: deltasync.plan_prune(store, retention))
    book.check("requests_upkeep.txt")
