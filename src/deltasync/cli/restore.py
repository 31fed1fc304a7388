"""`deltasync restore URL -o DIR`."""

import argparse
from pathlib import Path

from deltasync.cli.feed import add_base, add_url, add_version, feed
from deltasync.cli.options import Commands, add_json, add_threads
from deltasync.cli.output import print_json, print_table, size_text
from deltasync.cli.progress import bars
from deltasync.restore import plan_restore, restore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("restore", help="write a version as a checkpoint folder", description=__doc__)
    add_url(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    add_version(parser)
    add_base(parser)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be fetched")
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
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
            manifest = restore(
                store, args.output, version=args.version, base=args.base, threads=args.threads, progress=progress
            )
    if args.json:
        print_json({"version": manifest.version, "step": manifest.step, "digest": manifest.digest.hex})
    else:
        print(f"{manifest.digest}  {args.output} (version {manifest.version})")
