"""Checkpoints of a trainer as versions, one by one and as a folder fills."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S
from support.feeds import NoFenceStore, SpyStore, flip, same_weights
from support.helpers import State, changed, safetensors_bytes, same_bits, state, write_sharded
from test_interop_folder import restored

import deltasync
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import ConflictError, CorruptError, InvalidInputError, MismatchError, NotFoundError, StoreError
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Fault, FaultyStore, never
from deltasync.trainer.checkpoint import ABANDONED_S, SETTLE_S, CheckpointWatch
from deltasync.trainer.checkpoint import publish as publish_checkpoint
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify


class Place:
    """A feed, and checkpoint folders `c0`, `c1` … that are published to it one after another."""

    def __init__(self, root: Path, store: SpyStore) -> None:
        self.root = root
        self.store = store
        self.log = Log(store)
        self.states: list[State] = []

    def checkpoint(self, tensors: State) -> Path:
        folder = self.root / f"c{len(self.states)}"
        write_sharded(folder, tensors)
        self.states.append(tensors)
        return folder

    def publish(self, tensors: State | None = None, **options: Any) -> Manifest:
        new = tensors
        if new is None:
            new = changed(self.states[-1], seed=len(self.states)) if self.states else state()
        return publish_checkpoint(self.store, self.checkpoint(new), **options)

    def check(self) -> None:
        """Every version has the bits that were published, and the feed verifies."""
        for version, tensors in enumerate(self.states):
            weights = load(self.log, self.log.read(version))
            assert weights.layout.tensors
            out = self.root / f"restored{version}"
            restore(self.store, out, version=version)
            assert deltasync.digest(out) == deltasync.digest(tensors)
        assert verify(self.store, deep=True).is_clean


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, SpyStore())


def test_the_first_version_is_an_anchor(place: Place) -> None:
    manifest = place.publish(step=120)
    assert (manifest.kind, manifest.version, manifest.parent, manifest.step) == ("anchor", 0, None, 120)
    assert manifest.digest == deltasync.digest(state())
    assert place.log.read(0) == manifest
    assert place.log.feed() is not None
    place.check()


def test_then_deltas(place: Place) -> None:
    first = place.publish()
    second = place.publish(step=7)
    assert (second.kind, second.version, second.parent, second.parent_digest) == ("delta", 1, 0, first.digest)
    assert second.step == 7
    assert second.writer != first.writer
    old, new = (np.concatenate([a.reshape(-1).view(np.uint8) for a in s.values()]) for s in place.states)
    assert second.changed is not None
    assert 0 < second.changed <= (old != new).sum()
    assert second.nbytes < first.nbytes
    place.publish()
    place.check()


def test_a_manifest_carries_extra_metadata(place: Place) -> None:
    assert place.publish(extra={"run": "a"}).extra == {"run": "a"}
    assert place.publish(anchor=True, extra={"run": "b"}).extra == {"run": "b"}
    assert [place.log.read(version).extra for version in (0, 1)] == [{"run": "a"}, {"run": "b"}]
    with pytest.raises(InvalidInputError, match="extra must map strings to strings"):
        place.publish(extra={"run": 1})
    assert place.log.require_head().version == 1


def test_one_file_is_a_checkpoint_too(place: Place) -> None:
    (place.root / "one.safetensors").write_bytes(safetensors_bytes(state()))
    manifest = publish_checkpoint(place.store, place.root / "one.safetensors")
    assert manifest.files is None
    assert manifest.digest == deltasync.digest(state())


def test_unchanged_weights_are_a_delta_without_payload(place: Place) -> None:
    place.publish()
    manifest = place.publish(place.states[-1])
    assert (manifest.kind, manifest.changed, manifest.payloads, manifest.nbytes) == ("delta", 0, (), 0)
    place.publish()
    place.check()


def test_a_late_anchor_comes_on_top_of_the_delta(place: Place) -> None:
    place.publish()
    manifest = place.publish(anchor=True, step=5)
    assert manifest.kind == "delta"
    anchor = place.log.anchor(1)
    assert anchor is not None
    assert (anchor.kind, anchor.parent, anchor.digest, anchor.step) == ("anchor", None, manifest.digest, 5)
    assert anchor.files == manifest.files
    place.store.delete(keys.payload_key(place.log.read(0).payloads[0].sha256))
    assert same_weights(load(place.log, manifest), open_checkpoint(place.root / "c1").weights)


def test_a_second_attempt_at_a_late_anchor_makes_no_other_version(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.publish(step=4)
    create = place.store.create

    def refuse(key: str, data: Any) -> bool:
        if key.startswith(keys.ANCHORS):
            raise StoreError("down", transient=False)
        return create(key, data)

    monkeypatch.setattr(place.store, "create", refuse)
    with pytest.raises(StoreError):
        place.publish(anchor=True, step=5)
    monkeypatch.undo()
    head = place.log.head()
    assert head is not None
    assert (head.version, place.log.anchors()) == (1, [])
    for _ in range(2):
        assert publish_checkpoint(place.store, place.root / "c1", anchor=True, step=5) == head
        assert place.log.anchors() == [1]
    # Another step is another version, also of the same weights.
    assert publish_checkpoint(place.store, place.root / "c1", anchor=True, step=6).version == 2
    assert verify(place.store, deep=True).is_clean


def test_an_anchor_at_the_first_version_is_that_version(place: Place) -> None:
    assert place.publish(anchor=True).kind == "anchor"
    assert place.log.anchors() == []


OTHERS: dict[str, Callable[[State], State]] = {
    "another shape": lambda s: s | {"embed": s["embed"].reshape(32, 64)},
    "another type": lambda s: s | {"counter": np.array(7, np.uint64)},
    "one more": lambda s: s | {"zzz": np.zeros(3, np.float32)},
    "one less": lambda s: {n: a for n, a in s.items() if n != "embed"},
    "another name": lambda s: {("e" if n == "embed" else n): a for n, a in s.items()},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS.keys())
def test_other_tensors(place: Place, other: Callable[[State], State]) -> None:
    """Refused, unless it is said that the model is meant to change: then the chain goes on from an anchor."""
    place.publish()
    head = place.publish()
    new = other(place.states[-1])
    with pytest.raises(MismatchError) as caught:
        place.publish(new)
    assert caught.value.hint is not None
    assert "--anchor" in caught.value.hint
    assert place.log.require_head() == head
    place.states.pop()
    manifest = place.publish(new, anchor=True)
    assert (manifest.kind, manifest.parent, manifest.parent_digest) == ("anchor", 1, head.digest)
    assert place.log.anchors() == []
    place.publish()
    place.check()


@pytest.mark.parametrize("parent", ["right", "wrong", "missing", "another layout"])
def test_a_parent_that_is_given(place: Place, parent: str) -> None:
    place.publish()
    place.publish()
    write_sharded(place.root / "another layout", {"x": np.zeros(3, np.float32)})
    given = {"right": "c1", "wrong": "c0", "missing": "nowhere", "another layout": "another layout"}[parent]
    place.store.took()
    if parent == "right":
        files = place.publish(parent=place.root / given).files
        assert files is not None
        read = {k for verb, k in place.store.took() if verb == "get" and k.startswith(keys.PAYLOADS)}
        assert read == {keys.payload_key(files.sha256)}, "no weights, only the files, to see whether they are whole"
        place.check()
        return
    with pytest.raises(NotFoundError if parent == "missing" else MismatchError) as caught:
        place.publish(parent=place.root / given)
    if parent != "missing":
        assert (caught.value.rule, caught.value.version) == ("publish.parent", 1)
    assert place.log.require_head().version == 1


def test_a_feed_that_must_exist_is_not_created(place: Place) -> None:
    with pytest.raises(NotFoundError, match="there is no version"):
        place.publish(state(), must_exist=True)
    assert list(place.store.list()) == []
    place.publish(state())
    assert place.publish(changed(state()), must_exist=True).version == 1


def test_a_parent_is_not_asked_for_at_the_first_version(place: Place) -> None:
    assert place.publish(parent=place.root / "nowhere").version == 0


# --- bases ------------------------------------------------------------------------------------------------------------


def test_a_base_uploads_no_weights(place: Place) -> None:
    folder = place.root / "c0"
    manifest = place.publish(base=BaseRef(str(folder)))
    assert (manifest.kind, manifest.base, manifest.payloads) == ("base", BaseRef(str(folder)), ())
    assert manifest.digest == deltasync.digest(state())
    stored = [info.key for info in place.store.list(keys.PAYLOADS)]
    assert manifest.files is not None
    assert stored == [keys.payload_key(manifest.files.sha256)], "the files beside the weights, and nothing else"
    place.publish()
    place.check()


def test_only_the_first_version_can_be_a_base(place: Place) -> None:
    place.publish()
    with pytest.raises(InvalidInputError, match="version 0"):
        place.publish(base=BaseRef("org/model"))
    assert place.log.require_head().version == 0


def test_resuming_from_a_base_that_is_not_available(place: Place) -> None:
    place.publish(base=BaseRef(str(place.root / "elsewhere")))
    with pytest.raises(NotFoundError):
        place.publish()
    place.states.pop()
    place.publish(parent=place.root / "c0")
    (place.root / "c0").rename(place.root / "elsewhere")
    place.check()


# --- files beside the weights -----------------------------------------------------------------------------------------


def file_puts(store: SpyStore) -> int:
    """Objects of files among those that were put since the last look."""
    puts = [key for verb, key in store.took() if verb == "put" and key.startswith(keys.PAYLOADS)]
    return sum(b'"kind":"files"' in store.get(key)[:300] for key in puts)


def test_files_are_put_once_and_carried_on(place: Place) -> None:
    first = place.publish()
    assert fetch_files(place.store, first) == {"config.json": b'{"model_type": "test"}'}
    assert file_puts(place.store) == 1
    second = place.publish()
    assert second.files == first.files
    assert file_puts(place.store) == 0


def test_files_that_change(place: Place) -> None:
    first = place.publish()
    folder = place.checkpoint(changed(state()))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("a")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "x").write_text("hidden")
    (folder / "pytorch_model.bin").write_bytes(b"stale")
    (folder / "extra.safetensors").write_bytes(b"stale")
    second = publish_checkpoint(place.store, folder)
    assert second.files != first.files
    assert fetch_files(place.store, second) == {"config.json": b"{}", "tokenizer/vocab.txt": b"a"}
    restore(place.store, place.root / "out")
    names = {p.relative_to(place.root / "out").as_posix() for p in (place.root / "out").rglob("*") if p.is_file()}
    assert names == {"config.json", "tokenizer/vocab.txt", "model.safetensors"}


def test_a_checkpoint_without_files_keeps_those_of_the_head(place: Place) -> None:
    first = place.publish()
    (place.root / "one.safetensors").write_bytes(safetensors_bytes(changed(state())))
    second = publish_checkpoint(place.store, place.root / "one.safetensors")
    assert second.files == first.files is not None


@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_damaged_files_are_repaired(place: Place, damage: str, anchor: bool, caplog: pytest.LogCaptureFixture) -> None:
    first = place.publish()
    assert first.files is not None
    key = keys.payload_key(first.files.sha256)
    if damage == "missing":
        place.store.delete(key)
    else:
        flip(place.store, key)
    # A checkpoint that has no files cannot repair them.
    (place.root / "one.safetensors").write_bytes(safetensors_bytes(state()))
    publish_checkpoint(place.store, place.root / "one.safetensors")
    assert "are damaged or missing, and none were given to repair them" in caplog.text
    assert place.publish(anchor=anchor).files == first.files
    assert fetch_files(place.store, first) == {"config.json": b'{"model_type": "test"}'}
    assert verify(place.store, deep=True).is_clean


# --- what goes wrong --------------------------------------------------------------------------------------------------


class Overtaking(SpyStore):
    """Lets another publisher commit right before a commit."""

    overtake: Callable[[], object] | None = None

    def create(self, key: str, data: Any) -> bool:
        if key.startswith(keys.VERSIONS) and self.overtake is not None:
            other, self.overtake = self.overtake, None
            other()
        return super().create(key, data)


def test_another_writer_was_faster(tmp_path: Path) -> None:
    store = Overtaking()
    place = Place(tmp_path, store)
    place.publish()
    theirs = place.checkpoint(changed(state(), seed=50))
    mine = place.checkpoint(changed(state(), seed=60))
    store.overtake = lambda: publish_checkpoint(store, theirs)
    with pytest.raises(ConflictError) as caught:
        publish_checkpoint(store, mine)
    assert caught.value.key == keys.version_key(1)
    assert Log(store).require_head().digest == deltasync.digest(theirs)
    publish_checkpoint(store, mine)
    place.check()


@pytest.mark.parametrize("what", ["missing", "no weights", "damaged"])
def test_a_checkpoint_that_cannot_be_read_makes_no_feed(place: Place, what: str) -> None:
    folder = place.root / "bad"
    if what != "missing":
        folder.mkdir()
    if what == "damaged":
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(CorruptError if what == "damaged" else NotFoundError):
        publish_checkpoint(place.store, folder)
    assert place.store.took() == []


def test_a_store_without_fence(tmp_path: Path) -> None:
    store = NoFenceStore()
    place = Place(tmp_path, store)
    place.publish()
    place.publish()
    assert list(store.list(keys.LEASE)) == [], "given back"
    place.check()
    with pytest.raises(StoreError):
        place.publish(require_fencing=True)
    assert place.log.require_head().version == 1


def test_a_lease_is_given_back_after_a_failure(tmp_path: Path) -> None:
    store = NoFenceStore()
    place = Place(tmp_path, store)
    place.publish()
    with pytest.raises(MismatchError):
        place.publish({"x": np.zeros(3, np.float32)})
    assert list(store.list(keys.LEASE)) == []


def test_a_lease_is_given_back_if_the_feed_cannot_be_opened(tmp_path: Path) -> None:
    store = NoFenceStore()
    place = Place(tmp_path, store)
    place.publish()
    store.put(keys.version_key(0), b"{")
    with pytest.raises(CorruptError):
        place.publish()
    assert list(store.list(keys.LEASE)) == []


def test_progress(place: Place) -> None:
    place.publish()
    phases: dict[str, tuple[int, int]] = {}

    def record(phase: str, done: int, total: int) -> None:
        phases[phase] = (done, total)

    publish_checkpoint(place.store, place.checkpoint(changed(state())), anchor=True, progress=record)
    assert list(phases) == ["restore", "digest", "encode", "anchor"]
    assert all(done == total for done, total in phases.values())


@pytest.mark.parametrize("trust_code", [False, True])
def test_files_that_can_run_code_are_published_only_on_request(place: Place, trust_code: bool) -> None:
    folder = place.checkpoint(state())
    for name in ("modeling_x.py", "training.pkl", "pytorch_model.bin.index.json", "tokenizer.json"):
        (folder / name).write_bytes(b"x")
    manifest = publish_checkpoint(place.store, folder, trust_code=trust_code)
    found = fetch_files(place.store, manifest, trust_code=True)
    code = {"modeling_x.py", "training.pkl", "pytorch_model.bin.index.json"} if trust_code else set()
    assert found.keys() == {"config.json", "tokenizer.json", *code}


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def advance(watch: CheckpointWatch, clock: Clock) -> int | None:
    """Let everything that is there settle, and return the step of the version that is published."""
    publication = watch.advance()
    if publication is None:
        clock.now_s += SETTLE_S
        publication = watch.advance()
    return None if publication is None else publication.wait(LONG_S).step


def steps(count: int) -> list[State]:
    return [changed(state(), seed=i) for i in range(count)]


def test_folders_are_published_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    found = {number: changed(state(), seed=number) for number in (9, 10, 100)}
    for number, tensors in found.items():
        write_sharded(tmp_path / f"step_{number}", tensors)
    for name in ("step_7.tmp", "step_", "other_8", "step_11x"):
        write_sharded(tmp_path / name, state())
    (tmp_path / "step_12").write_text("a file")
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch:
        assert [advance(watch, clock) for _ in range(4)] == [9, 10, 100, None]
        assert watch.waiting_for is None
    for version, tensors in enumerate(found.values()):
        assert same_bits(restored(store, tmp_path / "out", version), tensors)
    assert (Log(store).read(0).kind, Log(store).read(2).kind) == ("anchor", "delta")
    # Another process continues where this one ended, and the folders that were published may be gone.
    shutil.rmtree(tmp_path / "step_9")
    write_sharded(tmp_path / "step_50", state())
    write_sharded(tmp_path / "step_101", state())
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch:
        assert [advance(watch, clock) for _ in range(2)] == [101, None]
    assert same_bits(restored(store, tmp_path / "out"), state())


@pytest.mark.parametrize("verb", ["get_range", "create"], ids=["at its head", "for writing, with the shadow locked"])
def test_a_feed_that_cannot_be_opened_is_opened_at_the_next_attempt(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed attempt had opened and locked is released."""
    clock, closed = Clock(), []
    store = FaultyStore(MemoryStore(), lambda operation: Fault("refuse") if operation.verb == verb else None)
    monkeypatch.setattr(store, "close", lambda: closed.append(1))
    monkeypatch.setattr("deltasync.store.open_store", lambda url: store)
    write_sharded(tmp_path / "step_1", state())
    options = PublisherOptions(shadow_path=tmp_path / "shadow", retry_s=0.0)
    with CheckpointWatch(f"{tmp_path}/step_*", "memory://feed", clock=clock, options=options) as watch:
        for attempt in range(3):
            with pytest.raises(StoreError, match="refused"):
                watch.advance()
            assert len(closed) == attempt + 1
        store._plan = never
        assert advance(watch, clock) == 1


def test_a_number_may_be_in_the_middle_of_a_path(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    write_sharded(tmp_path / "run_1" / "global_step_20" / "hf7", state())
    with CheckpointWatch(f"{tmp_path}/run_*/global_step_*/hf7", store, clock=clock) as watch:
        assert advance(watch, clock) == 20


def incomplete(path: Path, *, problem: str) -> None:
    """A folder that a trainer is still writing."""
    write_sharded(path, state())
    shards = sorted(path.glob("*.safetensors"))
    if problem == "no index":
        (path / "model.safetensors.index.json").unlink()
        shards[0].unlink()
        shards[1].write_bytes(b"")
    elif problem == "missing shard":
        shards[0].unlink()
    elif problem == "cut shard":
        shards[0].write_bytes(shards[0].read_bytes()[:-1])
    elif problem == "started":
        (path / ".started").touch()
    elif problem == "empty":
        shutil.rmtree(path)
        path.mkdir()


@pytest.mark.parametrize("problem", ["no index", "missing shard", "cut shard", "started", "marker", "empty"])
def test_a_folder_is_published_once_it_is_complete(tmp_path: Path, problem: str) -> None:
    clock, store, path = Clock(), MemoryStore(), tmp_path / "step_1"
    incomplete(path, problem=problem)
    marker = "STABLE" if problem == "marker" else None
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock, marker=marker) as watch:
        for _ in range(3):
            assert advance(watch, clock) is None
            assert str(path) in str(watch.waiting_for)
        assert Log(store).head() is None
        write_sharded(path, state())
        for name in (".finished", "STABLE"):
            (path / name).touch()
        assert watch.advance() is None, "its files have just changed"
        assert advance(watch, clock) == 1
    assert same_bits(restored(store, tmp_path / "out"), state())


def test_files_that_change_are_waited_for(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch:
        for i in range(3):
            write_sharded(tmp_path / "step_1", changed(state(), seed=i))
            (tmp_path / "step_1" / "config.json").write_text(" " * i)
            clock.now_s += SETTLE_S
            assert watch.advance() is None
        clock.now_s += SETTLE_S
        assert watch.advance() is not None


def test_a_folder_that_stays_incomplete_holds_up_later_ones_only_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, store = Clock(), MemoryStore()
    incomplete(tmp_path / "step_1", problem="cut shard")
    write_sharded(tmp_path / "step_2", state())
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch:
        assert advance(watch, clock) is None
        assert "step_1" in str(watch.waiting_for)
        clock.now_s += ABANDONED_S
        assert advance(watch, clock) == 2
        assert "it is left out" in caplog.text


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    write_sharded(tmp_path / "step_1", state())
    write_sharded(tmp_path / "step_2", {"embed": state()["embed"]})
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch:
        assert advance(watch, clock) == 1
        with pytest.raises(MismatchError, match="step_2"):
            watch.advance()
    assert Log(store).require_head().version == 0


def test_a_feed_of_another_origin_needs_a_number(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    for i in (1, 2):
        write_sharded(tmp_path / f"step_{i}", changed(state(), seed=i))
    deltasync.publish(store, tmp_path / "step_1")
    with (
        CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock) as watch,
        pytest.raises(InvalidInputError, match="--after N"),
    ):
        watch.advance()
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock, after=1) as watch:
        assert [advance(watch, clock) for _ in range(2)] == [2, None]


def test_the_feed_is_pruned_as_versions_come(tmp_path: Path) -> None:
    clock, store = Clock(), MemoryStore()
    for i, tensors in enumerate(steps(6)):
        write_sharded(tmp_path / f"step_{i}", tensors)
    retention = deltasync.Retention(anchors=1, versions=2, every_s=0.01)
    options = deltasync.PublisherOptions(anchors=deltasync.AnchorPolicy(versions=1), retention=retention)
    with CheckpointWatch(f"{tmp_path}/step_*", store, clock=clock, options=options) as watch:
        assert [advance(watch, clock) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
        deadline_s = time.monotonic() + LONG_S
        while Log(store).floor() == 0:
            assert time.monotonic() < deadline_s, "nothing is pruned"
            time.sleep(0.01)
    assert len(list(tmp_path.glob("step_*"))) == 6, "what the trainer wrote stays"
    assert same_bits(restored(store, tmp_path / "out"), steps(6)[5])


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        ("run/step", {}, r"must have a \*"),
        ("run/step_*", {"marker": "a/b"}, "name of a file"),
        ("run/step_*", {"settle_s": -1}, "settle_s must be at least 0"),
    ],
)
def test_wrong_options_are_refused(pattern: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        CheckpointWatch(pattern, MemoryStore(), **options)  # type: ignore[arg-type]
