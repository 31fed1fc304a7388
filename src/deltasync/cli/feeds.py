"""Commands on feeds: publish, log, show, verify, restore, prune, compact."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

from deltasync.checkpoint import open_checkpoint
from deltasync.cli.folders import watch
from deltasync.cli.follow import calling_on_signal
from deltasync.cli.listen import listening, require_address
from deltasync.cli.output import ROWS_MAX, Column, Output, number_column
from deltasync.cli.timeline import VersionTimeline
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
from deltasync.errors import CorruptError, InvalidInputError, NotFoundError
from deltasync.feed.compact import LEVELS, Compactor
from deltasync.feed.log import READ_THREADS, Log, manifest_key
from deltasync.feed.metrics import Role, UpkeepCollector
from deltasync.feed.plan import Plan
from deltasync.feed.prune import Pruner, Pruning, Retention, plan_prune
from deltasync.feed.prune import prune as delete
from deltasync.feed.replay import plan_restore
from deltasync.feed.replay import restore as write
from deltasync.feed.upkeep import Upkeep
from deltasync.feed.verify import Verification
from deltasync.feed.verify import verify as check
from deltasync.format import keys
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.parallel import each
from deltasync.replica.loop import Loop
from deltasync.store import opened
from deltasync.store.protocol import Store
from deltasync.trainer.checkpoint import publish as commit

_WATCH_OPTIONS = ("once", "after", "marker", "shadow", "keep_anchors", "keep_versions")


def publish(args: argparse.Namespace, out: Output) -> None:
    """Commit, and print what that cost against all weights."""
    if args.watch:
        watch(args, out)
        return
    if unused := next((option for option in _WATCH_OPTIONS if getattr(args, option) not in (None, False)), None):
        option = unused.replace("_", "-")
        raise InvalidInputError(f"--{option} has no effect without --watch", hint="add --watch, or leave it out")
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
        payloads, stored_bytes = stored(store)
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


def stored(store: Store) -> tuple[int, int]:
    """How many payloads of a feed are in the store, and their bytes: deltas, anchors and files beside the weights."""
    sizes = [item.nbytes for item in store.list(keys.PAYLOADS)]
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
            _run_until_signal(loop, step)


def _upkeep_listening(
    args: argparse.Namespace, out: Output, role: Role, upkeep: Upkeep
) -> AbstractContextManager[None]:
    collector = UpkeepCollector(role, {(): upkeep})
    return listening(args, out, lambda: upkeep, collector, why_not_ready=upkeep.why_not_ready)


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
    sys.stdout.flush()


def _run_until_signal(loop: Loop, step: Callable[[], bool]) -> None:
    """Run the loop in a thread of its own: a signal handler that runs in this one must not meet a lock of the loop."""
    with ThreadPoolExecutor(1) as pool, calling_on_signal(loop.stop):
        pool.submit(loop.run, step, lambda error: None).result()


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
                if not out.is_json:
                    _print_skip(out, skip)
                elif args.follow:
                    out.json_line(_skip_json(skip))
                if loop.is_stopping:
                    break
            return len(written) > before

        if args.follow:
            with _upkeep_listening(args, out, "compactor", compactor.upkeep):
                _run_until_signal(loop, step)
        else:
            step()
    if not out.is_json:
        out.line(f"{count_text(len(written), 'skip')} written")
    elif not args.follow:
        out.json({"skips": [_skip_json(skip) for skip in written]})


def _skip_json(skip: Manifest) -> dict[str, Any]:
    return {**manifest_json(skip), "key": manifest_key(skip)}


def _print_skip(out: Output, skip: Manifest) -> None:
    changed = f"{number_text(skip.changed or 0)} elements ({share_text(skip.changed or 0, skip.elements)})"
    out.line(f"skip from version {skip.parent} to {skip.version}: {changed}, {size_text(skip.nbytes)}", indent="  ")
    sys.stdout.flush()
