"""A running engine as target: never resumed while it is torn, whatever fails. Adapters: one folder for each version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from served_model import Tensors, Workers, changed, tensors, weights_of
from support import LONG_S
from support.feeds import Feed
from support.replicas import follower, wait_until

from deltasync.errors import EngineError, MismatchError
from deltasync.replica.follower import Follower
from deltasync.replica.mirror import fill_mirror
from deltasync.replica.target import Damage, Staged
from deltasync.store import open_store
from deltasync.torch.publisher import Publisher
from deltasync.trainer.publisher import PublisherOptions
from deltasync.vllm.routes import Replica as ServedReplica
from deltasync.vllm.target import CONFIG_NAME, WEIGHTS_NAME, AdapterTarget, VllmTarget
from deltasync.vllm.worker import LOADED

WRITES = ("scatter", "copy")
ODD = ["quantized"]
MIRROR = "mirror.safetensors"


class FakeEngine:
    """Real workers. `fails` decides for each operation, by number and name, whether it fails halfway.

    It is never resumed with anything but all of the version of its label.
    """

    name = "fake"

    def __init__(self, states: list[Tensors], *, size: int = 2) -> None:
        self.states = states
        self.workers = Workers(states[0], size=size, odd_names=ODD)
        self.calls: list[str] = []
        self.arguments: list[tuple[Any, ...]] = []
        self.is_paused = False
        self.labelled: int | None = None
        self.fails: Callable[[int, str], bool] = lambda number, name: False
        self._number = 0
        self.target: VllmTarget

    def call(self, method: str, *args: Any) -> list[Any]:
        is_write = method in WRITES or (method == "compare" and args[2])
        assert self.is_paused or not is_write
        assert self.target.version is None or not is_write
        is_failing = self._begin(method, *args)
        if is_failing:
            # One worker has done it, the others have not.
            getattr(self.workers.runtimes[0], method)(*args)
            raise EngineError(f"{method} fails")
        return self.workers.call(method, *args)

    def pause(self) -> None:
        is_failing = self._begin("pause")
        # It may have happened all the same.
        self.is_paused = True
        if is_failing:
            raise EngineError("pause fails")

    def resume(self) -> None:
        if self._begin("resume"):
            raise EngineError("resume fails")
        assert self.labelled is not None
        assert self.workers.hold(self.states[self.labelled])
        self.is_paused = False

    def label(self, version: int) -> None:
        # What an engine was loaded with is labelled before its first request.
        assert self.is_paused or self.labelled is None
        assert self.target.version is None
        if self._begin("label", version):
            raise EngineError("label fails")
        self.labelled = version

    def took(self) -> list[str]:
        """The operations since the last time this was asked."""
        calls, self.calls = self.calls, []
        self.arguments = []
        return calls

    def _begin(self, name: str, *args: Any) -> bool:
        self.calls.append(name)
        self.arguments.append(args)
        self._number += 1
        return self.fails(self._number - 1, name)


def versions(count: int, share: float = 0.05) -> list[Tensors]:
    states = [tensors(0, *ODD)]
    while len(states) < count:
        states.append(changed(states[-1], len(states), share))
    return states


def feed_of(states: list[Tensors]) -> Feed:
    feed = Feed()
    feed.anchor(weights_of(states[0]))
    for state in states[1:]:
        feed.delta(weights_of(state))
    return feed


class Replica:
    """A feed, an engine that was started with its first version, and who brings them together."""

    def __init__(
        self,
        states: list[Tensors],
        folder: Path,
        *,
        size: int = 2,
        feed: Feed | None = None,
    ) -> None:
        self.states = states
        self.feed = feed_of(states) if feed is None else feed
        self.engine = FakeEngine(states, size=size)
        self.target = self.engine.target = VllmTarget(self.engine, folder=folder, mirror=folder / MIRROR)
        self.follower: Follower = follower(self.feed.store, self.target, mirror=folder / MIRROR)

    def advance(self, to: int | None = None) -> None:
        self.follower.advance(to=to)

    def is_live(self, version: int) -> bool:
        is_served = self.target.version == self.engine.labelled == version and not self.engine.is_paused
        return is_served and self.engine.workers.hold(self.states[version])


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(versions(4), tmp_path)


def test_the_order_of_things(replica: Replica) -> None:
    """The first version whole, the next ones by what changed; all that takes long is before the pause."""
    assert (replica.target.version, replica.target.engine) == (None, "fake")
    replica.advance(0)
    assert replica.engine.took() == ["describe", "refresh", "pause", "copy", "label", "resume"]
    assert replica.is_live(0)
    replica.advance(1)
    assert replica.engine.took() == ["prepare", "refresh", "pause", "scatter", "label", "resume"]
    assert replica.is_live(1)
    # Two at once, and back.
    for version in (3, 1, 2):
        replica.advance(version)
        assert replica.is_live(version)
    replica.advance(2)
    assert replica.engine.took()[-6:] == ["prepare", "refresh", "pause", "scatter", "label", "resume"]


def test_a_stage_is_removed_once_its_version_is_live(replica: Replica, tmp_path: Path) -> None:
    replica.advance(0)
    replica.engine.fails = lambda number, name: name == "label"
    for version in (1, 2):
        with pytest.raises(EngineError):
            replica.advance(version)
        # One file for each worker, in place of the one before.
        assert sorted(path.name for path in tmp_path.glob("*stage*")) == ["stage-0.safetensors", "stage-1.safetensors"]
    replica.engine.fails = lambda number, name: False
    replica.advance(1)
    assert replica.is_live(1)
    assert list(tmp_path.glob("*stage*")) == []


def test_a_version_in_which_no_bit_changed_computes_nothing(tmp_path: Path) -> None:
    state = tensors(0, *ODD)
    replica = Replica([state, state], tmp_path)
    replica.advance(0)
    replica.engine.took()
    replica.advance(1)
    assert replica.engine.took() == ["prepare", "pause", "scatter", "label", "resume"]
    assert replica.is_live(1)


def count_operations(states: list[Tensors], folder: Path) -> int:
    replica = Replica(states, folder)
    for version in range(len(states)):
        replica.advance(version)
    return len(replica.engine.calls)


@pytest.mark.parametrize("times", [1, 3])
def test_a_failure_of_any_operation(times: int, tmp_path: Path) -> None:
    """Once, or several times in a row. The engine itself looks at what it is resumed with."""
    states = versions(3)
    (tmp_path / "count").mkdir()
    feed, operations = feed_of(states), count_operations(states, tmp_path / "count")
    assert operations > 15
    for first in range(operations):
        folder = tmp_path / str(first)
        folder.mkdir()
        replica, failed = Replica(states, folder, feed=feed), []

        def fails(number: int, name: str, first: int = first, failed: list[str] = failed) -> bool:
            if first <= number < first + times:
                failed.append(name)
                return True
            return False

        replica.engine.fails = fails
        for version in range(len(states)):
            for _ in range(times + 1):
                try:
                    replica.advance(version)
                    break
                except EngineError:
                    # It is paused, or it serves what it served before.
                    assert replica.target.version is None or replica.is_live(version - 1)
                    if replica.engine.calls[-1] in (*WRITES, "label", "resume"):
                        assert replica.engine.is_paused
                        assert replica.target.version is None
            assert replica.is_live(version), (first, failed)
        assert len(failed) == times


def test_a_failed_write_is_done_again_in_the_same_pause(replica: Replica) -> None:
    replica.advance(0)
    replica.engine.took()
    replica.engine.fails = lambda number, name: name == "scatter" and replica.engine.calls.count("scatter") == 1
    replica.advance(1)
    assert replica.engine.took() == ["prepare", "refresh", "pause", "scatter", "scatter", "label", "resume"]
    assert replica.is_live(1)


def test_a_torn_engine_stays_paused_until_it_is_whole(replica: Replica) -> None:
    replica.advance(0)
    replica.engine.took()
    replica.engine.fails = lambda number, name: name in ("scatter", "copy")
    for _ in range(3):
        with pytest.raises(EngineError, match="fails"):
            replica.advance(1)
        assert replica.engine.is_paused
        assert "resume" not in replica.engine.took()
        assert (replica.target.version, replica.engine.labelled) == (None, 0)
    replica.engine.fails = lambda number, name: False
    # By then there is a newer version.
    replica.advance(3)
    assert replica.engine.took() == ["refresh", "pause", "copy", "label", "resume"]
    assert replica.is_live(3)


def test_an_engine_that_cannot_be_resumed_is_brought_there_again(replica: Replica) -> None:
    replica.advance(0)
    replica.engine.fails = lambda number, name: name == "resume"
    with pytest.raises(EngineError):
        replica.advance(1)
    replica.engine.fails = lambda number, name: False
    replica.advance(1)
    assert replica.is_live(1)


OTHERS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "one is missing": (lambda s: s.pop("norm.weight"), r"nothing for elements of the model's parameter 'norm\.weight'"),
    "part of a fused one is missing": (
        lambda s: s.pop("q.weight"),
        r"elements of the model's parameter 'qkv\.weight'",
    ),
    "one too many": (lambda s: s.update(another=torch.zeros(3)), r"does not take 'another'"),
    "another shape": (lambda s: s.update({"norm.weight": torch.zeros(9)}), r"does not take 'norm\.weight'"),
    "larger": (lambda s: s.update({"o.weight": torch.zeros(9, 12)}), r"does not take 'o\.weight'"),
    "silently cut": (lambda s: s.update({"o.weight": torch.zeros(8, 99)}), r"part of o\.weight: F32\[8, 99\]"),
    "another type": (lambda s: s.update(scale=torch.tensor(3)), r"torch\.bfloat16 in place of scale: I64\[\]"),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS.keys())
def test_another_model_is_refused_before_anything_is_touched(
    change: Callable[[Tensors], object], message: str, tmp_path: Path
) -> None:
    state = tensors(0, *ODD)
    other = dict(state)
    change(other)
    engine = FakeEngine([state])
    target = engine.target = VllmTarget(engine, folder=tmp_path, mirror=tmp_path / MIRROR)
    replica = follower(feed_of([other]).store, target, mirror=tmp_path / MIRROR)
    with pytest.raises(MismatchError, match=message):
        replica.advance()
    assert engine.calls == ["describe"]
    assert target.version is None
    assert engine.workers.hold(state)


def test_a_feed_with_other_tensors_since(replica: Replica) -> None:
    replica.advance(0)
    replica.engine.took()
    replica.feed.anchor(weights_of({**replica.states[0], "z": torch.zeros(3)}))
    with pytest.raises(MismatchError, match="now has other tensors"):
        replica.advance()
    assert replica.engine.took() == []
    assert replica.is_live(0)


def loaded(states: list[Tensors], folder: Path, *versions: int | None, start: int = 1) -> Replica:
    """A replica whose workers say that they have loaded these versions from the mirror, which holds the second one.

    `start` is the version that they have loaded in truth.
    """
    replica = Replica(states, folder)
    replica.engine.workers = Workers(states[start], size=2, odd_names=ODD)
    fill_mirror(replica.feed.store, folder / MIRROR, version=1)
    for model, version in zip(replica.engine.workers.models, versions, strict=True):
        if version is not None:
            setattr(model, LOADED, version)
    replica.target.claim()
    return replica


def test_a_version_that_the_workers_have_loaded_is_proved_and_not_written(tmp_path: Path) -> None:
    replica = loaded(versions(3), tmp_path, 1, 1)
    assert replica.engine.took() == ["loaded_version", "label"]
    assert replica.target.version == replica.engine.labelled == 1
    assert replica.follower.advance(to=1) is None
    assert replica.engine.took() == ["describe", "compare"]
    status = replica.follower.status()
    assert (status.version, status.proved_version, status.counts.moves, status.counts.nbytes) == (1, 1, 0, 0)
    assert replica.target.unseen_elements == 0
    replica.advance()
    assert replica.engine.took() == ["prepare", "refresh", "pause", "scatter", "label", "resume"]
    assert replica.is_live(2)


def test_a_server_that_moves_on_request_proves_what_it_has_loaded(tmp_path: Path) -> None:
    """Then it is ready, and stays at that version."""
    replica = loaded(versions(3), tmp_path, 1, 1)
    served = ServedReplica(replica.follower, replica.target, way="push", has_metrics=False)
    assert not served.is_ready
    served.start()
    wait_until(lambda: served.is_ready)
    served.close()
    assert replica.engine.took() == ["loaded_version", "label", "describe", "compare"]
    assert replica.is_live(1)


def test_a_wrong_claim_is_found_and_written_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    replica = loaded(versions(2), tmp_path, 1, 1, start=0)
    replica.engine.took()
    replica.advance(1)
    assert replica.engine.took() == ["describe", "compare", "refresh", "pause", "copy", "label", "resume"]
    assert "claims version 1 but has other bits" in caplog.text
    assert replica.is_live(1)


@pytest.mark.parametrize("said", [(None, None), (1, None), (0, 1)])
def test_workers_that_do_not_agree_claim_nothing(tmp_path: Path, said: tuple[int | None, int | None]) -> None:
    replica = loaded(versions(2), tmp_path, *said)
    assert replica.engine.took() == ["loaded_version"]
    assert (replica.target.version, replica.engine.labelled) == (None, None)


def test_a_scrub_without_damage_holds_up_nothing(replica: Replica) -> None:
    replica.advance(1)
    replica.engine.took()
    before = replica.target.unseen_elements
    assert replica.follower._delivery.scrub(repair=True, tensors=[0]) == []
    assert 0 < replica.target.unseen_elements < before, "a part was compared"
    assert replica.engine.took() == ["compare"]
    assert replica.follower.status().proved_version is None
    assert replica.follower.scrub() == []
    assert replica.engine.took() == ["compare"]
    assert replica.target.unseen_elements == 0
    assert replica.follower.status().proved_version == 1


def test_what_is_compared_again_is_not_unseen_meanwhile(replica: Replica) -> None:
    """The status is read while a scrub runs in the background."""
    replica.advance(1)
    replica.follower.scrub()
    meanwhile = []

    def fails(number: int, name: str) -> bool:
        meanwhile.append(replica.target.unseen_elements)
        return name == "compare"

    replica.engine.fails = fails
    with pytest.raises(EngineError, match="compare fails"):
        replica.follower.scrub()
    assert meanwhile == [0]
    assert replica.target.unseen_elements == 0


@pytest.mark.parametrize("is_repaired", [False, True])
def test_damage_is_reported_and_repaired_in_a_pause(replica: Replica, is_repaired: bool) -> None:
    replica.advance(1)
    replica.engine.took()
    for model in replica.engine.workers.models:
        model.w13.weight.data.view(torch.int16)[0, 0, :2] ^= 1
    found = replica.follower.scrub(repair=is_repaired)
    assert found == [Damage("experts.0.gate.weight", 4)]
    calls = replica.engine.took()
    assert calls[-3:] == ["pause", "compare", "resume"] if is_repaired else calls == ["compare"]
    assert replica.is_live(1) is is_repaired


@pytest.mark.parametrize("operation", ["pause", "compare", "resume"])
def test_a_repair_that_fails_leaves_the_engine_paused(replica: Replica, operation: str) -> None:
    replica.advance(1)
    replica.engine.workers.models[1].norm.weight.data.view(torch.int16)[3] ^= 1
    replica.engine.fails = lambda number, name: name == operation and replica.engine.is_paused | (name == "pause")
    with pytest.raises(EngineError, match=f"{operation} fails"):
        replica.follower.scrub()
    assert replica.engine.is_paused
    assert replica.target.version is None
    replica.engine.fails = lambda number, name: False
    replica.advance(1)
    assert replica.is_live(1)


def test_a_stage_before_the_layout_was_shown(tmp_path: Path) -> None:
    states = versions(1)
    engine, feed = FakeEngine(states), feed_of(states)
    target = engine.target = VllmTarget(engine, folder=tmp_path, mirror=tmp_path / MIRROR)
    with pytest.raises(EngineError, match="was not shown"):
        target.stage(Staged(feed.log.read(0), (), 0, feed.states[0], tmp_path / "mirror", dict))
    assert engine.calls == []


def test_the_mirror_waits_while_the_workers_compute_from_it(replica: Replica) -> None:
    """What is computed would be of a later version than the rest."""
    replica.advance(0)
    replica.follower._delivery.to(replica.follower._live.read(1), reads_ahead=True)
    assert replica.is_live(1)
    replica.advance()
    assert replica.is_live(3)


CONFIG = json.dumps({"r": 4}).encode()


class Vllm:
    """What it was asked to load: the folder and the weights in it. `refuses` makes it fail."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Path, dict[str, np.ndarray]]] = []
        self.refuses = False

    def load(self, folder: Path) -> None:
        if self.refuses:
            raise EngineError("vLLM did not load the adapter")
        assert (folder / CONFIG_NAME).read_bytes() == CONFIG
        self.loaded.append((folder, load_file(folder / WEIGHTS_NAME)))


def state(version: int, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(version)
    names = [f"layers.{i}.q_proj.lora_{half}.weight" for i in range(2) for half in "AB"]
    return {**{name: torch.randn(4, 6, generator=rng) for name in names}, **others}


def publish(feed: Path, *states: dict[str, torch.Tensor], files: dict[str, bytes] | None = None) -> None:
    options = PublisherOptions(files={CONFIG_NAME: CONFIG} if files is None else files)
    with Publisher(str(feed), options=options) as publisher:
        for tensors in states:
            publisher.publish(tensors).wait(LONG_S)


def new_follower(feed: Path, folder: Path, engine: Vllm) -> tuple[Follower, AdapterTarget]:
    target = AdapterTarget("policy", engine.load, folder=folder / "adapter")
    return follower(open_store(str(feed)), target, mirror=folder / "mirror.safetensors"), target


def test_versions_go_live_one_after_the_other(tmp_path: Path) -> None:
    states, engine = [state(version) for version in range(7)], Vllm()
    publish(tmp_path / "feed", *states)
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    for version in (0, 1, 2, 3, 4, 5, 6, 2):
        replica.advance(to=version)
        assert target.version == version
        _, arrays = engine.loaded[-1]
        assert all(np.array_equal(arrays[name], tensor.numpy()) for name, tensor in states[version].items())
        assert len(arrays) == len(states[version])
    # Each version has a folder of its own, and old ones go away.
    assert len({folder for folder, _ in engine.loaded}) == 7
    assert len(list((tmp_path / "adapter").iterdir())) <= 5
    assert engine.loaded[-1][0].is_dir()


def test_a_version_that_vllm_does_not_load_is_not_live(tmp_path: Path) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", state(0), state(1))
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    replica.advance(to=0)
    engine.refuses = True
    with pytest.raises(EngineError, match="did not load"):
        replica.advance(to=1)
    assert target.version is None
    engine.refuses = False
    replica.advance(to=1)
    assert target.version == 1


REFUSED = {
    "a whole model": (state(0, bias=torch.zeros(3)), None, "is not a tensor of a LoRA adapter"),
    "no configuration": (state(0), {"README.md": b""}, "version 0 has no adapter_config.json"),
}


@pytest.mark.parametrize(("tensors", "files", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_feeds_of_something_else_are_refused(
    tensors: dict[str, torch.Tensor], files: dict[str, bytes] | None, message: str, tmp_path: Path
) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", tensors, files=files)
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    with pytest.raises(MismatchError, match=message):
        replica.advance()
    assert target.version is None
    assert engine.loaded == []


def test_a_damaged_folder_is_found_and_written_again(tmp_path: Path) -> None:
    engine = Vllm()
    publish(tmp_path / "feed", state(0))
    replica, target = new_follower(tmp_path / "feed", tmp_path, engine)
    replica.advance()
    assert replica.scrub() == []
    path = engine.loaded[0][0] / WEIGHTS_NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [damage.elements for damage in replica.scrub()] == [1]
    replica.advance()
    assert target.version == 0
    assert len(engine.loaded) == 2
    assert replica.scrub() == []
