"""`deltasync show URL VERSION`."""

import argparse

from deltasync.cli.feed import add_url, feed, manifest_json, time_text, whole_number
from deltasync.cli.options import Commands, add_json
from deltasync.cli.output import print_fields, print_json, print_table, share_text, size_text
from deltasync.log.log import Log
from deltasync.restore import plan_restore


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("show", help="say what one version is, and how to get there", description=__doc__)
    add_url(parser)
    parser.add_argument("version", type=whole_number, metavar="VERSION", help="the version")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
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
