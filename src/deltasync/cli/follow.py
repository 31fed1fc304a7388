"""The `follow` command: a checkpoint folder that is kept at the newest version."""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from deltasync.cli.output import Output, count_text, duration_text, number_text, size_text
from deltasync.cli.parser import Parser, require_unused, seconds, seconds_or_off
from deltasync.cli.service import calling_on_signal, listening, require_address
from deltasync.errors import EngineError, InvalidInputError

if TYPE_CHECKING:
    from deltasync.replica.events import Advance
    from deltasync.replica.folder import FolderTarget, Hook
    from deltasync.replica.follower import Follower

EXEC_TIMEOUT_S = 600.0
_ONCE_TRIES = 3
_LOOK_S = 0.5
"""How often the folder of an earlier process is looked at until the command has run for it."""

_SGLANG_OPTIONS = ("sglang_path", "pause", "keep_cache", "only_changes")


def follow_arguments(parser: Parser) -> None:
    parser.explain(
        "Prints a line for each version that goes live, until SIGINT or SIGTERM.",
        example="deltasync follow s3://bucket/run-42 --target live --exec 'reload {path}'",
    )
    parser.add_url()
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--once", action="store_true", help="move to the newest version, then exit")
    parser.add_argument(
        "--exec",
        dest="program",
        metavar="COMMAND",
        help="run this after each switch, without a shell; {path} and {version} are replaced",
    )
    parser.add_argument(
        "--exec-timeout-s",
        type=seconds,
        metavar="S",
        help="end the command after this time (default: 600)",
    )
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    parser.add_base()
    parser.add_trust_code("write")
    parser.add_replica()
    parser.add_argument(
        "--scrub-s",
        type=seconds_or_off,
        default=3600.0,
        metavar="S",
        help="compare the folder with the mirror about every S seconds, or `off` (default: 3600)",
    )
    parser.add_listen()
    parser.add_argument(
        "--ready-s",
        type=seconds,
        metavar="S",
        help="/readyz is 200 only while the version was the newest at most S seconds ago",
    )
    parser.add_threads()
    sglang = parser.add_argument_group("SGLang")
    sglang.add_argument("--sglang", metavar="URL", help="let this SGLang server load each version from the folder")
    sglang.add_argument(
        "--sglang-path", metavar="DIR", help="the folder's path as the server sees it (default: the same)"
    )
    sglang.add_argument(
        "--pause",
        choices=("retract", "in_place", "abort"),
        help="what happens to running requests: computed again (default), go on with the old cache, or end",
    )
    sglang.add_argument("--keep-cache", action="store_true", help="leave the KV cache of older weights as it is")
    sglang.add_argument(
        "--only-changes",
        action="store_true",
        help="write only what changed over the server's weights; it needs our loader (docs/integrations.md)",
    )


def follow(args: argparse.Namespace, out: Output) -> None:
    """Print a line for every version that goes live, until SIGINT or SIGTERM."""
    from deltasync.replica.events import Advance, Seconds
    from deltasync.replica.folder import FolderTarget, Hook
    from deltasync.replica.follower import Follower
    from deltasync.sglang import SglangTarget

    require_address(args, follows=not args.once, without="with --once")
    if args.ready_s is not None and args.listen is None:
        raise InvalidInputError("--ready-s needs an address", hint="add --listen HOST:PORT")
    if args.sglang is not None and args.program is not None:
        raise InvalidInputError("--sglang and --exec both load the folder", hint="leave one of them out")
    if args.sglang is None:
        require_unused(args, _SGLANG_OPTIONS, without="--sglang")
    if args.program is None:
        require_unused(args, ("exec_timeout_s",), without="--exec")
    timeout_s = EXEC_TIMEOUT_S if args.exec_timeout_s is None else args.exec_timeout_s
    hook = None if args.program is None else Hook(args.program, args.target, timeout_s=timeout_s)
    moves = SimpleQueue[Advance | None]()

    def observe(moved: Advance) -> None:
        if hook is not None and not args.once:
            # No other switch until the command has loaded this one: the folder of an older version is removed.
            follower.pause()
        moves.put(moved)

    def show(moved: Advance) -> None:
        lag, lag_s = follower.status().lag, None
        if moved.committed_unix_s is not None:
            lag_s = max(0.0, time.time() - moved.committed_unix_s)
        fields = {
            "version": moved.version,
            "from_version": moved.from_version,
            "lag": lag,
            "lag_s": None if lag_s is None else round(lag_s, 3),
            "edges": moved.edges,
            "bytes": moved.nbytes,
            "changed": moved.changed,
            "seconds": asdict(moved.seconds),
        }
        out.event(fields, move_text(moved, lag=lag, lag_s=lag_s), has_time=True)

    with ExitStack() as held:
        if args.sglang is None:
            target = FolderTarget(args.target)
        else:
            target = SglangTarget(
                args.target,
                args.sglang,
                path_there=args.sglang_path,
                pause=args.pause or "retract",
                keeps_cache=args.keep_cache,
                only_changes=args.only_changes,
            )
        held.callback(target.close)
        follower = held.enter_context(
            Follower(
                args.url,
                target,
                mirror=args.mirror,
                base=args.base,
                replica=args.replica,
                observer=observe,
                scrub_s=args.scrub_s,
                trust_code=args.trust_code,
            )
        )
        if args.once:
            moved = follower.advance()
            version = target.version
            if moved is None and version is not None:
                moved = Advance(version, version, (), 0, 0, Seconds())
            if moved is not None:
                show(moved)
            if hook is not None:
                _run_once(hook)
            return
        held.enter_context(_listening(args, out, follower, hook))
        _follow_and_print(follower, target, moves, show, hook)


def _run_once(hook: "Hook") -> None:
    """Run the command, with a few retries. EngineError if it fails each time."""
    for i in range(_ONCE_TRIES):
        wait_s = hook.run()
        if wait_s is None:
            return
        if i < _ONCE_TRIES - 1:
            time.sleep(wait_s)
    status = hook.status
    raise EngineError(
        f"for version {status.failing_version}, the command of --exec {status.error}",
        version=status.failing_version,
        hint="the folder is at that version; the next run of `follow` runs the command again",
    )


def _listening(args: argparse.Namespace, out: Output, follower: "Follower", hook: "Hook | None") -> Any:
    from deltasync.replica.events import follower_metrics, no_version

    read_hook = None if hook is None else lambda: hook.status

    def why_not_ready() -> str | None:
        reason = no_version(follower.status, ready_s=args.ready_s)
        if reason is None and hook is not None:
            status = hook.status
            if status.error is not None:
                reason = f"the command {status.error} for version {status.failing_version}"
            elif status.version is None:
                reason = "the command has not succeeded yet"
        return reason

    details: Callable[[], dict[str, Any]] = dict if hook is None else lambda: {"exec": asdict(hook.status)}
    collector = follower_metrics(follower.status, read_hook)
    return listening(args, out, follower.status, collector, why_not_ready=why_not_ready, details=details)


def _follow_and_print(
    follower: "Follower",
    target: "FolderTarget",
    moves: "SimpleQueue[Advance | None]",
    show: Callable[["Advance"], None],
    hook: "Hook | None",
) -> None:
    """Follow in a thread and print in this one, where a broken pipe can hold no lock of the follower."""

    def stop() -> None:
        if hook is not None:
            hook.stop()
        follower.stop()

    def run_hook(hook: "Hook") -> float | None:
        """Run the command if it is due, and let heartbeats say how it does. The seconds until it is looked at again."""
        follower.pause()
        try:
            wait_s, status = hook.run(), hook.status
            if status.error is not None:
                target.engine = f"folder; the command {status.error} for version {status.failing_version}"
            elif status.version is not None:
                target.engine = f"folder; the command ran for version {status.version}"
            return wait_s
        finally:
            follower.resume()

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(follower.follow)
        done.add_done_callback(lambda _: moves.put(None))
        try:
            with calling_on_signal(stop):
                wait_s = None if hook is None else _LOOK_S
                while True:
                    moved = None
                    with suppress(Empty):
                        moved = moves.get(timeout=wait_s)
                        if moved is None:
                            break
                        show(moved)
                    if hook is None:
                        continue
                    # Without a version, the folder may be one of an earlier process, which is not proved yet.
                    is_proved = moved is not None or follower.status().version is not None
                    wait_s = run_hook(hook) if is_proved else _LOOK_S
        finally:
            stop()
    done.result()


def move_text(moved: "Advance", *, lag: int | None, lag_s: float | None) -> str:
    """An advance in words: where it led, how far behind that is, what was fetched, and how long it took."""
    if moved.from_version == moved.version:
        return f"version {moved.version} is already live"
    origin = "" if moved.from_version is None else f" after {moved.from_version}"
    behind = "" if not lag else f", {count_text(lag, 'version')} behind"
    # Manifests have whole seconds.
    late = "" if lag_s is None else f", {duration_text(round(lag_s)) if lag_s >= 1 else 'under 1 s'} after its commit"
    changed = "all weights" if moved.changed is None else f"{number_text(moved.changed)} elements"
    fetched = "nothing to fetch"
    if moved.edges:
        kinds = dict.fromkeys(moved.edges)
        fetched = f"{' and '.join(count_text(moved.edges.count(kind), kind) for kind in kinds)}"
        fetched += f" of {size_text(moved.nbytes)}"
    took = ", ".join(f"{name} {duration_text(value)}" for name, value in asdict(moved.seconds).items())
    return f"version {moved.version} is live{origin}{behind}{late}: {changed}, {fetched}; {took}"
