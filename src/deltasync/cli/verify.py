"""`deltasync verify URL`."""

import argparse
import sys

from deltasync.cli.feed import add_base, add_url, feed, ranges_text
from deltasync.cli.options import Commands, add_json, add_threads
from deltasync.cli.output import plain, print_json, size_text
from deltasync.cli.progress import bars
from deltasync.errors import CorruptError, NotFoundError
from deltasync.verify import Verification, verify


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("verify", help="check every version of a feed", description=__doc__)
    add_url(parser)
    parser.add_argument("--deep", action="store_true", help="fetch and decode everything, not the manifests alone")
    add_base(parser)
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print what is damaged and what it costs; exit with 3 if anything is."""
    with feed(args.url) as store, bars() as progress:
        found = verify(store, deep=args.deep, base=args.base, threads=args.threads, progress=progress)
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
    for told in found.unchecked:
        print(f"not checked: {plain(told)}")
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
