"""Commands that maintain a feed: prune, compact, relay, pin, unpin, pins."""

import argparse
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from deltasync.cli.feeds import manifest_json
from deltasync.cli.output import Column, Output, OutputError, printing
from deltasync.cli.service import calling_on_signal, listening, poll_until_signal, require_address
from deltasync.cli.units import count_text, number_text, share_text, size_text, time_text, versions_text
from deltasync.errors import ConflictError, InvalidInputError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.pins import pin as keep_version
from deltasync.feed.pins import pins as read_pins
from deltasync.feed.pins import unpin as remove_pin
from deltasync.format.manifest import Manifest
from deltasync.format.sealed import Pin
from deltasync.replica.loop import Loop
from deltasync.store import opened
from deltasync.upkeep.compact import LEVELS, Compactor
from deltasync.upkeep.prune import Pruner, Pruning, Retention, plan_prune
from deltasync.upkeep.prune import prune as delete
from deltasync.upkeep.relay import Relay, Relayed
from deltasync.upkeep.stats import Role, Upkeep, upkeep_metrics

_PIN_COLUMNS = (
    Column("name", is_name=True),
    Column("version"),
    Column("pinned (UTC)", rank=1),
    Column("note", is_name=True),
    Column("digest", rank=2),
)


def prune(args: argparse.Namespace, out: Output) -> None:
    """Delete old versions, or list what that would delete."""
    retention = Retention(
        anchors=args.keep_anchors, versions=args.keep_versions, age_s=args.keep_s, every_s=args.every_s
    )
    if args.follow and not args.yes:
        raise InvalidInputError(
            "--follow deletes without asking", hint="add --yes, or leave out --follow to look first"
        )
    require_address(args, follows=args.follow, without="without --follow")
    if args.follow:
        _prune_and_follow(args, out, retention)
        return
    with opened(args.url) as store:
        # A mistyped URL must not look as if there were nothing to delete.
        Log(store).require_head()
        pruning = plan_prune(store, retention)
        stay = delete(store, pruning) if args.yes else ()
    if out.is_json:
        unnamed = set(pruning.keys[len(pruning.keys) - pruning.orphans :])
        kept_orphans, kept_pinned = [k for k in stay if k in unnamed], [k for k in stay if k not in unnamed]
        kept = {"kept_orphans": kept_orphans, "kept_pinned": kept_pinned}
        out.json({**pruning.to_json(), "deleted": args.yes, **kept})
        return
    for key in pruning.keys:
        out.key(key)
    if stay:
        objects = count_text(len(stay), "object")
        out.line(f"{objects} of these stay: put again, or needed by a manifest or a pin by now")
    if pruning.young_orphans:
        orphans = f"{count_text(pruning.young_orphans, 'orphan')} ({size_text(pruning.young_orphan_bytes)})"
        out.line(
            f"{orphans} younger than a day: not deleted, as a publication in progress may need them",
            indent="  ",
        )
    for name in pruning.pinned:
        out.line(f"pin {name} is of an older version: what it needs stays", indent="  ")
    for replica in pruning.held_by:
        out.line(f"replica {replica} is behind: the deltas that it needs stay", indent="  ")
    if pruning.versions:
        verb = "can no longer be restored" if args.yes else "could no longer be restored"
        out.line(f"{versions_text(pruning.versions)} {verb}", indent="  ")
    done = "deleted" if args.yes else "to delete (nothing was deleted: pass --yes)"
    objects = f"{count_text(len(pruning.keys) - len(stay), 'object')}, {size_text(pruning.payload_bytes)}"
    out.line(f"{objects} {done}; versions from {pruning.floor} on stay", indent="  ")


def _prune_and_follow(args: argparse.Namespace, out: Output, retention: Retention) -> None:
    """Prune repeatedly until SIGINT or SIGTERM, and print what each run has deleted."""
    with opened(args.url) as store:
        pruner, loop = Pruner(store, retention), Loop()
        log, due_s = Log(store), 0.0

        def step() -> bool:
            nonlocal due_s
            if time.monotonic() < due_s:
                return False
            log.require_head()
            pruning, stay = pruner.run(is_stopping=lambda: loop.is_stopping)
            due_s = time.monotonic() + retention.every_s
            if len(pruning.keys) > len(stay):
                _print_run(out, pruning, stay)
            return False

        with _upkeep_listening(args, out, "pruner", pruner.upkeep):
            poll_until_signal(step, loop)


def _upkeep_listening(
    args: argparse.Namespace, out: Output, role: Role, upkeep: Upkeep
) -> AbstractContextManager[None]:
    collector = upkeep_metrics(role, {(): upkeep})
    return listening(args, out, lambda: upkeep, collector, why_not_ready=upkeep.why_not_ready)


@printing()
def _print_run(out: Output, pruning: Pruning, stay: Sequence[str]) -> None:
    now_unix_s, deleted = time.time(), len(pruning.keys) - len(stay)
    if out.is_json:
        counts = {"deleted_objects": deleted, "payload_bytes": pruning.payload_bytes, "floor": pruning.floor}
        names = {"held_by": list(pruning.held_by), "pinned": list(pruning.pinned)}
        out.json_line({"time_unix_s": round(now_unix_s, 3), **counts, **names})
        return
    held = f"; {count_text(len(pruning.held_by), 'replica')} behind" if pruning.held_by else ""
    objects = f"{count_text(deleted, 'object')}, {size_text(pruning.payload_bytes)} deleted"
    out.line(f"{time_text(now_unix_s)}  {objects}; versions from {pruning.floor} on stay{held}", indent=" " * 21)


def compact(args: argparse.Namespace, out: Output) -> None:
    """Write the skips that are missing, and print each as it is committed; as JSON all at once, unless it follows."""
    require_address(args, follows=args.follow, without="without --follow")
    written: list[Manifest] = []
    with opened(args.url) as store:
        compactor, loop = Compactor(store, levels=LEVELS if args.levels is None else args.levels), Loop()

        def step() -> bool:
            before = len(written)
            for skip in compactor.advance():
                written.append(skip)
                if args.follow or not out.is_json:
                    _print_skip(out, skip)
                if loop.is_stopping:
                    break
            return len(written) > before

        if args.follow:
            with _upkeep_listening(args, out, "compactor", compactor.upkeep):
                poll_until_signal(step, loop)
        else:
            step()
    if not out.is_json:
        out.line(f"{count_text(len(written), 'skip')} written")
    elif not args.follow:
        out.json({"skips": [_skip_json(skip) for skip in written]})


def _skip_json(skip: Manifest) -> dict[str, Any]:
    return {**manifest_json(skip), "key": manifest_key(skip)}


@printing()
def _print_skip(out: Output, skip: Manifest) -> None:
    if out.is_json:
        out.json_line(_skip_json(skip))
        return
    changed = f"{number_text(skip.changed or 0)} elements ({share_text(skip.changed or 0, skip.elements)})"
    out.line(f"skip from version {skip.parent} to {skip.version}: {changed}, {size_text(skip.nbytes)}", indent="  ")


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
        if len({copy.url for copy in copies}) < len(copies):
            raise InvalidInputError("a destination is given twice", hint="give each one once")
        # All of them before anything is written to one.
        for each in relays:
            each.check()
        printer = _RelayPrinter(out, has_lines=args.follow)
        if args.follow:
            with _relays_listening(args, out, relays):
                _follow_relays(relays, printer)
        else:
            with ThreadPoolExecutor(len(relays)) as pool:
                list(pool.map(printer.print_all, relays))
        printer.print_totals([copy.url for copy in copies])


@dataclass(frozen=True, slots=True)
class _RelayStatus:
    """How far the copies are. `version` is the oldest of their newest versions; None if one has none."""

    version: int | None
    destinations: dict[str, Upkeep]


def _relays_listening(args: argparse.Namespace, out: Output, relays: Sequence[Relay]) -> AbstractContextManager[None]:
    upkeeps = {each.destination: each.upkeep for each in relays}

    def status() -> _RelayStatus:
        versions = [upkeep.version for upkeep in upkeeps.values()]
        oldest = min((version for version in versions if version is not None), default=None)
        return _RelayStatus(None if None in versions else oldest, upkeeps)

    def why_not_ready() -> str | None:
        reasons = ((url, upkeep.why_not_ready()) for url, upkeep in upkeeps.items())
        return next((f"{url}: {reason}" for url, reason in reasons if reason is not None), None)

    collector = upkeep_metrics("relay", {(url,): upkeep for url, upkeep in upkeeps.items()})
    return listening(args, out, status, collector, why_not_ready=why_not_ready)


def _follow_relays(relays: Sequence[Relay], printer: "_RelayPrinter") -> None:
    """Copy new versions to all destinations until SIGINT or SIGTERM, or until one of them fails for good."""
    loops = [Loop() for _ in relays]

    def stop() -> None:
        for loop in loops:
            loop.stop()

    def follow(each: Relay, loop: Loop) -> None:
        def step() -> bool:
            return printer.print_all(each, is_stopping=lambda: loop.is_stopping)

        try:
            # With a conflict, the destination is a copy of something else by now.
            loop.run(step, final=(ConflictError, OutputError))
        finally:
            stop()

    with ThreadPoolExecutor(len(relays)) as pool, calling_on_signal(stop):
        for done in [pool.submit(follow, each, loop) for each, loop in zip(relays, loops, strict=True)]:
            done.result()


class _RelayPrinter:
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

    @printing()
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


def pin(args: argparse.Namespace, out: Output) -> None:
    """Keep a version for good, under a name."""
    kept = keep_version(args.url, args.version, name=args.name, note=args.note)
    if out.is_json:
        out.json(kept.to_json())
    else:
        out.line(f"version {kept.version} is pinned as {kept.name}: `prune` keeps it")


def unpin(args: argparse.Namespace, out: Output) -> None:
    """Remove a pin, or all pins of a version."""
    removed = remove_pin(args.url, args.version)
    if out.is_json:
        out.json({"removed": [pin.to_json() for pin in removed]})
        return
    for pin in removed:
        out.line(f"version {pin.version} is no longer pinned as {pin.name}")


def pins(args: argparse.Namespace, out: Output) -> None:
    """List the pins of a feed."""
    with opened(args.url) as store:
        # A mistyped URL must not look as if there were no pins.
        Log(store).require_head()
        found = read_pins(store)
    if out.is_json:
        out.json({"pins": [pin.to_json() for pin in found]})
        return
    out.table(count_text(len(found), "pin"), _PIN_COLUMNS, [_pin_row(pin) for pin in found])


def _pin_row(pin: Pin) -> tuple[object, ...]:
    return pin.name, pin.version, time_text(pin.created_unix_s), pin.note or None, pin.digest[:12]
