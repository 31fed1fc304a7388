"""`deltasync follow URL (--target DIR | --vllm URL)`."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from deltasync.cli.feed import add_base, add_url, feed
from deltasync.cli.options import Commands, add_threads
from deltasync.cli.output import print_json_line
from deltasync.errors import InvalidInputError
from deltasync.following.events import Advance, Observer, Seconds
from deltasync.following.follower import Follower
from deltasync.serve.controller import Controller, Server
from deltasync.serve.folder import FolderTarget
from deltasync.serve.listening import Listener, listening, parse_address
from deltasync.serve.metrics import Exposition

_STOPS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Following:
    """What the command needs of whatever follows."""

    once: Callable[[], Advance | None]
    follow: Callable[[], None]
    stop: Callable[[], None]
    nudge: Callable[[], None]
    status: Callable[[], Mapping[str, Any]]
    metrics: Exposition | None


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("follow", help="keep a folder or a server at the newest version", description=__doc__)
    add_url(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--target", type=Path, metavar="DIR", help="keep a checkpoint folder current under this name")
    what.add_argument("--vllm", metavar="URL", help="lead this server, started with `deltasync serve --push`")
    parser.add_argument("--once", action="store_true", help="go to the newest version, then exit")
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    add_base(parser)
    parser.add_argument("--replica", metavar="ID", help="the name in heartbeats (default: one that nobody else has)")
    parser.add_argument(
        "--listen", type=_address, metavar="HOST:PORT", help="answer POST /nudge and GET /status while following"
    )
    parser.add_argument("--metrics", action="store_true", help="answer GET /metrics there, too, for Prometheus")
    parser.add_argument("--json", action="store_true", help="print each version as one line of JSON")
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a line for every version that gets live, until SIGINT or SIGTERM."""
    _require_sense(args)
    tell = _print_json if args.json else _print
    moves: SimpleQueue[Advance | None] = SimpleQueue()
    with ExitStack() as held:
        following = (_with_folder if args.vllm is None else _with_server)(args, held, moves.put)
        if args.once:
            following.once()
            moves.put(None)
            for moved in _all_or_none(moves, following):
                tell(moved)
            return
        if args.listen is not None:
            listener = Listener(following.nudge, following.status, following.metrics, _token())
            url = held.enter_context(listening(listener, *args.listen))
            print(f"listening on {url}", file=sys.stderr, flush=True)
        _follow(following, moves, tell)


def _follow(following: Following, moves: "SimpleQueue[Advance | None]", tell: Observer) -> None:
    """Follow in a thread and print in this one, so that a signal or a broken pipe meets no lock of the follower."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(following.follow)
        done.add_done_callback(lambda _: moves.put(None))
        try:
            with _stopping(following.stop):
                for moved in iter(moves.get, None):
                    tell(moved)
        finally:
            following.stop()
    done.result()


def _with_folder(args: argparse.Namespace, held: ExitStack, observer: Observer) -> Following:
    target = FolderTarget(args.target)
    held.callback(target.close)
    follower = held.enter_context(
        Follower(
            args.url,
            mirror=args.mirror,
            base=args.base,
            replica=args.replica,
            threads=args.threads,
            observer=observer,
        )
    )
    return Following(
        once=lambda: follower.advance(target),
        follow=lambda: follower.follow(target),
        stop=follower.stop,
        nudge=follower.nudge,
        status=lambda: asdict(follower.status()),
        metrics=Exposition(follower.status) if args.metrics else None,
    )


def _with_server(args: argparse.Namespace, held: ExitStack, observer: Observer) -> Following:
    server = Server(args.vllm, token=_token())
    controller = Controller(held.enter_context(feed(args.url)), server, observer=observer)
    return Following(
        once=controller.advance,
        follow=controller.follow,
        stop=controller.stop,
        nudge=controller.nudge,
        status=controller.status,
        metrics=None,
    )


def _require_sense(args: argparse.Namespace) -> None:
    """InvalidInputError for options that would be without effect."""
    given = {f"--{name}" for name in ("mirror", "base", "replica", "metrics", "threads") if getattr(args, name)}
    if args.vllm is not None and given:
        raise InvalidInputError(f"{', '.join(sorted(given))} with --vllm", hint="these are for the server to have")
    if args.once and args.listen is not None:
        raise InvalidInputError("--listen with --once", hint="leave one of them out")
    if args.metrics and args.listen is None:
        raise InvalidInputError("--metrics without --listen", hint="say where to answer: --listen HOST:PORT")


@contextmanager
def _stopping(stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `stop` during the block. A second one ends the process at once."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in _STOPS:
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {each: signal.signal(each, handle) for each in _STOPS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _all_or_none(moves: "SimpleQueue[Advance | None]", following: Following) -> Iterator[Advance]:
    """The moves that were made; if there were none, one from the live version to itself."""
    found = list(iter(moves.get, None))
    version = following.status()["version"]
    if not found and version is not None:
        found.append(Advance(version, version, (), 0, 0, Seconds()))
    return iter(found)


def _print(moved: Advance) -> None:
    print(moved if moved.from_version != moved.version else f"version {moved.version} is live already", flush=True)


def _print_json(moved: Advance) -> None:
    print_json_line(
        {
            "version": moved.version,
            "from_version": moved.from_version,
            "edges": list(moved.edges),
            "bytes": moved.nbytes,
            "changed": moved.changed,
            "seconds": asdict(moved.seconds),
        }
    )


def _token() -> str | None:
    value = os.environ.get("DELTASYNC_TOKEN", "")
    return value if value else None


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from error
