"""Commands on feeds: publish, log, show, verify, restore, prune."""

import argparse
import sys
from pathlib import Path
from typing import Any

from deltasync.cli.common import (
    Commands,
    add_base,
    add_command,
    add_json,
    add_threads,
    add_url,
    bars,
    count_text,
    manifest_json,
    or_dash,
    plain,
    positive,
    print_fields,
    print_json,
    print_table,
    ranges_text,
    share_text,
    size_text,
    time_text,
    versions_text,
    whole_number,
)
from deltasync.errors import CorruptError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.plan import Plan
from deltasync.feed.prune import plan_prune, prune
from deltasync.feed.replay import plan_restore, restore
from deltasync.feed.verify import Verification, verify
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.store import opened
from deltasync.trainer.checkpoint import publish

_ROWS_MAX = 20


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_publish(commands)
    _add_log(commands)
    _add_show(commands)
    _add_verify(commands)
    _add_restore(commands)
    _add_prune(commands)


def _add_publish(commands: Commands) -> None:
    parser = add_command(commands, "publish", _publish, "Commit a checkpoint as the next version of a feed.")
    add_url(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
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
    parser.add_argument(
        "--require-fencing", action="store_true", help="refuse a store that cannot keep two writers apart"
    )
    add_json(parser)
    add_threads(parser)


def _publish(args: argparse.Namespace) -> None:
    with bars() as progress:
        m = publish(
            args.url,
            args.checkpoint,
            step=args.step,
            parent=args.parent,
            anchor=args.anchor,
            base=None if args.base is None else base_ref(args.base),
            require_fencing=args.require_fencing,
            progress=progress,
        )
    if args.json:
        print_json(manifest_json(m))
        return
    changed = "" if m.changed is None else f", {m.changed} elements changed ({share_text(m.changed, m.elements)})"
    print(f"version {m.version}: {m.kind} of {size_text(m.nbytes)}{changed}, digest {m.digest}")


def base_ref(text: str) -> BaseRef:
    """NAME or NAME@REVISION; a path has no revision, even if it contains an @."""
    name, at, revision = text.rpartition("@")
    return BaseRef(text) if text.startswith(("/", ".")) or not at else BaseRef(name, revision)


def _add_log(commands: Commands) -> None:
    parser = add_command(commands, "log", _log, "List the versions of a feed.")
    add_url(parser)
    parser.add_argument("--all", action="store_true", help=f"list every version, not only the newest {_ROWS_MAX}")
    add_json(parser)


def _log(args: argparse.Namespace) -> None:
    with opened(args.url) as store:
        log = Log(store)
        head = log.require_head()
        first = 0 if args.all else max(0, head.version + 1 - _ROWS_MAX)
        manifests = [*log.read_many(range(first, head.version)), head]
        anchors = {version for version in log.anchors() if version >= first}
        skips = [pair for pair in log.skips() if pair[0] >= first]
        floor = log.floor()
    if args.json:
        print_json(
            {
                "head": head.version,
                "floor": floor,
                "versions": [{**manifest_json(m), "has_anchor": m.version in anchors} for m in manifests],
                "skips": [list(pair) for pair in skips],
            }
        )
        return
    title = f"{len(manifests)} of {count_text(head.version + 1, 'version')}"
    if floor:
        title += f", pruned before {floor}"
    columns = ("version", "kind", "step", "changed", "share", "bytes", "digest", "writer", "committed (UTC)")
    print_table(title, columns, [_log_row(m, has_anchor=m.version in anchors) for m in manifests])
    for start, end in skips:
        print(f"skip from version {start} to {end}")


def _log_row(m: Manifest, *, has_anchor: bool) -> tuple[str, ...]:
    return (
        str(m.version),
        f"{m.kind} + anchor" if has_anchor else m.kind,
        or_dash(m.step),
        or_dash(m.changed),
        "-" if m.changed is None else share_text(m.changed, m.elements),
        size_text(m.nbytes),
        m.digest.hex[:12],
        m.writer[:8],
        time_text(m.created_unix_s),
    )


def _add_show(commands: Commands) -> None:
    parser = add_command(commands, "show", _show, "Describe one version, and list what a restore of it fetches.")
    add_url(parser)
    parser.add_argument("version", type=whole_number, metavar="VERSION", help="the version")
    add_json(parser)


def _show(args: argparse.Namespace) -> None:
    with opened(args.url) as store:
        m, plan = plan_restore(store, version=args.version)
        anchor = Log(store).anchor(args.version)
    if args.json:
        print_json(
            {
                "manifest": manifest_json(m),
                "anchor": None if anchor is None else manifest_json(anchor),
                "restore": {"bytes": plan.nbytes, "edges": _edges_json(plan)},
            }
        )
        return
    fields = [
        ("version", f"{m.version} ({m.kind})"),
        ("step", or_dash(m.step)),
        ("parent", or_dash(m.parent)),
        ("parent digest", or_dash(m.parent_digest)),
        ("digest", m.digest.hex),
        ("layout sha256", m.layout_sha256),
        ("changed", "-" if m.changed is None else f"{m.changed} elements ({share_text(m.changed, m.elements)})"),
        ("writer", m.writer),
        ("committed", f"{time_text(m.created_unix_s)} UTC"),
        ("payloads", f"{len(m.payloads)}, {size_text(m.nbytes)}"),
        (
            "anchor",
            "-" if anchor is None else f"{count_text(len(anchor.payloads), 'shard')}, {size_text(anchor.nbytes)}",
        ),
    ]
    if m.base is not None:
        fields.append(("base", m.base.checkpoint + ("" if m.base.revision is None else f" @ {m.base.revision}")))
    print_fields([*fields, *sorted(m.extra.items())])
    _print_edges(f"restore fetches {size_text(plan.nbytes)}", plan)


def _edges_json(plan: Plan) -> list[dict[str, Any]]:
    return [{"key": edge.key, "start": edge.start, "end": edge.end, "bytes": edge.nbytes} for edge in plan.edges]


def _print_edges(title: str, plan: Plan) -> None:
    rows = [(edge.key, or_dash(edge.start), str(edge.end), size_text(edge.nbytes)) for edge in plan.edges]
    print_table(title, ("manifest", "from", "to", "bytes"), rows)


def _add_verify(commands: Commands) -> None:
    parser = add_command(commands, "verify", _verify, "Check every version of a feed.")
    add_url(parser)
    parser.add_argument("--deep", action="store_true", help="fetch and decode every payload, too")
    add_base(parser)
    add_json(parser)
    add_threads(parser)


def _verify(args: argparse.Namespace) -> None:
    with bars() as progress:
        result = verify(args.url, deep=args.deep, base=args.base, progress=progress)
    if args.json:
        print_json(result.to_json())
    else:
        _print_verification(result)
    sys.stdout.flush()
    if result.head is None:
        raise NotFoundError(f"there is no version in {args.url}", hint="is this the URL of a feed?")
    if not result.is_clean:
        damages, lost = count_text(len(result.damages), "damage"), count_text(len(result.lost), "version")
        raise CorruptError(
            f"{args.url}: {damages}, {lost} lost",
            hint="publish an anchor to go on, or put the damaged objects back from a copy of the store",
        )


def _print_verification(result: Verification) -> None:
    for damage in result.damages:
        cost = f"it costs {versions_text(damage.takes)}" if damage.takes else "no version needs it alone"
        print(f"damaged {plain(damage.key)}: {plain(str(damage.error))}; {cost}")
    for message in result.unchecked:
        print(f"not checked: {plain(message)}")
    if result.pruned:
        print(f"pruned: {versions_text(result.pruned)}")
    if result.lost:
        print(f"lost: {versions_text(result.lost)}")
    if result.orphans:
        payloads = f"{count_text(result.orphans, 'payload')} ({size_text(result.orphan_bytes)})"
        print(f"not named by any manifest: {payloads}, which `prune` removes")
    if result.restorable:
        state = "decoded and proved" if result.deep else "in place"
        print(f"{count_text(len(result.restorable), 'version')} {state}: {ranges_text(result.restorable)}")
    else:
        print("no version can be restored")


def _add_restore(commands: Commands) -> None:
    parser = add_command(commands, "restore", _restore, "Write a version as a checkpoint folder.")
    add_url(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    parser.add_argument("--version", type=whole_number, metavar="N", help="the version (default: the newest)")
    add_base(parser)
    parser.add_argument("--dry-run", action="store_true", help="only list what would be fetched")
    add_json(parser)
    add_threads(parser)


def _restore(args: argparse.Namespace) -> None:
    if args.dry_run:
        m, plan = plan_restore(args.url, version=args.version)
        if args.json:
            print_json({"version": m.version, "digest": m.digest.hex, "edges": _edges_json(plan)})
        else:
            _print_edges(f"version {m.version}: {size_text(plan.nbytes)} to fetch", plan)
        return
    with bars() as progress:
        m = restore(args.url, args.output, version=args.version, base=args.base, progress=progress)
    if args.json:
        print_json({"version": m.version, "step": m.step, "digest": m.digest.hex})
    else:
        print(f"{m.digest}  {args.output} (version {m.version})")


def _add_prune(commands: Commands) -> None:
    parser = add_command(commands, "prune", _prune, "Delete the payloads of old versions.")
    add_url(parser)
    parser.add_argument(
        "--keep-anchors", type=positive, required=True, metavar="N", help="keep at least this many anchors"
    )
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="keep at least this many versions restorable"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    add_json(parser)


def _prune(args: argparse.Namespace) -> None:
    with opened(args.url) as store:
        pruning = plan_prune(store, keep_anchors=args.keep_anchors, keep_versions=args.keep_versions)
        if args.yes:
            prune(store, pruning)
    if args.json:
        print_json({**pruning.to_json(), "deleted": args.yes})
        return
    for key in pruning.keys:
        print(key)
    for replica in pruning.held_by:
        print(f"replica {replica} is behind: the deltas that it needs stay")
    done = "deleted" if args.yes else "to delete (nothing was deleted: pass --yes)"
    objects = f"{count_text(len(pruning.keys), 'object')}, {size_text(pruning.payload_bytes)}"
    print(f"{objects} {done}; versions from {pruning.floor} on stay")
