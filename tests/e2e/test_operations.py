"""A feed in operation: a trainer with retention, a compactor, a relay, a pruner of the copy, and followers of both.

All are processes that are killed at random and started again. No process may ever fail by itself. Each serves metrics,
and what the dashboard and the alert rules name is in one of them.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import IS_SOAK, LONG_S, processes, repeats
from support.feeds import holds, nth
from support.servers import free_port

from deltasync import Retention, verify
from deltasync.checkpoint import open_checkpoint
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.state import load
from deltasync.store.local import LocalStore
from deltasync.upkeep.prune import plan_prune, prune

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

SECONDS = 600.0 if IS_SOAK else 20.0
KILLS = 6
"""At least so many, however long a program takes to start on a busy machine."""
FOLLOWERS = 6 if IS_SOAK else 4
KEEP = ("--keep-anchors", "2", "--keep-versions", "20", "--yes", "--follow", "--every-s", "1")
DEPLOY = Path(__file__).parents[2] / "deploy"


class Program:
    """A command that is started again after each kill. Its output is kept."""

    def __init__(self, name: str, command: list[str], folder: Path, port: int) -> None:
        self.name = name
        self.port = port
        self.kills = 0
        self._command = command
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return (self._folder / f"{self.name}.log").read_text()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "DELTASYNC_THREADS": "1"}
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = processes.start(
                self._command, cwd=self._folder, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def metrics(self) -> dict[str, float]:
        """Its metrics by name, those of several labels added up; none while it does not listen."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=LONG_S) as response:
                text = response.read().decode()
        except OSError:
            return {}
        found: dict[str, float] = {}
        for name, value in re.findall(r"^(deltasync_[a-z_]+)(?:\{.*\})? (\S+)$", text, re.M):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def is_working(self) -> bool:
        """Whether it listens. It must not have ended by itself."""
        self.require_running()
        return bool(self.metrics())

    def require_running(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} has ended by itself:\n{self.output[-5000:]}"

    def kill(self) -> None:
        self.require_running()
        assert self._process is not None
        processes.kill(self._process)
        self.kills += 1

    def stop(self) -> None:
        """End it as an operator does: it must succeed."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(LONG_S) == 0, f"{self.name} failed at its end:\n{self.output[-5000:]}"

    def discard(self) -> None:
        if self._process is not None:
            processes.kill(self._process)


@contextmanager
def running(programs: list[Program]) -> Iterator[None]:
    try:
        for program in programs:
            program.start()
        yield
    finally:
        for program in programs:
            program.discard()


def programs_in(folder: Path) -> dict[str, Program]:
    cli = [sys.executable, "-m", "deltasync"]
    ports: dict[str, int] = {}
    commands = {
        "trainer": [sys.executable, str(Path(__file__).with_name("operations_trainer.py")), "source", "0.05"],
        "compactor": [*cli, "compact", "source", "--follow"],
        "relay": [*cli, "relay", "source", "copy", "--follow", "--heartbeats"],
        "pruner": [*cli, "prune", "copy", *KEEP],
    }
    for i in range(FOLLOWERS):
        feed = ("source", "copy")[i % 2]
        target = ["--target", f"live-{i}", "--mirror", f"mirror-{i}", "--replica", f"replica-{i}"]
        # One of them with a command, which has metrics of its own.
        hook = ["--exec", "true"] if i == 0 else []
        commands[f"follower-{i}"] = [*cli, "follow", feed, *target, *hook]
    for name, command in commands.items():
        ports[name] = free_port()
        command += [str(ports[name])] if name == "trainer" else ["--listen", f"127.0.0.1:{ports[name]}", "--metrics"]
    return {name: Program(name, command, folder, ports[name]) for name, command in commands.items()}


def named_metrics() -> set[str]:
    """What the alert rules and the dashboard ask Prometheus for."""
    panels = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    texts.append((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return {name for text in texts for name in re.findall(r"deltasync_[a-z_]+", text)}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} takes too long"
        time.sleep(0.1)


def head_of(store: LocalStore) -> int:
    head = Log(store).head()
    return -1 if head is None else head.version


@pytest.mark.long
@pytest.mark.parametrize("seed", range(repeats(1, soak=2)))
def test_everything_at_work_with_random_kills(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    source, copy = LocalStore(tmp_path / "source"), LocalStore(tmp_path / "copy")
    programs = programs_in(tmp_path)
    trainer, relay = programs["trainer"], programs["relay"]
    with running([trainer]):
        wait_until(lambda: head_of(source) >= 3, "the first versions")
        others = [program for program in programs.values() if program is not trainer]
        with running(others):
            wait_until(lambda: head_of(copy) >= 3, "the copy")
            began_s, payloads = time.monotonic(), []
            while time.monotonic() - began_s < SECONDS or len(payloads) < KILLS:
                victim, is_early = rng.choice([*programs.values(), relay, trainer]), rng.random() < 0.25
                # Most are killed at work, however long they take to start on a busy machine; some before that.
                wait_until(lambda: is_early or victim.is_working(), f"the start of {victim.name}")  # noqa: B023
                time.sleep(rng.uniform(0.2, 1.0))
                for program in programs.values():
                    program.require_running()
                victim.kill()
                victim.start()
                payloads.append(sum(1 for _ in source.list(keys.PAYLOADS)))
            # The faults end. Once the trainer goes on it is stopped, and everything must arrive.
            head = head_of(source)
            wait_until(lambda: head_of(source) > head + 20, "the trainer")
            # Looked at twice: a command that was just started has no value for some.
            scraped: dict[str, float] = {}

            def has_all() -> bool:
                for program in programs.values():
                    scraped.update(program.metrics())
                return named_metrics() <= scraped.keys()

            wait_until(has_all, "a scrape with all metrics")
            trainer.stop()
            head = head_of(source)
            wait_until(lambda: head_of(copy) == head, "the rest of the copy")
            live = [tmp_path / f"live-{i}" for i in range(FOLLOWERS)]
            wanted = nth(Log(source).read(head).step or 0)
            for i, folder in enumerate(live):
                wait_until(lambda i=i: f"version {head} is live" in programs[f"follower-{i}"].output, f"follower {i}")
                assert holds(open_checkpoint(folder).weights, wanted)
            for program in others:
                program.require_running()
                program.stop()
    for store in (source, copy):
        log = Log(store)
        # What replicas needed goes as well, once their heartbeats are gone: that of a relay stays until it expires.
        for item in list(store.list(keys.REPLICAS)):
            store.delete(item.key)
        prune(store, plan_prune(store, Retention(anchors=2, versions=20)))
        checked = verify(store, deep=True)
        assert checked.is_clean, (checked.damages, checked.lost)
        assert not checked.unchecked
        assert checked.restorable[-1] == head
        for version in checked.restorable:
            manifest = log.read(version)
            assert holds(load(log, manifest), nth(manifest.step or 0)), f"version {version} of {store.url}"
        kept = head - log.floor() + 1
        stored = sum(1 for _ in store.list(keys.PAYLOADS)) - checked.orphans
        # Versions, an anchor for some, and skips.
        assert stored <= 2 * (kept + 20 + 12)
    assert Log(source).floor() > 0
    assert sum(program.kills for program in programs.values()) >= KILLS
    kills = {program.name: program.kills for program in programs.values()}
    stored = {store.url: sum(item.nbytes for item in store.list(keys.PAYLOADS)) for store in (source, copy)}
    print(
        f"seed {seed}: {head + 1} versions in {SECONDS:.0f} s with {FOLLOWERS} followers; at most {max(payloads)} "
        f"payloads at the source, {len(payloads)} looks; bytes stored at the end {list(stored.values())}; "
        f"{len(named_metrics())} metrics of rules and dashboard scraped; kills {kills}, {sum(kills.values())} in all"
    )
