import shutil
import time
from pathlib import Path

import pytest
from support import LONG_S
from support.helpers import State, changed, same_bits, state, write_sharded
from test_interop_folder import restored

import deltasync
from deltasync.errors import InvalidInputError, MismatchError, StoreError
from deltasync.feed.log import Log
from deltasync.store.memory import MemoryStore
from deltasync.testing.faulty import Fault, FaultyStore, never
from deltasync.trainer.checkpoint import ABANDONED_S, SETTLE_S, CheckpointWatch
from deltasync.trainer.publisher import PublisherOptions


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
