"""`deltasync prune URL --keep-anchors N --keep-versions N`."""

import argparse

from deltasync.cli.feed import add_url, feed
from deltasync.cli.options import Commands, add_json, positive
from deltasync.cli.output import print_json, size_text
from deltasync.prune import plan_prune, prune


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("prune", help="give up old versions", description=__doc__)
    add_url(parser)
    parser.add_argument("--keep-anchors", type=positive, required=True, metavar="N", help="anchors to keep at least")
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="versions that stay restorable at least"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
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
