"""Sharded trainers in processes of their own: the versions of an unsharded one, and no rank waits for a dead one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S, processes
from support.servers import free_port
from transformers import AutoModelForCausalLM

from deltasync.checkpoint import open_checkpoint
from deltasync.feed.log import Log
from deltasync.store.local import LocalStore
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify

pytestmark = pytest.mark.e2e

HERE = Path(__file__).parent
RUN_S = 2 * LONG_S
"""More than any run takes: a process that is still there hangs."""


def environment(**more: str) -> dict[str, str]:
    # Two cores for four processes: without this each of them starts threads for both.
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def torchrun(script: str, ranks: int, **options: Any) -> None:
    """Run a script of this folder on some ranks until it ends."""
    launch = {"nproc-per-node": ranks, "standalone": None}
    done = processes.run(
        [sys.executable, "-m", "torch.distributed.run", *flags(launch), HERE / script, *flags(options)],
        env=environment(PYTHONPATH=str(HERE.parent)),
        stderr=subprocess.STDOUT,
        timeout_s=RUN_S,
    )
    assert done.returncode == 0, done.stdout


def train(feeds: Path, *, ranks: int, **options: Any) -> None:
    """Run the trainer."""
    torchrun("sharded_trainer.py", ranks, feed=feeds / "sharded", reference=feeds / "reference", **options)


def flags(options: dict[str, Any]) -> list[str]:
    named = {name.replace("_", "-"): value for name, value in options.items()}
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in named.items()]


def compare(feeds: Path, folder: Path, versions: int) -> tuple[int, int]:
    """Every version of the two feeds, by digest and tensor by tensor; the bytes of all deltas in each."""
    sharded, reference = LocalStore(feeds / "sharded"), LocalStore(feeds / "reference")
    pairs = [(Log(sharded).read(v), Log(reference).read(v)) for v in range(versions)]
    assert Log(sharded).head() == pairs[-1][0]
    for mine, other in pairs:
        assert (mine.digest, mine.changed, mine.step) == (other.digest, other.changed, other.step)
        for store, name in ((sharded, "sharded"), (reference, "reference")):
            restore(store, folder / f"{name}-{mine.version}", version=mine.version)
        here, there = (open_checkpoint(folder / f"{name}-{mine.version}").weights for name in ("sharded", "reference"))
        assert here.layout == there.layout
        assert "head.weight" not in here.layout.ordinals
        for spec, a, b in zip(here.layout.tensors, here.arrays, there.arrays, strict=True):
            assert np.array_equal(a, b), f"{spec} of version {mine.version}"
    found = verify(sharded, deep=True)
    assert (found.damages, found.restorable, found.orphans) == ((), tuple(range(versions)), 0)
    deltas = [(mine.nbytes, other.nbytes) for mine, other in pairs if mine.kind == "delta"]
    return sum(mine for mine, _ in deltas), sum(other for _, other in deltas)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_versions_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    train(tmp_path, ranks=ranks, steps=5, width=1024, rate=1e-6)
    sharded, reference = compare(tmp_path, tmp_path, 5)
    print(f"{ranks} ranks: {sharded} bytes sharded, {reference} not: {sharded / reference:.4f}")
    assert sharded <= 1.03 * reference
    log = Log(LocalStore(tmp_path / "sharded"))
    assert log.anchors() == [1]
    assert len(log.read(3).payloads) == ranks
    assert (tmp_path / "sharded-4" / "config.json").read_bytes() == b"{}"


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    train(tmp_path, ranks=2, steps=3, width=64, rate=1e-3)
    # Back to the weights of the beginning, and two steps behind.
    train(tmp_path, ranks=4, steps=2, width=64, rate=1e-3, first_step=1)
    train(tmp_path, ranks=1, steps=2, width=64, rate=1e-3, first_step=3)
    compare(tmp_path, tmp_path, 7)


def test_the_callback_of_transformers_under_fsdp2(tmp_path: Path) -> None:
    feed, reference = tmp_path / "sharded", tmp_path / "reference"
    torchrun("sharded_callback.py", 2, feed=feed, reference=reference, steps=4)
    compare(tmp_path, tmp_path, 4)
    assert len(Log(LocalStore(feed)).read(2).payloads) == 2
    # What was restored is a checkpoint, tied head and all.
    assert "Qwen3ForCausalLM" in (tmp_path / "sharded-3" / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded-3")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


# Ranks without torchrun, which would end the others as soon as one is gone.


@dataclass
class Trainer:
    """Some ranks, and what each of them saw."""

    ranks: list["subprocess.Popen[bytes]"]
    out: Path

    def wait(self, ranks: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        """What these ranks saw, once they have ended by themselves and without an error."""
        for rank in ranks:
            assert self.ranks[rank].wait(RUN_S) == 0, (self.out / f"{rank}.log").read_text()
        return {rank: [json.loads(x) for x in (self.out / f"{rank}.jsonl").open()] for rank in ranks}

    def stop(self) -> None:
        for process in self.ranks:
            processes.kill(process)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Starts a trainer of some ranks; whatever is left of it ends with the test."""
    started: list[Trainer] = []

    def run(fault: str, *, size: int = 3, victim: int = 0, timeout_s: float = 60, **more: Any) -> Trainer:
        out = tmp_path / f"run-{len(started)}"
        out.mkdir()
        plain = {"feed": tmp_path / "feed", "out": out, "fault": fault, "victim": victim, "timeout-s": timeout_s}
        script = {**plain, **more}
        port = free_port()
        ranks = []
        for r in range(size):
            with (out / f"{r}.log").open("wb") as log:
                place = {"RANK": str(r), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                command = [sys.executable, HERE / "sharded_faults.py", *flags(script)]
                ranks.append(processes.start(command, env=environment(**place), stdout=log, stderr=log))
        started.append(Trainer(ranks, out))
        return started[-1]

    yield run
    for trainer in started:
        trainer.stop()


@pytest.mark.parametrize(("fault", "victim"), [("kill", 1), ("kill", 0), ("hang", 2), ("hang", 0)])
def test_a_lost_rank_is_an_error_on_the_others(fault: str, victim: int, start: Any, tmp_path: Path) -> None:
    trainer = start(fault, victim=victim, timeout_s=60 if fault == "kill" else 10)
    others = [rank for rank in range(3) if rank != victim]
    for rank, (first, second, third) in trainer.wait(others).items():
        assert first["version"] == 0
        # A rank that communicates with the lost one names it; the others get the error from rank 0, or see it stop.
        named = f"rank {victim}" if fault == "kill" or rank == 0 else "rank "
        assert f"lost contact to {named}" in second["error"], second
        assert third["kind"] == "invalid_input"
        assert "has stopped" in third["error"]
    trainer.stop()
    store = LocalStore(tmp_path / "feed")
    found = verify(store, deep=True)
    assert (found.damages, found.restorable) == ((), (0,))
    if fault == "hang":
        return
    # What was not committed does no harm: other ranks continue.
    for rank, lines in start("none", size=2).wait([0, 1]).items():
        assert [line["version"] for line in lines] == [1, 2, 3], rank
    assert verify(store, deep=True).restorable == (0, 1, 2, 3)


def test_a_failed_put_fails_on_all_ranks_and_the_next_version_has_everything(start: Any, tmp_path: Path) -> None:
    for rank, (first, second, third) in start("refuse", victim=1).wait([0, 1, 2]).items():
        assert (first["version"], second["version"], third["version"]) == (0, None, 1)
        assert second["kind"] == "store"
        assert second["error"].startswith("rank 1: ") == (rank != 1)
    store = LocalStore(tmp_path / "feed")
    restore(store, tmp_path / "head")
    weights = open_checkpoint(tmp_path / "head").weights
    rows = weights.arrays[weights.layout.ordinals["rows"]].view(np.float32)
    assert np.array_equal(rows, np.arange(65 * 40, dtype=np.float32) + 2)
    assert verify(store, deep=True).restorable == (0, 1)


def test_a_commit_without_an_answer_is_detected(start: Any, tmp_path: Path) -> None:
    for first, second, third in start("lose").wait([0, 1, 2]).values():
        # The second one did happen, which all ranks learn before they make the third.
        assert (first["version"], second["kind"], third["version"]) == (0, "store", 2)
    assert verify(LocalStore(tmp_path / "feed"), deep=True).restorable == (0, 1, 2)


def test_shadow_files_stand_in_for_the_feed(start: Any, tmp_path: Path) -> None:
    shadow = tmp_path / "shadow"
    start("none", size=2, shadow=shadow).wait([0, 1])
    kept = tmp_path / "kept"
    (tmp_path / "feed" / "payloads").rename(kept)
    for lines in start("none", size=2, shadow=shadow).wait([0, 1]).values():
        assert [line["version"] for line in lines] == [3, 4, 5]
    # Of another number of ranks the files are of no use: the feed is.
    for path in kept.iterdir():
        path.rename(tmp_path / "feed" / "payloads" / path.name)
    for lines in start("none", size=3, shadow=shadow).wait([0, 1, 2]).values():
        assert [line["version"] for line in lines] == [6, 7, 8]
    assert verify(LocalStore(tmp_path / "feed"), deep=True).restorable == tuple(range(9))
    # Beside each lies the file that its owner locks.
    assert sorted(path.name for path in shadow.glob("*.safetensors")) == [
        f"shadow-{rank:05d}-of-{size:05d}.safetensors" for rank, size in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    ]


@pytest.mark.parametrize(
    ("fault", "victim", "kind", "message"),
    [
        ("tensor", 2, "invalid_input", "tensor 'rows' differs"),
        ("tensor", 0, "invalid_input", "tensor 'rows' differs"),
        ("step", 1, "invalid_input", "rank 1 publishes version 1, step 11"),
        ("fence", 0, "conflict", "was committed by writer"),
    ],
)
def test_an_error_of_one_rank_stops_all(fault: str, victim: int, kind: str, message: str, start: Any) -> None:
    for first, second, third in start(fault, victim=victim).wait([0, 1, 2]).values():
        assert first["version"] == 0
        assert second["kind"] == kind
        assert message in second["error"]
        assert "has stopped" in third["error"]
