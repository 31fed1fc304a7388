"""Commands that maintain a feed: prune, compact, relay, pin, unpin, pins."""

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import deltasync
from deltasync.cli.feeds import manifest_json, opened_feed
from deltasync.cli.output import (
    Column,
    Output,
    OutputError,
    count_text,
    number_text,
    share_text,
    size_text,
    time_text,
    versions_text,
)
from deltasync.cli.parser import Parser, positive, seconds, version_or_name
from deltasync.cli.service import calling_on_signal, listening, poll_until_signal, require_address
from deltasync.errors import ConflictError, InvalidInputError

if TYPE_CHECKING:
    from deltasync.format.manifest import Manifest
    from deltasync.upkeep.metrics import Role
    from deltasync.upkeep.prune import Retention
    from deltasync.upkeep.relay import Relay, Relayed
    from deltasync.upkeep.stats import Upkeep


def prune_arguments(parser: Parser) -> None:
    parser.explain(
        "Without --yes it only lists them. It may run beside a publisher.",
        example="deltasync prune s3://bucket/run-42 --keep-anchors 2 --keep-versions 99",
    )
    parser.add_url()
    parser.add_argument(
        "--keep-anchors", type=positive, required=True, metavar="N", help="keep at least this many anchors"
    )
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="keep at least this many versions restorable"
    )
    parser.add_argument(
        "--keep-s", type=seconds, metavar="S", help="keep every version restorable that was committed within S seconds"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    parser.add_argument("--follow", action="store_true", help="with --yes: prune repeatedly, until SIGINT or SIGTERM")
    parser.add_argument(
        "--every-s", type=seconds, default=60.0, metavar="S", help="with --follow: about every S seconds (default: 60)"
    )
    parser.add_listen()


def prune(args: argparse.Namespace, out: Output) -> None:
    """Delete old versions, or list what that would delete."""
    retention = deltasync.Retention(
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
    with opened_feed(args.url) as (log, _):
        pruning = deltasync.plan_prune(log.store, retention)
        stay = deltasync.prune(log.store, pruning) if args.yes else ()
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


def _prune_and_follow(args: argparse.Namespace, out: Output, retention: "Retention") -> None:
    """Prune repeatedly until SIGINT or SIGTERM, and print what each run has deleted."""
    from deltasync.feed.log import Log
    from deltasync.replica.loop import Loop
    from deltasync.store import opened
    from deltasync.upkeep.prune import Pruner

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
            deleted = len(pruning.keys) - len(stay)
            if deleted:
                counts = {"deleted_objects": deleted, "payload_bytes": pruning.payload_bytes, "floor": pruning.floor}
                held = f"; {count_text(len(pruning.held_by), 'replica')} behind" if pruning.held_by else ""
                objects = f"{count_text(deleted, 'object')}, {size_text(pruning.payload_bytes)} deleted"
                out.event(
                    {**counts, "held_by": pruning.held_by, "pinned": pruning.pinned},
                    f"{objects}; versions from {pruning.floor} on stay{held}",
                    has_time=True,
                )
            return False

        with _upkeep_listening(args, out, "pruner", pruner.upkeep):
            poll_until_signal(step, loop)


def _upkeep_listening(
    args: argparse.Namespace, out: Output, role: "Role", upkeep: "Upkeep"
) -> AbstractContextManager[None]:
    from deltasync.upkeep.metrics import upkeep_metrics

    collector = upkeep_metrics(role, {(): upkeep})
    return listening(args, out, lambda: upkeep, collector, why_not_ready=upkeep.why_not_ready)


def compact_arguments(parser: Parser) -> None:
    parser.explain(
        "A skip leads over many versions at once. It may run beside a publisher.",
        example="deltasync compact s3://bucket/run-42 --follow",
    )
    parser.add_url()
    parser.add_follow()
    parser.add_argument(
        "--levels",
        type=lambda text: tuple(positive(part) for part in text.split(",")),
        metavar="N,N,…",
        help="versions that a skip leads over, each a multiple of the one before (default: 4,16,64)",
    )
    parser.add_listen()
    parser.add_threads()


def compact(args: argparse.Namespace, out: Output) -> None:
    """Write the skips that are missing, and print each as it is committed; as JSON all at once, unless it follows."""
    from deltasync.feed.log import manifest_key
    from deltasync.replica.loop import Loop
    from deltasync.store import opened
    from deltasync.upkeep.compact import LEVELS, Compactor

    def to_json(skip: "Manifest") -> dict[str, Any]:
        return {**manifest_json(skip), "key": manifest_key(skip)}

    require_address(args, follows=args.follow, without="without --follow")
    written: list[Manifest] = []
    with opened(args.url) as store:
        compactor, loop = Compactor(store, levels=LEVELS if args.levels is None else args.levels), Loop()

        def step() -> bool:
            before = len(written)
            for skip in compactor.advance():
                written.append(skip)
                if args.follow or not out.is_json:
                    changed = skip.changed or 0
                    elements = f"{number_text(changed)} elements ({share_text(changed, skip.elements)})"
                    text = f"skip from version {skip.parent} to {skip.version}: {elements}, {size_text(skip.nbytes)}"
                    out.event(to_json(skip), text)
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
        out.json({"skips": [to_json(skip) for skip in written]})


def relay_arguments(parser: Parser) -> None:
    parser.explain(
        "Only what a destination does not have is sent. An interrupted copy goes on.",
        example="deltasync relay s3://us-bucket/run-42 s3://eu-bucket/run-42 --follow",
    )
    parser.add_url()
    parser.add_place("destination", repeated=True, help="where to copy it to: an empty place, or an earlier copy")
    parser.add_follow()
    parser.add_argument(
        "--every", action="store_true", help="copy every version that can be restored, however far behind"
    )
    parser.add_argument("--no-anchors", action="store_true", help="do not copy anchors that were added to versions")
    parser.add_argument("--skips", action="store_true", help="copy skips, too")
    parser.add_argument(
        "--heartbeats", action="store_true", help="let the source know the replicas of the destinations"
    )
    parser.add_listen()


def relay(args: argparse.Namespace, out: Output) -> None:
    """Copy a feed to each destination, and print each edge that was sent, and the bytes for each destination.

    As JSON, that is a line for each edge with `--follow`, else one object at the end.
    """
    from deltasync.store import opened
    from deltasync.upkeep.relay import Relay

    sent: list[Relayed] = []
    edges, sent_bytes = Counter[str](), Counter[str]()
    lock = threading.Lock()

    def show(edge: "Relayed") -> None:
        if out.is_json and not args.follow:
            sent.append(edge)
            return
        origin = "" if edge.parent is None else f" from {edge.parent}"
        left_out = f", {count_text(edge.left_out, 'version')} left out" if edge.left_out else ""
        text = f"{edge.kind}{origin} to version {edge.version}, {size_text(edge.payload_bytes)}{left_out}"
        out.event(edge.to_json(), f"{edge.destination}: {text}", has_time=True)

    def send(each: Relay, *, is_stopping: Callable[[], bool] = lambda: False) -> bool:
        """Send what is new, and print it. Whether there was anything.

        Where training is faster than the link, there is always something new: `is_stopping` ends it.
        """
        is_new = False
        for edge in each.advance():
            is_new = True
            with lock:
                edges[edge.destination] += 1
                sent_bytes[edge.destination] += edge.payload_bytes + edge.manifest_bytes
                show(edge)
            if is_stopping():
                break
        return is_new

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
        if args.follow:
            with _relays_listening(args, out, relays):
                _follow_relays(relays, send)
        else:
            with ThreadPoolExecutor(len(relays)) as pool:
                list(pool.map(send, relays))
        urls = [copy.url for copy in copies]
        if not out.is_json:
            for url in urls:
                out.line(f"{url}: {count_text(edges[url], 'edge')}, {size_text(sent_bytes[url])} sent", indent="  ")
        elif not args.follow:
            totals = [{"destination": url, "edges": edges[url], "bytes": sent_bytes[url]} for url in urls]
            out.json({"sent": [edge.to_json() for edge in sent], "destinations": totals})


@dataclass(frozen=True, slots=True)
class _RelayStatus:
    """How far the copies are. `version` is the oldest of their newest versions; None if one has none."""

    version: int | None
    destinations: "dict[str, Upkeep]"


def _relays_listening(args: argparse.Namespace, out: Output, relays: "Sequence[Relay]") -> AbstractContextManager[None]:
    from deltasync.upkeep.metrics import upkeep_metrics

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


def _follow_relays(relays: "Sequence[Relay]", send: Callable[..., bool]) -> None:
    """Copy new versions to all destinations until SIGINT or SIGTERM, or until one of them fails for good."""
    from deltasync.replica.loop import Loop

    loops = [Loop() for _ in relays]

    def stop() -> None:
        for loop in loops:
            loop.stop()

    def follow(each: "Relay", loop: Loop) -> None:
        step = partial(send, each, is_stopping=lambda: loop.is_stopping)
        try:
            # With a conflict, the destination is a copy of something else by now.
            loop.run(step, final=(ConflictError, OutputError))
        finally:
            stop()

    with ThreadPoolExecutor(len(relays)) as pool, calling_on_signal(stop):
        for done in [pool.submit(follow, each, loop) for each, loop in zip(relays, loops, strict=True)]:
            done.result()


def pin_arguments(parser: Parser) -> None:
    parser.explain(
        "`prune` deletes nothing that it needs, and its name stands for its number.",
        example="deltasync pin s3://bucket/run-42 17 --name best --note 'reward 0.71'",
    )
    parser.add_url()
    parser.add_place("version", version_or_name, help="the version, or the name of another pin")
    parser.add_argument(
        "--name", metavar="NAME", help="letters, digits, `.`, `_` and `-`, a letter first (default: v and the version)"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for people")


def pin(args: argparse.Namespace, out: Output) -> None:
    """Keep a version for good, under a name."""
    kept = deltasync.pin(args.url, args.version, name=args.name, note=args.note)
    if out.is_json:
        out.json(kept.to_json())
    else:
        out.line(f"version {kept.version} is pinned as {kept.name}: `prune` keeps it")


def unpin_arguments(parser: Parser) -> None:
    parser.explain(
        "The next `prune` may delete the version.",
        example="deltasync unpin s3://bucket/run-42 best",
    )
    parser.add_url()
    parser.add_place("version", version_or_name, help="the name of the pin, or a version")


def unpin(args: argparse.Namespace, out: Output) -> None:
    """Remove a pin, or all pins of a version."""
    removed = deltasync.unpin(args.url, args.version)
    if out.is_json:
        out.json({"removed": [pin.to_json() for pin in removed]})
        return
    for pin in removed:
        out.line(f"version {pin.version} is no longer pinned as {pin.name}")


def pins_arguments(parser: Parser) -> None:
    parser.explain(
        "Prints their names, versions and notes.",
        example="deltasync pins s3://bucket/run-42",
    )
    parser.add_url()


def pins(args: argparse.Namespace, out: Output) -> None:
    """List the pins of a feed."""
    with opened_feed(args.url) as (log, _):
        found = deltasync.pins(log.store)
    if out.is_json:
        out.json({"pins": [pin.to_json() for pin in found]})
        return
    columns = (
        Column("name", is_name=True),
        Column("version"),
        Column("pinned (UTC)", rank=1),
        Column("note", is_name=True),
        Column("digest", rank=2),
    )
    rows = [(pin.name, pin.version, time_text(pin.created_unix_s), pin.note or None, pin.digest[:12]) for pin in found]
    out.table(count_text(len(found), "pin"), columns, rows)
