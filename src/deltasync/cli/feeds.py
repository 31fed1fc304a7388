"""Commands on feeds: publish, log, show, verify, restore."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltasync
from deltasync.cli.output import (
    ROWS_MAX,
    Column,
    Output,
    bits_text,
    count_text,
    duration_text,
    number_column,
    number_text,
    or_dash,
    percent,
    ranges_text,
    ratio_text,
    share_text,
    size_text,
    time_text,
    versions_text,
)
from deltasync.cli.parser import Parser, add_shadow, positive, require_unused, seconds, version_or_name, whole_number
from deltasync.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from deltasync.feed.log import Log
    from deltasync.feed.plan import Plan
    from deltasync.format.manifest import BaseRef, Manifest
    from deltasync.format.sealed import Heartbeat

_WATCH_OPTIONS = ("once", "after", "marker", "settle_s", "shadow", "keep_anchors", "keep_versions")


def publish_arguments(parser: Parser) -> None:
    parser.explain(
        "The first version has all weights; later ones have only what changed.",
        example="deltasync publish s3://bucket/run-42 checkpoints/step-100 --step 100",
    )
    parser.add_url()
    parser.add_place("checkpoint", help="checkpoint folder or .safetensors file; with --watch, a pattern of folders")
    parser.add_argument("--step", type=whole_number, metavar="N", help="the trainer's step, as information")
    parser.add_argument(
        "--parent",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint that was published last (default: rebuild it from the feed)",
    )
    parser.add_argument(
        "--anchor",
        action="store_true",
        help="add all weights, for replicas that join late; required if the set of tensors changed",
    )
    parser.add_argument(
        "--base",
        metavar="NAME[@REVISION]",
        help="first version only: replicas have this checkpoint as NAME, a folder or a Hub id; nothing is uploaded",
    )
    parser.add_trust_code("publish")
    parser.add_require_fencing()
    parser.add_argument("--must-exist", action="store_true", help="refuse to start a new feed")
    parser.add_threads()
    watch = parser.add_argument_group("checkpoints as they appear")
    watch.add_argument(
        "--watch",
        action="store_true",
        help="publish every folder that matches, such as 'run/weights/step_*', once it is complete; until SIGINT",
    )
    watch.add_argument("--once", action="store_true", help="publish the folders that are there, then exit")
    watch.add_argument("--after", type=whole_number, metavar="N", help="leave out folders with a number up to N")
    watch.add_argument("--marker", metavar="NAME", help="a folder is complete only with this file in it")
    watch.add_argument(
        "--settle-s",
        type=seconds,
        metavar="S",
        help="a folder is complete only if its files have not changed for S seconds (default: 2)",
    )
    add_shadow(watch)
    watch.add_argument("--keep-anchors", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")
    watch.add_argument("--keep-versions", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")


def publish(args: argparse.Namespace, out: Output) -> None:
    """Commit, and print what that cost against all weights."""
    from deltasync.checkpoint import open_checkpoint
    from deltasync.cli.folders import watch
    from deltasync.feed.log import Log
    from deltasync.store import opened

    if args.watch:
        watch(args, out)
        return
    require_unused(args, _WATCH_OPTIONS, without="--watch")
    full_bytes = open_checkpoint(args.checkpoint).weights.layout.nbytes
    began_s = time.perf_counter()
    with opened(args.url) as store:
        with out.bars() as progress:
            m = deltasync.publish(
                store,
                args.checkpoint,
                step=args.step,
                parent=args.parent,
                anchor=args.anchor,
                base=None if args.base is None else base_ref(args.base),
                trust_code=args.trust_code,
                require_fencing=args.require_fencing,
                must_exist=args.must_exist,
                progress=progress,
            )
        seconds = time.perf_counter() - began_s
        anchor = Log(store).anchor(m.version) if args.anchor and m.kind == "delta" else None
        full_url = store.url
    if out.is_json:
        anchor_bytes = None if anchor is None else anchor.nbytes
        cost = {"full_bytes": full_bytes, "anchor_bytes": anchor_bytes, "seconds": round(seconds, 3)}
        out.json({**manifest_json(m), **cost})
        return
    whole = f"all weights are {size_text(full_bytes)}"
    if m.kind != "base" and m.nbytes:
        whole += f", {ratio_text(m.nbytes, full_bytes)}"
    out.line(f"version {m.version}: {m.kind} of {size_text(m.nbytes)} in {duration_text(seconds)} ({whole})")
    fields = []
    if m.changed is not None:
        share = f"{number_text(m.changed)} of {number_text(m.elements)} elements ({share_text(m.changed, m.elements)})"
        fields.append(("changed", f"{share}, {bits_text(m.nbytes, m.changed)} bits each"))
    if anchor is not None:
        fields.append(("anchor", f"{size_text(anchor.nbytes)} added, for replicas that join late"))
    if m.version == 0:
        fields.append(("new feed", full_url))
    out.fields([*fields, ("digest", m.digest.hex)])


def base_ref(text: str) -> "BaseRef":
    """NAME or NAME@REVISION; a path has no revision, even if it contains an @."""
    name, at, revision = text.rpartition("@")
    is_path = text.startswith(("/", ".")) or not at
    return deltasync.BaseRef(text) if is_path else deltasync.BaseRef(name, revision)


def log_arguments(parser: Parser) -> None:
    parser.explain(
        "Prints when each was committed, how much changed, and the feed's size.",
        example="deltasync log s3://bucket/run-42",
    )
    parser.add_url()
    parser.add_argument("--all", action="store_true", help=f"list every version, not only the newest {ROWS_MAX}")


def log(args: argparse.Namespace, out: Output) -> None:
    """List the newest versions, or all."""
    from deltasync.feed.log import READ_THREADS
    from deltasync.parallel import each

    with opened_feed(args.url) as (log, head):
        first = 0 if args.all else max(0, head.version + 1 - ROWS_MAX)
        manifests = [*log.read_many(range(first, head.version)), head]
        # `prune` may delete one after it was listed.
        listed = each(log.anchor, log.anchors(start=first), waiting=READ_THREADS)
        added = [anchor for anchor in listed if anchor is not None]
        anchors = {anchor.version: anchor.nbytes for anchor in added}
        skips = log.skips(start=first)
        floor = log.floor()
        pins = [pin for pin in log.pins() if pin.version >= first]
        pruned = {m.version for m in manifests if m.version < floor} - {pin.version for pin in pins}
        payloads, stored_bytes = stored(log)
    if out.is_json:
        versions = [
            {
                **manifest_json(m),
                "has_anchor": m.version in anchors,
                "anchor_bytes": anchors.get(m.version),
                "pruned": m.version in pruned,
            }
            for m in manifests
        ]
        out.json(
            {
                "head": head.version,
                "floor": floor,
                "stored_bytes": stored_bytes,
                "stored_payloads": payloads,
                "versions": versions,
                "skips": [list(pair) for pair in skips],
                "pins": [pin.to_json() for pin in pins],
            }
        )
        return
    title = f"{len(manifests):,} of {count_text(head.version + 1, 'version')}; {feed_size_text(payloads, stored_bytes)}"
    if floor:
        title += f"; pruned before version {floor}"
    columns = (
        Column("version"),
        Column("kind", is_name=True),
        Column("step", rank=4),
        number_column("changed", rank=5),
        Column("share", "{:.3f} %".format, rank=2),
        Column("bytes", size_text),
        Column("anchor", size_text, rank=1),
        Column("committed (UTC)", rank=3),
        Column("digest", rank=6),
        Column("writer", rank=7),
    )
    rows = [
        (
            m.version,
            m.kind + (", pruned" if m.version in pruned else ""),
            m.step,
            m.changed,
            percent(m.changed, m.elements),
            m.nbytes,
            anchors.get(m.version),
            time_text(m.created_unix_s),
            m.digest.hex[:12],
            m.writer[:8],
        )
        for m in manifests
    ]
    out.table(title, columns, rows, faint=[i for i, m in enumerate(manifests) if m.version in pruned])
    for start, end in skips:
        out.line(f"skip from version {start} to {end}")
    for pin in pins:
        out.line(f"version {pin.version} is pinned as {pin.name}" + (f": {pin.note}" if pin.note else ""))


@contextmanager
def opened_feed(url: str) -> Iterator[tuple["Log", "Manifest"]]:
    """A feed and its newest version. NotFoundError if it has none: a mistyped URL must not look like an empty feed."""
    from deltasync.feed.log import Log
    from deltasync.store import opened

    with opened(url) as store:
        log = Log(store)
        yield log, log.require_head()


def stored(log: "Log") -> tuple[int, int]:
    """How many payloads of a feed are in the store, and their bytes: deltas, anchors and files beside the weights."""
    sizes = [item.nbytes for _, item in log.payloads()]
    return len(sizes), sum(sizes)


def feed_size_text(payloads: int, stored_bytes: int) -> str:
    """The size of a feed in words."""
    return f"{size_text(stored_bytes)} in {count_text(payloads, 'payload')}, anchors included"


def manifest_json(manifest: "Manifest") -> dict[str, Any]:
    """A manifest as the commands print it: the fields of docs/format.md, and the sum of its payloads."""
    return {**manifest.to_json(), "payload_bytes": manifest.nbytes}


def show_arguments(parser: Parser) -> None:
    parser.explain(
        "Without a version it describes the newest one.",
        example="deltasync show s3://bucket/run-42 17",
    )
    parser.add_url()
    parser.add_place(
        "version", version_or_name, optional=True, help="the version, or the name of a pin (default: the newest)"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="list its steps instead, from the capture to replicas that serve it"
    )


def show(args: argparse.Namespace, out: Output) -> None:
    """Print the manifest of a version, its anchor, and what a restore of it fetches; or its timeline."""
    from deltasync.feed.log import Log
    from deltasync.store import opened
    from deltasync.upkeep.restore import plan_restore

    with opened(args.url) as store:
        m, plan = plan_restore(store, version=args.version)
        anchor = Log(store).anchor(m.version)
        timeline = timeline_json(m, Log(store).heartbeats()) if args.timeline else None
    if out.is_json:
        out.json(
            {
                "manifest": manifest_json(m),
                "anchor": None if anchor is None else manifest_json(anchor),
                "restore": {"bytes": plan.nbytes, "edges": _edges_json(plan)},
                **({} if timeline is None else {"timeline": timeline}),
            }
        )
        return
    if timeline is not None:
        no_capture = "commit (no capture was recorded: a command, or an earlier release)"
        since = "capture" if timeline["has_capture"] else no_capture
        title = f"version {m.version} since its {since}; replicas by their own clocks"
        columns = (
            Column("where", is_name=True),
            Column("step", is_name=True),
            Column("began", "{:+.3f} s".format),
            Column("took", duration_text),
        )
        out.table(title, columns, [tuple(step.values()) for step in timeline["steps"]])
        return
    changed = (
        "-"
        if m.changed is None
        else f"{number_text(m.changed)} of {number_text(m.elements)} elements ({share_text(m.changed, m.elements)})"
    )
    fields = [
        ("version", f"{m.version} ({m.kind})"),
        ("step", or_dash(m.step)),
        ("parent", or_dash(m.parent)),
        ("parent digest", or_dash(m.parent_digest)),
        ("digest", m.digest.hex),
        ("layout", m.layout_sha256),
        ("changed", changed),
        ("writer", m.writer),
        ("committed", f"{time_text(m.created_unix_s)} UTC"),
        ("payloads", f"{number_text(len(m.payloads))}, {size_text(m.nbytes)}"),
        (
            "anchor",
            "-" if anchor is None else f"{count_text(len(anchor.payloads), 'shard')}, {size_text(anchor.nbytes)}",
        ),
    ]
    if m.base is not None:
        fields.append(("base", m.base.checkpoint + ("" if m.base.revision is None else f" @ {m.base.revision}")))
    out.fields([*fields, *sorted(m.extra.items())])
    _print_edges(out, f"a restore fetches {size_text(plan.nbytes)}", plan)


def timeline_json(manifest: "Manifest", heartbeats: Sequence["Heartbeat"]) -> dict[str, Any]:
    """The steps of a version, from its manifest and from the heartbeats of replicas whose last move led to it.

    `began_s` counts from the capture, or from the commit if no capture was recorded.
    """
    from deltasync.format.sealed import is_decimal
    from deltasync.replica.events import phase_seconds

    steps: list[dict[str, Any]] = []

    def add(where: str, step: str, began_s: float, took_s: float | None = None) -> None:
        steps.append({"where": where, "step": step, "began_s": began_s, "took_s": took_s})

    at_s, began_unix_ms, recorded = 0.0, 1000 * manifest.created_unix_s, manifest.timeline
    if recorded is not None:
        began_unix_ms = recorded.captured_unix_ms
        phases = {
            "capture": recorded.held_ms,
            "queue": recorded.queued_ms,
            "encode": recorded.encode_ms,
            "put": recorded.put_ms,
        }
        for phase, milliseconds in phases.items():
            add("trainer", phase, at_s, milliseconds / 1000)
            at_s += milliseconds / 1000
    add("trainer", "committed", at_s)
    for beat in heartbeats:
        moved, at = beat.facts.get("moved_version"), beat.facts.get("moved_unix_ms")
        if moved != str(manifest.version) or at is None or not is_decimal(at):
            continue
        # The phases of a move follow each other, and end when the version is live. The pause is part of another one.
        live_s, seconds = (int(at) - began_unix_ms) / 1000, phase_seconds(beat)
        at_s = live_s - sum(value for phase, value in seconds.items() if phase != "pause")
        for phase, value in seconds.items():
            if phase == "pause":
                add(beat.replica, phase, live_s - value, value)
            else:
                add(beat.replica, phase, at_s, value)
                at_s += value
        add(beat.replica, "live", live_s)
    return {
        "version": manifest.version,
        "has_capture": recorded is not None,
        "began_unix_ms": began_unix_ms,
        "steps": steps,
    }


def _edges_json(plan: "Plan") -> list[dict[str, Any]]:
    return [{"key": edge.key, "start": edge.start, "end": edge.end, "bytes": edge.nbytes} for edge in plan.edges]


def _print_edges(out: Output, title: str, plan: "Plan") -> None:
    columns = (Column("manifest", is_name=True), Column("from"), Column("to"), Column("bytes", size_text))
    out.table(title, columns, [(edge.key, edge.start, edge.end, edge.nbytes) for edge in plan.edges])


def verify_arguments(parser: Parser) -> None:
    parser.explain(
        "Reports damage, the versions that it costs, and those that can be restored.",
        example="deltasync verify s3://bucket/run-42 --deep",
    )
    parser.add_url()
    parser.add_argument("--deep", action="store_true", help="fetch and decode every payload, too")
    parser.add_base()
    parser.add_threads()


def verify(args: argparse.Namespace, out: Output) -> None:
    """Check a feed; an error if there is none, or if it is damaged."""
    with out.bars() as progress:
        result = deltasync.verify(args.url, deep=args.deep, base=args.base, progress=progress)
    if out.is_json:
        out.json(result.to_json())
    else:
        for damage in result.damages:
            cost = f"it costs {versions_text(damage.takes)}" if damage.takes else "no version needs it alone"
            out.line(f"damaged {damage.key}: {damage.error}; {cost}", indent="  ")
        for message in result.unchecked:
            out.line(f"not checked: {message}", indent="  ")
        if result.pruned:
            out.line(f"pruned: {versions_text(result.pruned)}", indent="  ")
        if result.lost:
            out.line(f"lost: {versions_text(result.lost)}", indent="  ")
        if result.orphans:
            payloads = f"{count_text(result.orphans, 'payload')} ({size_text(result.orphan_bytes)})"
            old = result.orphans - result.young_orphans
            out.line(
                f"not named by any manifest: {payloads}; `prune` removes {number_text(old)} of them, and leaves "
                f"{number_text(result.young_orphans)} that are younger than a day",
                indent="  ",
            )
        if result.restorable:
            state = "decoded and proved" if result.deep else "in place"
            count = count_text(len(result.restorable), "version")
            out.line(f"{count} {state}: {ranges_text(result.restorable)}", indent="  ")
        else:
            out.line("no version can be restored")
    sys.stdout.flush()
    if result.head is None:
        raise NotFoundError(
            f"there is no version in {args.url}",
            hint="check that this is the URL of a feed, and that something was published to it",
        )
    if not result.is_clean:
        damages, lost = count_text(len(result.damages), "damage"), count_text(len(result.lost), "version")
        raise CorruptError(
            f"{args.url}: {damages}, {lost} lost",
            hint="publish an anchor to go on, or put the damaged objects back from a copy of the store",
        )


def restore_arguments(parser: Parser) -> None:
    parser.explain(
        "The folder appears whole, after every bit of it is proved, or not at all.",
        example="deltasync restore s3://bucket/run-42 -o checkpoint --version 17",
    )
    parser.add_url()
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--version", type=version_or_name, metavar="N", help="the version, or the name of a pin (default: the newest)"
    )
    parser.add_base()
    parser.add_argument(
        "--no-files", action="store_true", help="write only the weights, without configuration and tokenizer"
    )
    parser.add_trust_code("write")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be fetched")
    parser.add_threads()


def restore(args: argparse.Namespace, out: Output) -> None:
    """Write a version as a folder, or list what that would fetch."""
    from deltasync.upkeep.restore import plan_restore

    if args.dry_run:
        m, plan = plan_restore(args.url, version=args.version)
        if out.is_json:
            out.json({"version": m.version, "digest": m.digest.hex, "edges": _edges_json(plan)})
        else:
            _print_edges(out, f"version {m.version}: {size_text(plan.nbytes)} to fetch", plan)
        return
    with out.bars() as progress:
        m = deltasync.restore(
            args.url,
            args.output,
            version=args.version,
            base=args.base,
            files=not args.no_files,
            trust_code=args.trust_code,
            progress=progress,
        )
    if out.is_json:
        out.json({"version": m.version, "step": m.step, "digest": m.digest.hex})
    else:
        out.line(f"{m.digest}  {args.output} (version {m.version})")
