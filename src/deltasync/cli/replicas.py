"""Commands on replicas: follow, status, serve."""

import argparse
import importlib.util
import json
import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, get_args

from deltasync.cli.common import (
    Commands,
    add_base,
    add_json,
    add_threads,
    add_url,
    feed,
    print_json,
    print_json_line,
    print_table,
)
from deltasync.errors import InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.prune import LIVE_S
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Heartbeat
from deltasync.replica.events import Advance, Observer, Seconds
from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower
from deltasync.replica.metrics import Exposition, Listener, listening, parse_address
from deltasync.store import open_store
from deltasync.vllm.plugin import BACKEND
from deltasync.vllm.settings import PauseMode, Settings

_STOPS = (signal.SIGINT, signal.SIGTERM)


def register(commands: Commands) -> None:
    """Add the commands of this module to the parser."""
    for add in (register_follow, register_status, register_serve):
        add(commands)


def register_follow(commands: Commands) -> None:
    """Add `follow` to the parser."""
    parser = commands.add_parser("follow", help="keep a checkpoint folder at the newest version")
    add_url(parser)
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="keep a checkpoint folder current under this name"
    )
    parser.add_argument("--once", action="store_true", help="go to the newest version, then exit")
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    add_base(parser)
    parser.add_argument("--replica", metavar="ID", help="the name in heartbeats (default: a random one)")
    parser.add_argument("--listen", type=_address, metavar="HOST:PORT", help="answer GET /status while following")
    parser.add_argument("--metrics", action="store_true", help="answer GET /metrics there, too, for Prometheus")
    parser.add_argument("--json", action="store_true", help="print each version as one line of JSON")
    add_threads(parser)
    parser.set_defaults(run=run_follow)


def run_follow(args: argparse.Namespace) -> None:
    """Print a line for every version that goes live, until SIGINT or SIGTERM."""
    if args.once and args.listen is not None:
        raise InvalidInputError("--listen has no effect with --once", hint="leave one of them out")
    if args.metrics and args.listen is None:
        raise InvalidInputError("--metrics needs an address", hint="add --listen HOST:PORT")
    show = _print_move_json if args.json else _print_move
    moves: SimpleQueue[Advance | None] = SimpleQueue()
    with ExitStack() as held:
        target = FolderTarget(args.target)
        held.callback(target.close)
        follower = held.enter_context(
            Follower(args.url, target, mirror=args.mirror, base=args.base, replica=args.replica, observer=moves.put)
        )
        if args.once:
            moved = follower.advance()
            version = target.version
            if moved is None and version is not None:
                moved = Advance(version, version, (), 0, 0, Seconds())
            if moved is not None:
                show(moved)
            return
        if args.listen is not None:
            metrics = Exposition(follower.status) if args.metrics else None
            listener = Listener(lambda: asdict(follower.status()), metrics, _token())
            url = held.enter_context(listening(listener, *args.listen))
            print(f"listening on {url}", file=sys.stderr, flush=True)
        _follow(follower, moves, show)


def _follow(follower: Follower, moves: "SimpleQueue[Advance | None]", show: Observer) -> None:
    """Follow in a thread and print in this one, so that a signal or a broken pipe holds no lock of the follower."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(follower.follow)
        done.add_done_callback(lambda _: moves.put(None))
        try:
            with _stopping(follower.stop):
                for moved in iter(moves.get, None):
                    show(moved)
        finally:
            follower.stop()
    done.result()


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


def _print_move(moved: Advance) -> None:
    print(moved if moved.from_version != moved.version else f"version {moved.version} is live already", flush=True)


def _print_move_json(moved: Advance) -> None:
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


_PHASES = tuple(field.name for field in fields(Seconds))


@dataclass(frozen=True, slots=True)
class Replica:
    """What the last heartbeat of a replica says, held against the feed."""

    id: str
    version: int | None
    lag: int | None
    age_s: int
    is_live: bool
    engine: str | None
    is_equal: bool | None
    """Whether its digest is that of the version; None if it tells none, or the feed does not have the version."""
    seconds: dict[str, float]

    @property
    def is_wrong(self) -> bool:
        return self.is_equal is False

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "lag": self.lag,
            "age_s": self.age_s,
            "live": self.is_live,
            "engine": self.engine,
            "digest_equal": self.is_equal,
            "seconds": self.seconds,
        }


def register_status(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("status", help="say what the replicas of a feed serve")
    add_url(parser)
    add_json(parser)
    parser.set_defaults(run=run_status)


def run_status(args: argparse.Namespace) -> None:
    """Print every replica; exit with 3 if a live one does not have the bits of its version."""
    with feed(args.url) as store:
        log = Log(store)
        head = log.require_head()
        floor = log.floor()
        found = replicas(log, head)
    if args.json:
        print_json({"head": head.version, "floor": floor, "replicas": [replica.to_json() for replica in found]})
    else:
        _print_status(head.version, floor, found)
    sys.stdout.flush()
    wrong = [replica for replica in found if replica.is_live and replica.is_wrong]
    if wrong:
        raise MismatchError(
            f"{args.url}: {len(wrong)} replicas do not have the digest of their version, such as {wrong[0].id!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


def replicas(log: Log, head: Manifest, *, clock: Callable[[], float] = time.time) -> list[Replica]:
    """Every replica with a heartbeat: live ones first, the slowest of them first."""
    now_unix_s, beats = clock(), log.heartbeats()
    claimed = {beat.version for beat in beats if beat.version is not None and "digest" in beat.facts}
    digests = {version: _digest(log, version) for version in claimed}
    found = [_replica(beat, head, digests, now_unix_s) for beat in beats]
    return sorted(found, key=lambda r: (not r.is_live, -1 if r.version is None else r.version, r.id))


def _digest(log: Log, version: int) -> str | None:
    try:
        return log.read(version).digest.hex
    except NotFoundError:
        return None


def _replica(beat: Heartbeat, head: Manifest, digests: Mapping[int, str | None], now_unix_s: float) -> Replica:
    message, wanted = beat.facts.get("digest"), None if beat.version is None else digests.get(beat.version)
    age_s = max(0, int(now_unix_s) - beat.unix_s)
    return Replica(
        id=beat.replica,
        version=beat.version,
        lag=None if beat.version is None else max(0, head.version - beat.version),
        age_s=age_s,
        is_live=age_s < LIVE_S,
        engine=beat.facts.get("engine"),
        is_equal=None if message is None or wanted is None else message == wanted,
        seconds={phase: value for phase in _PHASES if (value := _seconds(beat.facts.get(f"{phase}_s"))) is not None},
    )


def _seconds(text: str | None) -> float | None:
    """A number from a heartbeat; None if it is missing, or anything else."""
    try:
        value = float("" if text is None else text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def _print_status(head: int, floor: int, found: Sequence[Replica]) -> None:
    live = sum(replica.is_live for replica in found)
    title = f"version {head} is the newest" + (f", pruned before {floor}" if floor else "")
    title += f"; {live} live replicas, {len(found) - live} silent"
    columns = ("replica", "version", "lag", "age", "state", "digest", "engine", "seconds of the last move")
    alarming = [i for i, replica in enumerate(found) if replica.is_wrong]
    print_table(title, columns, [_row(replica) for replica in found], alarming=alarming)


def _row(r: Replica) -> tuple[str, ...]:
    return (
        r.id,
        _text(r.version),
        _text(r.lag),
        f"{r.age_s} s",
        "live" if r.is_live else "silent",
        "unknown" if r.is_equal is None else "equal" if r.is_equal else "DIFFERENT",
        _text(r.engine),
        ", ".join(f"{phase} {value:.3g}" for phase, value in r.seconds.items()) if r.seconds else "-",
    )


def _text(value: int | str | None) -> str:
    return "-" if value is None else str(value)


_SERVER = "vllm.entrypoints.openai.api_server"
_TRANSFER = "--weight-transfer-config"
_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry points of plugins that vLLM loads unless `VLLM_PLUGINS` is set."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The process to become."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def register_serve(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("serve", help="start a vLLM server that follows a feed", usage=_USAGE)
    parser.add_argument("--feed", required=True, metavar="URL", help="the feed to follow")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="what the control routes ask for (default: DELTASYNC_TOKEN)"
    )
    parser.add_argument("--push", action="store_true", help="move only on POST /deltasync/advance")
    parser.add_argument("--mirror", metavar="FILE", help="keep the mirror in this file, across restarts")
    parser.add_argument("--pause", choices=get_args(PauseMode), help="what becomes of requests at a switch")
    parser.add_argument("--scrub-s", metavar="S", help="compare all weights with the mirror every S seconds or so")
    parser.add_argument("--replica", metavar="ID", help="the name in heartbeats (default: one that nobody else has)")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="what follows -- is for vLLM")
    parser.set_defaults(run=run_serve)


_USAGE = (
    "deltasync serve --feed URL [--token-file FILE] [--push] [--mirror FILE] [--pause keep|abort|wait] [--scrub-s S]\n"
    "                       [--replica ID] -- VLLM-ARGUMENTS"
)


def run_serve(args: argparse.Namespace) -> None:
    """Become the server. Does not return."""
    token = _read_token(args.token_file, os.environ)
    given = {
        "FEED": args.feed,
        "TOKEN": secrets.token_urlsafe() if token is None else token,
        "WAY": "push" if args.push else None,
        "MIRROR": args.mirror,
        "PAUSE": args.pause,
        "SCRUB_S": args.scrub_s,
        "REPLICA": args.replica,
    }
    installed = [plugin.name for group in _GROUPS for plugin in entry_points(group=group)]
    launch = prepare(args.arguments, given, environment=os.environ, plugins=installed)
    open_store(args.feed).close()
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed here", hint="pip install 'deltasync[vllm]'")
    if token is None:
        print(f"the control routes ask for the token {given['TOKEN']}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


def prepare(
    arguments: Sequence[str],
    given: Mapping[str, str | None],
    *,
    environment: Mapping[str, str],
    plugins: Iterable[str],
) -> Launch:
    """The command and environment of a server with these arguments of vLLM, and `given` as `DELTASYNC_*` variables.

    What is not given stays as it is in the environment. `plugins` are the names that vLLM would load by itself.
    InvalidInputError for a value that the server would refuse, or for another backend among the arguments.
    """
    added = {f"DELTASYNC_{name}": value for name, value in given.items() if value is not None}
    # The list of plugins allows these and no others: what was loaded without one must be named from now on.
    allowed = environment["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environment else sorted(plugins)
    names = dict.fromkeys([*(name for name in allowed if name), BACKEND])
    result = {**environment, **added, "VLLM_PLUGINS": ",".join(names)}
    Settings.from_environment(result)
    transfer = () if _has_backend(arguments) else (_TRANSFER, json.dumps({"backend": BACKEND}))
    return Launch((sys.executable, "-m", _SERVER, *arguments, *transfer), result)


def _has_backend(arguments: Sequence[str]) -> bool:
    """Whether our backend is chosen among vLLM's arguments; InvalidInputError if another one is."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            value = arguments[i + 1] if i + 1 < len(arguments) else ""
        option = name.replace("_", "-")
        if option == _TRANSFER:
            found = _backend(value)
        elif option == f"{_TRANSFER}.backend":
            found = value
    if found not in (None, BACKEND):
        raise InvalidInputError(
            f"{_TRANSFER} asks for the backend {found!r:.80}", hint="leave it out: a server has one backend"
        )
    return found is not None


def _backend(value: str) -> str:
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    found = config.get("backend") if isinstance(config, dict) else None
    if not isinstance(found, str):
        raise InvalidInputError(f"{_TRANSFER} is {value!r:.80}, which names no backend", hint="leave it out")
    return found


def _read_token(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token from the file, else from the environment."""
    if path is None:
        value = environment.get("DELTASYNC_TOKEN", "")
        return value if value else None
    text = path.read_text().strip()
    if not text:
        raise InvalidInputError(f"{path} is empty", hint="put a token into it, or leave --token-file out")
    return text
