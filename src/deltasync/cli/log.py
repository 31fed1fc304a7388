"""`deltasync log URL`."""

import argparse

from deltasync.cli.feed import add_url, feed, manifest_json, time_text
from deltasync.cli.options import Commands, add_json
from deltasync.cli.output import print_json, print_table, share_text, size_text
from deltasync.format.manifest import Manifest
from deltasync.log.log import Log

_ROWS = 20


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("log", help="list the versions of a feed", description=__doc__)
    add_url(parser)
    parser.add_argument("--all", action="store_true", help=f"list every version, not the newest {_ROWS}")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
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
