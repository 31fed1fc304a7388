"""Commands on feeds: publish, log, show, verify, restore, prune."""

import argparse
import sys
from pathlib import Path

from deltasync.cli.common import (
    Commands,
    add_base,
    add_json,
    add_threads,
    add_url,
    add_version,
    bars,
    feed,
    manifest_json,
    plain,
    positive,
    print_fields,
    print_json,
    print_table,
    ranges_text,
    share_text,
    size_text,
    time_text,
    whole_number,
)
from deltasync.errors import CorruptError, NotFoundError
from deltasync.feed.log import Log
from deltasync.feed.prune import plan_prune, prune
from deltasync.feed.replay import plan_restore, restore
from deltasync.feed.verify import Verification, verify
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.trainer.checkpoint import publish


def register(commands: Commands) -> None:
    """Add the commands of this module to the parser."""
    for add in (register_publish, register_log, register_show, register_verify, register_restore, register_prune):
        add(commands)


def register_publish(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("publish", help="commit a checkpoint as the next version")
    add_url(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
    parser.add_argument("--step", type=whole_number, metavar="N", help="the trainer's step, for people")
    parser.add_argument(
        "--parent",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint that was published last (else it is rebuilt from the feed)",
    )
    parser.add_argument(
        "--anchor", action="store_true", help="add all weights, for late joiners; also for another set of tensors"
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
    parser.set_defaults(run=run_publish)


def run_publish(args: argparse.Namespace) -> None:
    """Commit, and say what it took."""
    with feed(args.url) as store, bars() as progress:
        m = publish(
            store,
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
    """NAME or NAME@REVISION; a path has no revision, whatever is in it."""
    name, at, revision = text.rpartition("@")
    return BaseRef(text) if text.startswith(("/", ".")) or not at else BaseRef(name, revision)


_ROWS = 20


def register_log(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("log", help="list the versions of a feed")
    add_url(parser)
    parser.add_argument("--all", action="store_true", help=f"list every version, not the newest {_ROWS}")
    add_json(parser)
    parser.set_defaults(run=run_log)


def run_log(args: argparse.Namespace) -> None:
    """Print the versions, the newest last, with the anchors and skips between them."""
    with feed(args.url) as store:
        log = Log(store)
        head = log.require_head()
        first = 0 if args.all else max(0, head.version + 1 - _ROWS)
        manifests = [*log.read_many(range(first, head.version)), head]
        anchors = {v for v in log.anchors() if v >= first}
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
    title = f"{len(manifests)} of {head.version + 1} versions" + (f", pruned before {floor}" if floor else "")
    columns = ("version", "kind", "step", "changed", "share", "bytes", "digest", "writer", "committed (UTC)")
    print_table(title, columns, [_row(m, with_anchor=m.version in anchors) for m in manifests])
    for start, end in skips:
        print(f"skip from version {start} to {end}")


def _row(m: Manifest, *, with_anchor: bool) -> tuple[str, ...]:
    return (
        str(m.version),
        f"{m.kind} + anchor" if with_anchor else m.kind,
        "-" if m.step is None else str(m.step),
        "-" if m.changed is None else str(m.changed),
        "-" if m.changed is None else share_text(m.changed, m.elements),
        size_text(m.nbytes),
        m.digest.hex[:12],
        m.writer[:8],
        time_text(m.created_unix_s),
    )


def register_show(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("show", help="say what one version is, and how to get there")
    add_url(parser)
    parser.add_argument("version", type=whole_number, metavar="VERSION", help="the version")
    add_json(parser)
    parser.set_defaults(run=run_show)


def run_show(args: argparse.Namespace) -> None:
    """Print the manifest, and the cheapest way to the version from nothing."""
    with feed(args.url) as store:
        manifest, plan = plan_restore(store, version=args.version)
        anchor = Log(store).anchor(args.version)
    if args.json:
        print_json(
            {
                "manifest": manifest_json(manifest),
                "anchor": None if anchor is None else manifest_json(anchor),
                "restore": {
                    "bytes": plan.nbytes,
                    "edges": [{"key": e.key, "start": e.start, "end": e.end, "bytes": e.nbytes} for e in plan.edges],
                },
            }
        )
        return
    m = manifest
    fields = [
        ("version", f"{m.version} ({m.kind})"),
        ("step", "-" if m.step is None else str(m.step)),
        ("parent", "-" if m.parent is None else str(m.parent)),
        ("parent digest", "-" if m.parent_digest is None else m.parent_digest.hex),
        ("digest", m.digest.hex),
        ("layout sha256", m.layout_sha256),
        ("changed", "-" if m.changed is None else f"{m.changed} elements ({share_text(m.changed, m.elements)})"),
        ("writer", m.writer),
        ("committed", f"{time_text(m.created_unix_s)} UTC"),
        ("payloads", f"{len(m.payloads)}, {size_text(m.nbytes)}"),
        ("anchor", "-" if anchor is None else f"{len(anchor.payloads)} shards, {size_text(anchor.nbytes)}"),
    ]
    if m.base is not None:
        fields.append(("base", m.base.checkpoint + ("" if m.base.revision is None else f" @ {m.base.revision}")))
    print_fields([*fields, *sorted(m.extra.items())])
    rows = [(e.key, "-" if e.start is None else str(e.start), str(e.end), size_text(e.nbytes)) for e in plan.edges]
    print_table(f"restore fetches {size_text(plan.nbytes)}", ("manifest", "from", "to", "bytes"), rows)


def register_verify(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("verify", help="check every version of a feed")
    add_url(parser)
    parser.add_argument("--deep", action="store_true", help="fetch and decode everything, not the manifests alone")
    add_base(parser)
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run_verify)


def run_verify(args: argparse.Namespace) -> None:
    """Print what is damaged and what it costs; exit with 3 if anything is."""
    with feed(args.url) as store, bars() as progress:
        found = verify(store, deep=args.deep, base=args.base, progress=progress)
    if args.json:
        print_json(found.to_json())
    else:
        _print(found)
    sys.stdout.flush()
    if found.head is None:
        raise NotFoundError(f"there is no version in {args.url}", hint="is this the URL of a feed?")
    if not found.is_clean:
        count = len(found.damages)
        raise CorruptError(
            f"{args.url}: {count} damages, {len(found.lost)} versions lost",
            hint="publish an anchor to go on, or put the damaged objects back from a copy of the store",
        )


def _print(found: Verification) -> None:
    for damage in found.damages:
        takes = f"; takes version {ranges_text(damage.takes)}" if damage.takes else "; no version needs it alone"
        print(f"damaged {plain(damage.key)}: {plain(str(damage.error))}{takes}")
    for message in found.unchecked:
        print(f"not checked: {plain(message)}")
    if found.pruned:
        print(f"pruned: version {ranges_text(found.pruned)}")
    if found.lost:
        print(f"lost: version {ranges_text(found.lost)}")
    if found.orphans:
        print(
            f"{found.orphans} payloads ({size_text(found.orphan_bytes)}) that no manifest names: `prune` removes them"
        )
    how = "decoded and proved" if found.deep else "in place"
    good = ranges_text(found.restorable)
    print(f"{len(found.restorable)} versions {how}: {good}" if good else "no version can be restored")


def register_restore(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("restore", help="write a version as a checkpoint folder")
    add_url(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    add_version(parser)
    add_base(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be fetched")
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run_restore)


def run_restore(args: argparse.Namespace) -> None:
    """Write the checkpoint, whole or not at all, and print its digest."""
    with feed(args.url) as store:
        if args.dry_run:
            manifest, plan = plan_restore(store, version=args.version)
            edges = [{"key": e.key, "start": e.start, "end": e.end, "bytes": e.nbytes} for e in plan.edges]
            if args.json:
                print_json({"version": manifest.version, "digest": manifest.digest.hex, "edges": edges})
                return
            rows = [
                (e.key, "-" if e.start is None else str(e.start), str(e.end), size_text(e.nbytes)) for e in plan.edges
            ]
            title = f"version {manifest.version}: {size_text(plan.nbytes)} to fetch"
            print_table(title, ("manifest", "from", "to", "bytes"), rows)
            return
        with bars() as progress:
            manifest = restore(store, args.output, version=args.version, base=args.base, progress=progress)
    if args.json:
        print_json({"version": manifest.version, "step": manifest.step, "digest": manifest.digest.hex})
    else:
        print(f"{manifest.digest}  {args.output} (version {manifest.version})")


def register_prune(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("prune", help="give up old versions")
    add_url(parser)
    parser.add_argument("--keep-anchors", type=positive, required=True, metavar="N", help="anchors to keep at least")
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="versions that stay restorable at least"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    add_json(parser)
    parser.set_defaults(run=run_prune)


def run_prune(args: argparse.Namespace) -> None:
    """Print what goes, and delete it with `--yes`."""
    with feed(args.url) as store:
        found = plan_prune(store, keep_anchors=args.keep_anchors, keep_versions=args.keep_versions)
        if args.yes:
            prune(store, found)
    if args.json:
        print_json({**found.to_json(), "deleted": args.yes})
        return
    for key in found.keys:
        print(key)
    for replica in found.held_by:
        print(f"replica {replica} is behind: the deltas that it needs stay")
    done = "deleted" if args.yes else "to delete (nothing was deleted: say --yes)"
    print(f"{len(found.keys)} objects, {size_text(found.payload_bytes)} {done}; versions from {found.floor} on stay")
