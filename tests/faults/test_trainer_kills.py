"""Repeated kill -9 of a trainer at random times, with a restart each time."""

import hashlib
import multiprocessing
import os
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from support import LONG_S, repeats
from training import CHECKPOINT_STEPS, Run, hashes, run

from deltasync.feed.log import Log
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.local import LocalStore
from deltasync.upkeep.verify import verify

KILLS = repeats(10, soak=100)
LONGEST_LIFE_S = 1.0
MORE_STEPS = 7


def hash_of(weights: Weights) -> str:
    found = hashlib.sha256()
    for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True):
        found.update(spec.name.encode() + array.tobytes())
    return found.hexdigest()


@pytest.mark.e2e
@pytest.mark.long
@pytest.mark.soak
def test_a_trainer_is_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every version has the weights that an uninterrupted run has at its step, and so has the last one."""
    store = LocalStore(tmp_path / "feed")
    log = Log(store)
    # A server that has imported torch already: each life is a fork of it, and begins at once.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["training"])
    rng = random.Random(4)

    def begin(stop: int, *, is_mapped: bool) -> multiprocessing.process.BaseProcess:
        has_begun = context.Event()
        process = context.Process(target=run, args=(str(tmp_path), store.url, stop, is_mapped, has_begun))
        process.start()
        assert has_begun.wait(LONG_S)
        return process

    begin(1, is_mapped=False).join(LONG_S)
    heads = [log.require_head().version]
    for life in range(KILLS):
        process = begin(1 << 30, is_mapped=life % 3 > 0)
        if life % 2 == 0:
            # At any time after it has published something, however long that takes; the others after their start.
            late_s = time.monotonic() + LONG_S
            while log.require_head().version == heads[-1] and time.monotonic() < late_s:
                time.sleep(0.01)
        time.sleep(rng.uniform(0, LONGEST_LIFE_S))
        process.kill()
        process.join(LONG_S)
        assert process.exitcode == -9, "it ended by itself"
        heads.append(log.require_head().version)
    assert sum(a < b for a, b in pairwise(heads)) > KILLS // 4, "most lives were too short to publish anything"
    # The checkpoint of the trainer may be ahead of the head: steps that were not published yet are coalesced.
    resumed = Run(tmp_path)
    resumed.load()
    last = max(resumed.step, log.require_head().step or 0)
    process = begin(last + MORE_STEPS, is_mapped=True)
    process.join(LONG_S)
    assert process.exitcode == 0

    found = verify(store, deep=True)
    assert found.is_clean, (found.damages, found.lost)
    head = log.require_head()
    assert found.restorable == tuple(range(head.version + 1))
    assert head.step == last + MORE_STEPS
    steps = [manifest.step for manifest in log.read_many(found.restorable)]
    expected = dict(zip(range(1, last + MORE_STEPS + 1), (text for _, text in hashes(tmp_path)), strict=False))
    for version, step in enumerate(steps):
        assert step is not None
        assert hash_of(load(log, log.read(version))) == expected[step], f"version {version}, step {step}"
    assert all(a - CHECKPOINT_STEPS < b for a, b in pairwise(steps)), "a restart goes back by less than a checkpoint"
