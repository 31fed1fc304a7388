"""Reinforcement learning on Wordle: `make demo`, or `python -m wordle` in this folder's parent."""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from deltasync.cli.common import add_json, plain, positive, print_fields, print_json, whole_number
from deltasync.cli.main import guarded
from deltasync.errors import CorruptError
from wordle.report import report_html
from wordle.run import prepare
from wordle.run import run as run_demo
from wordle.screen import Silent, best_screen
from wordle.settings import DEFAULT_LR, DEFAULT_REPLICAS, DEFAULT_STEPS, Settings
from wordle.summary import facts, to_json


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; the exit code."""
    parser = argparse.ArgumentParser(
        prog="wordle",
        description="Asynchronous GRPO on Wordle: a trainer and replicas that share nothing but a store.",
    )
    parser.add_argument("--store", metavar="URL", help="where the feed goes (default: a folder below --out)")
    parser.add_argument("--out", metavar="DIR", help="a new folder for all else (default: deltasync-demo/TIME)")
    parser.add_argument("--replicas", type=positive, default=DEFAULT_REPLICAS, metavar="N", help="default: %(default)s")
    parser.add_argument("--steps", type=positive, default=DEFAULT_STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--model", metavar="DIR", help="a checkpoint to start from (default: a new, small model)")
    parser.add_argument("--lr", type=_rate, default=DEFAULT_LR, metavar="F", help="of GRPO (default: %(default)s)")
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="default: %(default)s")
    add_json(parser)
    return guarded(run, parser.parse_args(argv))


def run(args: argparse.Namespace) -> None:
    """Run the demo, print what it came to, write report.html."""
    out = Path(time.strftime("deltasync-demo/%Y%m%d-%H%M%S") if args.out is None else args.out)
    settings = Settings(
        store=str(out.resolve() / "feed") if args.store is None else args.store,
        out=str(out.resolve()),
        replicas=args.replicas,
        steps=args.steps,
        model=args.model,
        lr=args.lr,
        seed=args.seed,
    )
    # Whoever ends us politely means the processes, too.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(settings)
        with Silent() if args.json else best_screen() as screen:
            outcome = run_demo(settings, screen.show)
    finally:
        signal.signal(signal.SIGTERM, before)
    report = out / "report.html"
    report.write_text(report_html(outcome), encoding="utf-8")
    if args.json:
        print_json(to_json(outcome))
    else:
        print_fields((name, plain(text)) for name, text in (*facts(outcome), ("report", str(report))))
    if not outcome.verification.is_clean:
        raise CorruptError(f"the feed in {settings.store} is damaged", hint=f"deltasync verify {settings.store} --deep")


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a learning rate between 0 and 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
