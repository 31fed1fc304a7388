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
    add_command,
    add_json,
    add_threads,
    add_url,
    count_text,
    or_dash,
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
from deltasync.replica.metrics import exposition, listening, parse_address
from deltasync.store import open_store, opened
from deltasync.vllm.plugin import BACKEND
from deltasync.vllm.settings import PauseMode, Settings

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PHASES = tuple(field.name for field in fields(Seconds))

_SERVER = "vllm.entrypoints.openai.api_server"
_TRANSFER = "--weight-transfer-config"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry points of the plugins that vLLM loads unless `VLLM_PLUGINS` is set."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_follow(commands)
    _add_status(commands)
    _add_serve(commands)


def _add_follow(commands: Commands) -> None:
    parser = add_command(commands, "follow", _follow, "Keep a checkpoint folder at the newest version of a feed.")
    add_url(parser)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--once", action="store_true", help="move to the newest version, then exit")
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    add_base(parser)
    parser.add_argument("--replica", metavar="ID", help="the id in heartbeats (default: random)")
    parser.add_argument("--listen", type=_address, metavar="HOST:PORT", help="serve GET /status while following")
    parser.add_argument("--metrics", action="store_true", help="serve GET /metrics there, too, for Prometheus")
    parser.add_argument("--json", action="store_true", help="print each version as one line of JSON")
    add_threads(parser)


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from error


def _follow(args: argparse.Namespace) -> None:
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
            metrics = exposition(follower.status) if args.metrics else None
            url = held.enter_context(listening(follower.status, *args.listen, token=_token(), metrics=metrics))
            print(f"listening on {url}", file=sys.stderr, flush=True)
        _follow_and_print(follower, moves, show)


def _follow_and_print(follower: Follower, moves: "SimpleQueue[Advance | None]", show: Observer) -> None:
    """Follow in a thread and print in this one, where a signal or a broken pipe can hold no lock of the follower."""
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(follower.follow)
        done.add_done_callback(lambda _: moves.put(None))
        try:
            with _calling_on_signal(follower.stop):
                for moved in iter(moves.get, None):
                    show(moved)
        finally:
            follower.stop()
    done.result()


@contextmanager
def _calling_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` on SIGINT or SIGTERM during the block. A second signal ends the process."""

    def handle(number: int, frame: FrameType | None) -> None:
        for each in _STOP_SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        stop()

    before = {each: signal.signal(each, handle) for each in _STOP_SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _print_move(moved: Advance) -> None:
    print(moved if moved.from_version != moved.version else f"version {moved.version} is already live", flush=True)


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
    return os.environ.get("DELTASYNC_TOKEN") or None


def _add_status(commands: Commands) -> None:
    parser = add_command(commands, "status", _status, "List the replicas of a feed and the versions that they serve.")
    add_url(parser)
    add_json(parser)


def _status(args: argparse.Namespace) -> None:
    with opened(args.url) as store:
        log = Log(store)
        head = log.require_head()
        floor = log.floor()
        states = replica_states(log, head)
    if args.json:
        print_json({"head": head.version, "floor": floor, "replicas": [state.to_json() for state in states]})
    else:
        live = sum(state.is_live for state in states)
        title = f"version {head.version} is the newest" + (f", pruned before {floor}" if floor else "")
        title += f"; {count_text(live, 'live replica')}, {len(states) - live} silent"
        columns = ("replica", "version", "lag", "age", "state", "digest", "engine", "seconds of the last move")
        alarming = [i for i, state in enumerate(states) if state.has_digest is False]
        print_table(title, columns, [state.row() for state in states], alarming=alarming)
    sys.stdout.flush()
    wrong = [state.id for state in states if state.is_live and state.has_digest is False]
    if wrong:
        raise MismatchError(
            f"{args.url}: {count_text(len(wrong), 'replica')} with another digest than that of the version served, "
            f"such as {wrong[0]!r:.140}",
            hint="scrub or restart them; `deltasync verify` checks the feed itself",
        )


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """The last heartbeat of a replica, compared with the feed."""

    id: str
    version: int | None
    lag: int | None
    age_s: int
    is_live: bool
    engine: str | None
    has_digest: bool | None
    """Whether it has the digest of its version; None if it reports none, or the feed does not have the version."""
    seconds: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "version": self.version,
            "lag": self.lag,
            "age_s": self.age_s,
            "live": self.is_live,
            "engine": self.engine,
            "digest_equal": self.has_digest,
            "seconds": self.seconds,
        }

    def row(self) -> tuple[str, ...]:
        return (
            self.id,
            or_dash(self.version),
            or_dash(self.lag),
            f"{self.age_s} s",
            "live" if self.is_live else "silent",
            "unknown" if self.has_digest is None else "equal" if self.has_digest else "DIFFERENT",
            or_dash(self.engine),
            ", ".join(f"{phase} {value:.3g}" for phase, value in self.seconds.items()) or "-",
        )


def replica_states(log: Log, head: Manifest, *, clock: Callable[[], float] = time.time) -> list[ReplicaState]:
    """Every replica with a heartbeat: the live ones first, those on the oldest version first."""
    now_unix_s, beats = clock(), log.heartbeats()
    reported = {beat.version for beat in beats if beat.version is not None and "digest" in beat.facts}
    digests = {version: _digest(log, version) for version in reported}
    states = [_state(beat, head, digests, now_unix_s) for beat in beats]
    return sorted(states, key=lambda s: (not s.is_live, -1 if s.version is None else s.version, s.id))


def _digest(log: Log, version: int) -> str | None:
    try:
        return log.read(version).digest.hex
    except NotFoundError:
        return None


def _state(beat: Heartbeat, head: Manifest, digests: Mapping[int, str | None], now_unix_s: float) -> ReplicaState:
    reported, expected = beat.facts.get("digest"), None if beat.version is None else digests.get(beat.version)
    age_s = max(0, int(now_unix_s) - beat.unix_s)
    return ReplicaState(
        id=beat.replica,
        version=beat.version,
        lag=None if beat.version is None else max(0, head.version - beat.version),
        age_s=age_s,
        is_live=age_s < LIVE_S,
        engine=beat.facts.get("engine"),
        has_digest=None if reported is None or expected is None else reported == expected,
        seconds={phase: value for phase in _PHASES if (value := _seconds(beat.facts.get(f"{phase}_s"))) is not None},
    )


def _seconds(text: str | None) -> float | None:
    """A number of seconds from a heartbeat; None if it is missing or not valid."""
    try:
        value = float("" if text is None else text)
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None


def _add_serve(commands: Commands) -> None:
    parser = add_command(commands, "serve", _serve, "Start a vLLM server that follows a feed.")
    parser.usage = (
        "deltasync serve --feed URL [--token-file FILE] [--push] [--mirror FILE] [--pause keep|abort|wait]\n"
        "                       [--scrub-s S] [--replica ID] -- VLLM-ARGUMENTS"
    )
    parser.add_argument("--feed", required=True, metavar="URL", help="the feed to follow")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that the control routes require (default: DELTASYNC_TOKEN)",
    )
    parser.add_argument("--push", action="store_true", help="move only on POST /deltasync/advance")
    parser.add_argument("--mirror", metavar="FILE", help="keep the mirror in this file, across restarts")
    parser.add_argument("--pause", choices=get_args(PauseMode), help="what happens to requests in flight at a switch")
    parser.add_argument("--scrub-s", metavar="S", help="compare all weights with the mirror about every S seconds")
    parser.add_argument("--replica", metavar="ID", help="the id in heartbeats (default: random)")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="arguments for vLLM, after --")


def _serve(args: argparse.Namespace) -> None:
    """Replace this process by the server."""
    token = _token() if args.token_file is None else _read_token(args.token_file)
    given = {
        "FEED": args.feed,
        "TOKEN": secrets.token_urlsafe() if token is None else token,
        "WAY": "push" if args.push else None,
        "MIRROR": args.mirror,
        "PAUSE": args.pause,
        "SCRUB_S": args.scrub_s,
        "REPLICA": args.replica,
    }
    installed = [plugin.name for group in _PLUGIN_GROUPS for plugin in entry_points(group=group)]
    launch = prepare_launch(args.arguments, given, environment=os.environ, plugins=installed)
    open_store(args.feed).close()
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed here", hint="pip install 'deltasync[vllm]'")
    if token is None:
        print(f"the control routes require the token {given['TOKEN']}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


def _read_token(path: Path) -> str:
    text = path.read_text().strip()
    if not text:
        raise InvalidInputError(f"{path} is empty", hint="put a token into it, or leave --token-file out")
    return text


@dataclass(frozen=True, slots=True)
class Launch:
    """The command and the environment of a server."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def prepare_launch(
    arguments: Sequence[str],
    given: Mapping[str, str | None],
    *,
    environment: Mapping[str, str],
    plugins: Iterable[str],
) -> Launch:
    """A server with these arguments of vLLM, and with `given` as `DELTASYNC_*` variables.

    Variables for which None is given stay as they are in `environment`. `plugins` are the names that vLLM loads if no
    list is set. InvalidInputError for a value that the server would refuse, or for another backend in the arguments.
    """
    added = {f"DELTASYNC_{name}": value for name, value in given.items() if value is not None}
    # vLLM loads only the plugins in this list once it is set, so the others have to be named, too.
    allowed = environment["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environment else sorted(plugins)
    names = dict.fromkeys([*(name for name in allowed if name), BACKEND])
    result = {**environment, **added, "VLLM_PLUGINS": ",".join(names)}
    Settings.from_environment(result)
    transfer = () if _has_backend(arguments) else (_TRANSFER, json.dumps({"backend": BACKEND}))
    return Launch((sys.executable, "-m", _SERVER, *arguments, *transfer), result)


def _has_backend(arguments: Sequence[str]) -> bool:
    """Whether the arguments of vLLM select our backend; InvalidInputError if they select another one."""
    backend = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            value = arguments[i + 1] if i + 1 < len(arguments) else ""
        option = name.replace("_", "-")
        if option == _TRANSFER:
            backend = _parse_backend(value)
        elif option == f"{_TRANSFER}.backend":
            backend = value
    if backend not in (None, BACKEND):
        raise InvalidInputError(
            f"{_TRANSFER} selects the backend {backend!r:.80}, not {BACKEND!r}", hint="leave the option out"
        )
    return backend is not None


def _parse_backend(value: str) -> str:
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    backend = config.get("backend") if isinstance(config, dict) else None
    if not isinstance(backend, str):
        raise InvalidInputError(f"{_TRANSFER} is {value!r:.80}, which names no backend", hint="leave the option out")
    return backend
