"""What deltasync adds to a step of TRL: the TRL example, with a transfer that is switched off and on again as it runs.

    python -m benchmarks.trl [--quick]

Needs vLLM in an environment of its own; `make bench-trl` sets it up. Off, weights go nowhere: no sync, no upload, no
fetch, no switch on the server. Both kinds of steps come from one run, in turns, so that a slow spell hits both alike.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Row, say
from benchmarks.sections import Section, at_most, run_sections
from deltasync import open_store, publish
from tests.support.processes import stop
from tests.support.servers import free_port
from tests.support.vllm import PYTHON, ROOT

EXAMPLE = ROOT / "examples" / "trl_wordle"
SETTLE = 2
"""Steps after each turn that do not count: what was begun before is still under way."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many turns of each kind, and how many steps in a turn."""

    turns: int
    steps: int


class Switched:
    """A transfer that is in use in every second turn of syncs, and does nothing in the others."""

    def __init__(self, transfer: Any, *, steps: int) -> None:
        self._transfer = transfer
        self._steps = steps
        self._syncs = -1

    def is_on(self, step: int) -> bool:
        """Whether the sync after a step is a real one. The one before the first step is: the server needs it."""
        return step == 0 or (step - 1) // self._steps % 2 == 1

    def counts(self, step: int) -> bool:
        """Whether a step is far enough from the last turn."""
        return (step - 1) % self._steps >= SETTLE

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        self._syncs += 1
        if self.is_on(self._syncs):
            self._transfer.send_weights(iterator)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transfer, name)


def main() -> None:
    """Run from the command line."""
    run_sections(
        "trl", __doc__ or "", {"steps": steps_section}, full=Plan(turns=6, steps=14), quick=Plan(turns=1, steps=5)
    )


def steps_section(plan: Plan) -> Section:
    """Seconds of a step by kind."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        logged, switched = run(plan, Path(folder))
    by_kind: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for entry in logged:
        step = int(entry["step"])
        if switched.counts(step) and "perf/step_s" in entry:
            by_kind[switched.is_on(step)].append(entry)
    rows: list[Row] = [
        {
            "transfer": "deltasync" if is_on else "does nothing",
            "steps": len(entries),
            "median s": statistics.median(entry["perf/step_s"] for entry in entries),
            "mean s": statistics.fmean(entry["perf/step_s"] for entry in entries),
            "held by the sync ms": 1000 * statistics.median(entry["perf/weight_sync_s"] for entry in entries),
            "waiting for samples s": statistics.median(entry["perf/rollout_wait_s"] for entry in entries),
        }
        for is_on, entries in by_kind.items()
    ]
    off, on = (float(row["median s"] or 0) for row in rows)
    title = f"a step of TRL's AsyncGRPOTrainer (load of the machine before: {load_before:.1f})"
    return Section({title: rows}, [at_most("step with deltasync / with nothing, medians", on / off, 1.10)])


def run(plan: Plan, folder: Path) -> tuple[list[dict[str, float]], Switched]:
    """Train with the server and the environment of the example; what TRL logged."""
    sys.path.insert(0, str(EXAMPLE))
    from checks import wait_for_server
    from environment import GUESSES
    from make_model import make_model
    from training import new_trainer

    from deltasync.trl import DeltasyncTransfer

    say("making the model")
    os.chdir(folder)
    make_model(Path("wordle-policy"))
    feed, ports = str(folder / "feed"), [free_port(), free_port()]
    publish(open_store(feed), "wordle-policy")
    options = argparse.Namespace(
        feed=feed,
        server=f"http://127.0.0.1:{ports[0]}",
        environment=f"http://127.0.0.1:{ports[1]}",
        model="wordle-policy",
        steps=2 * plan.turns * plan.steps,
        lr=1e-4,
        max_lag=2,
        out=folder / "run",
    )
    server = [PYTHON, EXAMPLE / "server.py", "--feed", feed, "--port", str(ports[0])]
    game = [sys.executable, EXAMPLE / "environment.py", "--port", str(ports[1])]
    with started(server, folder / "server"), started(game, folder / "environment"):
        transfer = DeltasyncTransfer(feed, max_lag=options.max_lag, timeout_s=300, dtype=torch.bfloat16)
        switched = Switched(transfer, steps=plan.steps)
        trainer = new_trainer(options, switched, guesses=GUESSES)
        say("waiting for the server")
        wait_for_server(options.server, options.model, wait_s=300)
        say(f"training {options.steps} steps")
        trainer.train()
    return [entry for entry in trainer.state.log_history if "perf/rollout_wait_s" in entry], switched


@contextmanager
def started(command: list[Any], folder: Path) -> Iterator[None]:
    """A program of the example in a folder of its own, gone afterwards with all that it started."""
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(word) for word in command], cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        stop(process)


if __name__ == "__main__":
    main()
