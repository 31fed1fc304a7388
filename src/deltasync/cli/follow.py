"""The `follow` command: a checkpoint folder that is kept at the newest version."""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from deltasync.cli.output import Output, printing
from deltasync.cli.parser import require_unused
from deltasync.cli.service import calling_on_signal, listening, require_address
from deltasync.cli.units import count_text, duration_text, number_text, size_text, time_text
from deltasync.errors import EngineError, InvalidInputError
from deltasync.replica.events import Advance, Seconds, follower_metrics, no_version
from deltasync.replica.folder import FolderTarget, Hook
from deltasync.replica.follower import Follower
from deltasync.sglang import SglangTarget

EXEC_TIMEOUT_S = 600.0
_ONCE_TRIES = 3
_LOOK_S = 0.5
"""How often the folder of an earlier process is looked at until the command has run for it."""

_SGLANG_OPTIONS = ("sglang_path", "pause", "keep_cache", "only_changes")

Moves = SimpleQueue[Advance | None]


class _HookedFolder(FolderTarget):
    """A folder whose heartbeats say how the command does that runs after each switch."""

    hook: Hook | None = None

    def look(self) -> None:
        status = None if self.hook is None else self.hook.status
        if status is not None and status.error is not None:
            self.engine = f"folder; the command {status.error} for version {status.failing_version}"
        elif status is not None and status.version is not None:
            self.engine = f"folder; the command ran for version {status.version}"


def follow(args: argparse.Namespace, out: Output) -> None:
    """Print a line for every version that goes live, until SIGINT or SIGTERM."""
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
    moves: Moves = SimpleQueue()
    with ExitStack() as held:
        target = _target(args, hook)
        held.callback(target.close)

        def observe(moved: Advance) -> None:
            if hook is not None and not args.once:
                # No other switch until the command has loaded this one: the folder of an older version is removed.
                follower.pause()
            moves.put(moved)

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
        show = partial(_print_move, out, follower)
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
        _follow_and_print(follower, moves, show, hook)


def _target(args: argparse.Namespace, hook: Hook | None) -> FolderTarget:
    if args.sglang is not None:
        return SglangTarget(
            args.target,
            args.sglang,
            path_there=args.sglang_path,
            pause=args.pause or "retract",
            keeps_cache=args.keep_cache,
            only_changes=args.only_changes,
        )
    target = _HookedFolder(args.target)
    target.hook = hook
    return target


def _run_once(hook: Hook) -> None:
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


def _listening(args: argparse.Namespace, out: Output, follower: Follower, hook: Hook | None) -> Any:
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


def _follow_and_print(follower: Follower, moves: Moves, show: Callable[[Advance], None], hook: Hook | None) -> None:
    """Follow in a thread and print in this one, where a broken pipe can hold no lock of the follower."""

    def stop() -> None:
        if hook is not None:
            hook.stop()
        follower.stop()

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
                    if hook is not None:
                        wait_s = _run_hook(follower, hook, has_moved=moved is not None)
        finally:
            stop()
    done.result()


def _run_hook(follower: Follower, hook: Hook, *, has_moved: bool) -> float | None:
    """Run the command if it is due. Returns the seconds until it has to be looked at again."""
    if not has_moved and follower.status().version is None:
        # The folder may be one of an earlier process, which is not proved yet.
        return _LOOK_S
    follower.pause()
    try:
        return hook.run()
    finally:
        follower.resume()


@printing()
def _print_move(out: Output, follower: Follower, moved: Advance) -> None:
    now_unix_s = time.time()
    lag = follower.status().lag
    lag_s = None if moved.committed_unix_s is None else max(0.0, now_unix_s - moved.committed_unix_s)
    if out.is_json:
        out.json_line(
            {
                "time_unix_s": round(now_unix_s, 3),
                "version": moved.version,
                "from_version": moved.from_version,
                "lag": lag,
                "lag_s": None if lag_s is None else round(lag_s, 3),
                "edges": list(moved.edges),
                "bytes": moved.nbytes,
                "changed": moved.changed,
                "seconds": asdict(moved.seconds),
            }
        )
        return
    out.line(f"{time_text(now_unix_s)}  {move_text(moved, lag=lag, lag_s=lag_s)}", indent=" " * 21)


def move_text(moved: Advance, *, lag: int | None, lag_s: float | None) -> str:
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
