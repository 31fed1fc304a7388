"""kill -9 of a replica at random times: its folder shows one version at a time, and ends at the head."""

import multiprocessing
import os
import random
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from replica import run
from support import LONG_S, repeats
from support.feeds import Feed, same_weights

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError
from deltasync.replica.folder import recorded_version
from deltasync.store.local import LocalStore

KILLS = repeats(10, soak=100)
LONGEST_LIFE_S = 0.4


class Watcher(threading.Thread):
    """Opens the folder all the time, as an engine would: by the link, once."""

    def __init__(self, link: Path, feed: Feed) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.wrong: list[str] = []
        self.end = threading.Event()
        self._link, self._feed = link, feed

    def run(self) -> None:
        while not self.end.wait(0.001):
            folder = self._link.resolve()
            try:
                version, weights = recorded_version(folder), open_checkpoint(folder).weights
            except DeltasyncError:
                if folder.exists() and folder == self._link.resolve():
                    self.wrong.append(f"{folder} cannot be read")
                continue
            if version is None:
                continue
            if not same_weights(weights, self._feed.states[version]):
                self.wrong.append(f"version {version} is not what it says")
            if not self.seen or self.seen[-1] != version:
                self.seen.append(version)


@pytest.mark.e2e
@pytest.mark.soak
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "memory"])
def test_a_replica_is_killed_again_and_again(is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed.of(3, LocalStore(tmp_path / "feed"))
    url = feed.store.url
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["replica"])
    rng = random.Random(5)

    def begin(stop_at: int | None) -> multiprocessing.process.BaseProcess:
        has_begun = context.Event()
        options = {"is_mapped": is_mapped, "stop_at": stop_at, "has_begun": has_begun}
        process = context.Process(target=run, args=(str(tmp_path), url), kwargs=options)
        process.start()
        assert has_begun.wait(LONG_S)
        return process

    watcher = Watcher(tmp_path / "model", feed)
    watcher.start()
    try:
        for life in range(KILLS):
            process, seen, late_s = begin(None), len(watcher.seen), time.monotonic() + LONG_S
            # At any time after its start, or after it has shown a version, however long that takes.
            end_s = time.monotonic() + rng.uniform(0, LONGEST_LIFE_S) if life % 2 else late_s
            while time.monotonic() < end_s:
                if end_s == late_s and len(watcher.seen) > seen:
                    end_s = time.monotonic() + rng.uniform(0, LONGEST_LIFE_S)
                feed.delta()
                if len(feed.states) % 10 == 0:
                    feed.late_anchor(len(feed.states) - 1)
                time.sleep(0.01)
            process.kill()
            process.join(LONG_S)
            assert process.exitcode == -9, f"life {life} ended by itself"
        process = begin(len(feed.states) - 1)
        process.join(LONG_S)
        assert process.exitcode == 0
    finally:
        watcher.end.set()
        watcher.join(LONG_S)
    assert not watcher.wrong
    assert sum(a != b for a, b in pairwise(watcher.seen)) > KILLS // 3, "most lives were too short to show anything"
    assert recorded_version((tmp_path / "model").resolve()) == len(feed.states) - 1
    assert same_weights(open_checkpoint(tmp_path / "model").weights, feed.states[-1])
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith((".model", "model.v")))
    assert len(left) <= 2, "what was left half written is gone"
