"""Commands on feeds: publish, log, show, verify, restore."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deltasync.checkpoint import open_checkpoint
from deltasync.cli.folders import watch
from deltasync.cli.output import ROWS_MAX, Column, Output, number_column
from deltasync.cli.parser import require_unused
from deltasync.cli.units import (
    bits_text,
    count_text,
    duration_text,
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
from deltasync.errors import CorruptError, NotFoundError
from deltasync.feed.log import READ_THREADS, Log
from deltasync.feed.plan import Plan
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.sealed import Heartbeat, is_decimal
from deltasync.parallel import each
from deltasync.replica.events import phase_seconds
from deltasync.store import opened
from deltasync.trainer.checkpoint import publish as commit
from deltasync.upkeep.restore import plan_restore
from deltasync.upkeep.restore import restore as write
from deltasync.upkeep.verify import Verification
from deltasync.upkeep.verify import verify as check

_WATCH_OPTIONS = ("once", "after", "marker", "settle_s", "shadow", "keep_anchors", "keep_versions")


def publish(args: argparse.Namespace, out: Output) -> None:
    """Commit, and print what that cost against all weights."""
    if args.watch:
        watch(args, out)
        return
    require_unused(args, _WATCH_OPTIONS, without="--watch")
    full_bytes = open_checkpoint(args.checkpoint).weights.layout.nbytes
    began_s = time.perf_counter()
    with opened(args.url) as store:
        with out.bars() as progress:
            m = commit(
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


def base_ref(text: str) -> BaseRef:
    """NAME or NAME@REVISION; a path has no revision, even if it contains an @."""
    name, at, revision = text.rpartition("@")
    return BaseRef(text) if text.startswith(("/", ".")) or not at else BaseRef(name, revision)


def log(args: argparse.Namespace, out: Output) -> None:
    """List the newest versions, or all."""
    with opened(args.url) as store:
        log = Log(store)
        head = log.require_head()
        first = 0 if args.all else max(0, head.version + 1 - ROWS_MAX)
        manifests = [*log.read_many(range(first, head.version)), head]
        # `prune` may delete one after it was listed.
        listed = each(log.anchor, log.anchors(start=first), waiting=READ_THREADS)
        added = [anchor for anchor in listed if anchor is not None]
        anchors = {anchor.version: anchor.nbytes for anchor in added}
        skips = log.skips(start=first)
        floor = log.floor()
        pins = [pin for pin in log.pins() if pin.version >= first]
        pinned = {pin.version for pin in pins}
        payloads, stored_bytes = stored(log)
    if out.is_json:
        versions = [
            {
                **manifest_json(m),
                "has_anchor": m.version in anchors,
                "anchor_bytes": anchors.get(m.version),
                "pruned": m.version < floor and m.version not in pinned,
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
    pruned = {m.version for m in manifests if m.version < floor and m.version not in pinned}
    rows = [_log_row(m, anchors.get(m.version), pruned=m.version in pruned) for m in manifests]
    out.table(title, columns, rows, faint=[i for i, m in enumerate(manifests) if m.version in pruned])
    for start, end in skips:
        out.line(f"skip from version {start} to {end}")
    for pin in pins:
        out.line(f"version {pin.version} is pinned as {pin.name}" + (f": {pin.note}" if pin.note else ""))


def _log_row(m: Manifest, anchor_bytes: int | None, *, pruned: bool) -> tuple[Any, ...]:
    return (
        m.version,
        m.kind + (", pruned" if pruned else ""),
        m.step,
        m.changed,
        percent(m.changed, m.elements),
        m.nbytes,
        anchor_bytes,
        time_text(m.created_unix_s),
        m.digest.hex[:12],
        m.writer[:8],
    )


def stored(log: Log) -> tuple[int, int]:
    """How many payloads of a feed are in the store, and their bytes: deltas, anchors and files beside the weights."""
    sizes = [item.nbytes for _, item in log.payloads()]
    return len(sizes), sum(sizes)


def feed_size_text(payloads: int, stored_bytes: int) -> str:
    """The size of a feed in words."""
    return f"{size_text(stored_bytes)} in {count_text(payloads, 'payload')}, anchors included"


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as the commands print it: the fields of docs/format.md, and the sum of its payloads."""
    return {**manifest.to_json(), "payload_bytes": manifest.nbytes}


def show(args: argparse.Namespace, out: Output) -> None:
    """Print the manifest of a version, its anchor, and what a restore of it fetches."""
    with opened(args.url) as store:
        m, plan = plan_restore(store, version=args.version)
        anchor = Log(store).anchor(m.version)
        timeline = VersionTimeline.of(m, Log(store).heartbeats()) if args.timeline else None
    if out.is_json:
        out.json(
            {
                "manifest": manifest_json(m),
                "anchor": None if anchor is None else manifest_json(anchor),
                "restore": {"bytes": plan.nbytes, "edges": _edges_json(plan)},
                **({} if timeline is None else {"timeline": timeline.to_json()}),
            }
        )
        return
    if timeline is not None:
        timeline.print(out)
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


_TIMELINE_COLUMNS = (
    Column("where", is_name=True),
    Column("step", is_name=True),
    Column("began", "{:+.3f} s".format),
    Column("took", duration_text),
)
_INSIDE = ("pause",)
"""Phases that are part of another one."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One step on the way of a version. `began_s` counts from the beginning of the timeline."""

    where: str
    step: str
    began_s: float
    took_s: float | None = None


@dataclass(frozen=True, slots=True)
class VersionTimeline:
    """The steps of one version. It begins with the capture, or with the commit if no capture was recorded."""

    version: int
    has_capture: bool
    began_unix_ms: int
    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, manifest: Manifest, heartbeats: Sequence[Heartbeat]) -> "VersionTimeline":
        """From a manifest, and from the heartbeats of replicas whose last move led to its version."""
        recorded = manifest.timeline
        began_unix_ms = 1000 * manifest.created_unix_s if recorded is None else recorded.captured_unix_ms
        steps = list(_trainer_steps(manifest))
        for beat in heartbeats:
            moved, at = beat.facts.get("moved_version"), beat.facts.get("moved_unix_ms")
            if moved == str(manifest.version) and at is not None and is_decimal(at):
                steps += _replica_steps(beat, (int(at) - began_unix_ms) / 1000)
        return cls(manifest.version, recorded is not None, began_unix_ms, tuple(steps))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "steps": [asdict(step) for step in self.steps]}

    def print(self, out: Output) -> None:
        """As a table."""
        since = "capture" if self.has_capture else "commit (no capture was recorded: a command, or an earlier release)"
        title = f"version {self.version} since its {since}; replicas by their own clocks"
        out.table(title, _TIMELINE_COLUMNS, [(s.where, s.step, s.began_s, s.took_s) for s in self.steps])


def _trainer_steps(manifest: Manifest) -> Iterator[_Step]:
    at_s = 0.0
    if manifest.timeline is not None:
        t = manifest.timeline
        phases = (("capture", t.held_ms), ("queue", t.queued_ms), ("encode", t.encode_ms), ("put", t.put_ms))
        for name, milliseconds in phases:
            yield _Step("trainer", name, at_s, milliseconds / 1000)
            at_s += milliseconds / 1000
    yield _Step("trainer", "committed", at_s)


def _replica_steps(beat: Heartbeat, live_s: float) -> Iterator[_Step]:
    """The phases of a move, one after the other, which ended when the version was live."""
    seconds = phase_seconds(beat)
    at_s = live_s - sum(value for phase, value in seconds.items() if phase not in _INSIDE)
    for phase, value in seconds.items():
        if phase in _INSIDE:
            yield _Step(beat.replica, phase, live_s - value, value)
        else:
            yield _Step(beat.replica, phase, at_s, value)
            at_s += value
    yield _Step(beat.replica, "live", live_s)


def _edges_json(plan: Plan) -> list[dict[str, Any]]:
    return [{"key": edge.key, "start": edge.start, "end": edge.end, "bytes": edge.nbytes} for edge in plan.edges]


def _print_edges(out: Output, title: str, plan: Plan) -> None:
    columns = (Column("manifest", is_name=True), Column("from"), Column("to"), Column("bytes", size_text))
    out.table(title, columns, [(edge.key, edge.start, edge.end, edge.nbytes) for edge in plan.edges])


def verify(args: argparse.Namespace, out: Output) -> None:
    """Check a feed; an error if there is none, or if it is damaged."""
    with out.bars() as progress:
        result = check(args.url, deep=args.deep, base=args.base, progress=progress)
    if out.is_json:
        out.json(result.to_json())
    else:
        _print_verification(out, result)
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


def _print_verification(out: Output, result: Verification) -> None:
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


def restore(args: argparse.Namespace, out: Output) -> None:
    """Write a version as a folder, or list what that would fetch."""
    if args.dry_run:
        m, plan = plan_restore(args.url, version=args.version)
        if out.is_json:
            out.json({"version": m.version, "digest": m.digest.hex, "edges": _edges_json(plan)})
        else:
            _print_edges(out, f"version {m.version}: {size_text(plan.nbytes)} to fetch", plan)
        return
    with out.bars() as progress:
        m = write(
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
