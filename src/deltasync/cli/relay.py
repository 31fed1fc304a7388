"""The `relay` command: copies of a feed in other stores."""

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from deltasync.cli.follow import calling_on_signal
from deltasync.cli.listen import listening, require_address
from deltasync.cli.output import Output
from deltasync.cli.units import count_text, size_text, time_text
from deltasync.errors import ConflictError
from deltasync.feed.metrics import UpkeepCollector
from deltasync.feed.relay import Relay, Relayed
from deltasync.feed.upkeep import Upkeep
from deltasync.replica.loop import Loop
from deltasync.store import opened


def relay(args: argparse.Namespace, out: Output) -> None:
    """Copy a feed to each destination, and print each edge that was sent, and the bytes for each destination."""
    require_address(args, follows=args.follow, without="without --follow")
    with ExitStack() as held:
        source = held.enter_context(opened(args.url))
        copies = [held.enter_context(opened(url)) for url in args.destination]
        relays = [
            Relay(
                source,
                copy,
                every=args.every,
                anchors=not args.no_anchors,
                skips=args.skips,
                heartbeats=args.heartbeats,
            )
            for copy in copies
        ]
        # All of them before anything is written to one.
        for each in relays:
            each.check()
        printer = _Printer(out, has_lines=args.follow)
        if args.follow:
            with _listening(args, out, relays):
                _follow(relays, printer)
        else:
            with ThreadPoolExecutor(len(relays)) as pool:
                list(pool.map(printer.print_all, relays))
        printer.print_totals([copy.url for copy in copies])


@dataclass(frozen=True, slots=True)
class _Status:
    """How far the copies are. `version` is the oldest of their newest versions; None if one has none."""

    version: int | None
    destinations: dict[str, Upkeep]


def _listening(args: argparse.Namespace, out: Output, relays: Sequence[Relay]) -> AbstractContextManager[None]:
    upkeeps = {each.destination: each.upkeep for each in relays}

    def status() -> _Status:
        versions = [upkeep.version for upkeep in upkeeps.values()]
        oldest = min((version for version in versions if version is not None), default=None)
        return _Status(None if None in versions else oldest, upkeeps)

    def why_not_ready() -> str | None:
        reasons = ((url, upkeep.why_not_ready()) for url, upkeep in upkeeps.items())
        return next((f"{url}: {reason}" for url, reason in reasons if reason is not None), None)

    return listening(args, out, status, UpkeepCollector.of_relays(*relays), why_not_ready=why_not_ready)


def _follow(relays: Sequence[Relay], printer: "_Printer") -> None:
    """Copy new versions to all destinations until SIGINT or SIGTERM, or until one of them fails for good."""
    loops = [Loop() for _ in relays]
    conflicts: list[ConflictError] = []

    def stop() -> None:
        for loop in loops:
            loop.stop()

    def follow(each: Relay, loop: Loop) -> None:
        def step() -> bool:
            try:
                return printer.print_all(each, is_stopping=lambda: loop.is_stopping)
            except ConflictError as error:
                # No retry can help: the destination is a copy of something else by now.
                conflicts.append(error)
                stop()
                return False

        try:
            loop.run(step, lambda error: None)
        finally:
            stop()

    # In threads of their own: a handler that runs in this one must not meet a lock of a loop.
    with ThreadPoolExecutor(len(relays)) as pool, calling_on_signal(stop):
        for done in [pool.submit(follow, each, loop) for each, loop in zip(relays, loops, strict=True)]:
            done.result()
    for conflict in conflicts:
        raise conflict


class _Printer:
    """Prints what the relays of several threads have sent, and adds up their bytes.

    As JSON, that is a line for each edge with `has_lines`, else one object at the end.
    """

    def __init__(self, out: Output, *, has_lines: bool) -> None:
        self._out = out
        self._has_lines = has_lines
        self._sent: list[Relayed] = []
        self._lock = threading.Lock()
        self._edges: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def print_all(self, relay: Relay, *, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Send what is new, and print it. Whether there was anything.

        Where training is faster than the link, there is always something new: `is_stopping` ends it.
        """
        is_new = False
        for sent in relay.advance():
            is_new = True
            with self._lock:
                self._edges[sent.destination] = self._edges.get(sent.destination, 0) + 1
                sent_bytes = sent.payload_bytes + sent.manifest_bytes
                self._bytes[sent.destination] = self._bytes.get(sent.destination, 0) + sent_bytes
                self._print(sent)
            if is_stopping():
                break
        return is_new

    def print_totals(self, destinations: Sequence[str]) -> None:
        """Print the edges and bytes of each destination."""
        totals = [(url, self._edges.get(url, 0), self._bytes.get(url, 0)) for url in destinations]
        if not self._out.is_json:
            for url, edges, sent_bytes in totals:
                self._out.line(f"{url}: {count_text(edges, 'edge')}, {size_text(sent_bytes)} sent", indent="  ")
        elif not self._has_lines:
            copies = [{"destination": url, "edges": edges, "bytes": sent_bytes} for url, edges, sent_bytes in totals]
            self._out.json({"sent": [sent.to_json() for sent in self._sent], "destinations": copies})

    def _print(self, sent: Relayed) -> None:
        now_unix_s = time.time()
        if self._out.is_json and self._has_lines:
            self._out.json_line({"time_unix_s": round(now_unix_s, 3), **sent.to_json()})
            return
        if self._out.is_json:
            self._sent.append(sent)
            return
        origin = "" if sent.parent is None else f" from {sent.parent}"
        left_out = f", {count_text(sent.left_out, 'version')} left out" if sent.left_out else ""
        text = f"{sent.kind}{origin} to version {sent.version}, {size_text(sent.payload_bytes)}{left_out}"
        self._out.line(f"{time_text(now_unix_s)}  {sent.destination}: {text}", indent=" " * 21)
        sys.stdout.flush()
