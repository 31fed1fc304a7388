"""`deltasync inspect FILE`."""

import argparse

from deltasync.cli.options import Commands, add_json
from deltasync.cli.output import bits_text, print_fields, print_json, print_table, share_text, size_text
from deltasync.inspection import Inspection, inspect

_ROWS_MAX = 20


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("inspect", help="say what a payload holds", description=__doc__)
    parser.add_argument("file", metavar="FILE", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "--all", action="store_true", help=f"list every block and tensor, not the {_ROWS_MAX} most changed"
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print a summary, a table of codecs, one of blocks and one of tensors; or everything as JSON."""
    found = inspect(args.file)
    if args.json:
        print_json(found.to_json())
        return
    _print_summary(args.file, found)
    _print_codecs(found)
    rows_max = None if args.all else _ROWS_MAX
    _print_blocks(found, rows_max)
    _print_tensors(found, rows_max)


def _print_summary(path: str, found: Inspection) -> None:
    layout = found.layout
    print_fields(
        (
            ("file", f"{path} ({size_text(found.nbytes)})"),
            ("kind", found.kind),
            ("layout", f"{len(layout.tensors)} tensors, {layout.elements} elements, {size_text(layout.nbytes)}"),
            ("layout sha256", layout.sha256),
            ("parent digest", "-" if found.parent_digest is None else found.parent_digest.hex),
            ("digest", found.digest.hex),
            ("changed", f"{found.changed} elements ({share_text(found.changed, layout.elements)})"),
            ("bits each", bits_text(found.nbytes, found.changed)),
        )
    )


def _print_codecs(found: Inspection) -> None:
    rows = [
        (c.codec, str(c.blocks), str(c.elements), str(c.changed), size_text(c.nbytes), bits_text(c.nbytes, c.changed))
        for c in found.codecs
    ]
    print_table("codecs", ("codec", "blocks", "elements", "changed", "bytes", "bits each"), rows)


def _print_blocks(found: Inspection, rows_max: int | None) -> None:
    order = sorted(range(len(found.blocks)), key=lambda i: -found.blocks[i].changed)[:rows_max]
    rows = [
        (
            f"{i}: {b.first[0]} [{b.first[1]}]",
            b.codec,
            str(b.tensors),
            str(b.elements),
            str(b.changed),
            size_text(b.nbytes),
            bits_text(b.nbytes, b.changed),
        )
        for i, b in ((i, found.blocks[i]) for i in sorted(order))
    ]
    columns = ("block: begins at", "codec", "tensors", "elements", "changed", "bytes", "bits each")
    print_table(_title("blocks", len(rows), len(found.blocks)), columns, rows)


def _print_tensors(found: Inspection, rows_max: int | None) -> None:
    kept = sorted(found.tensors, key=lambda t: (t.blocks == 0, -(t.changed or 0)))[:rows_max]
    rows = [
        (
            t.spec.name,
            t.spec.dtype.name,
            str(list(t.spec.shape)),
            str(t.blocks),
            "shared" if t.changed is None else str(t.changed),
        )
        for t in kept
    ]
    columns = ("tensor", "type", "shape", "blocks", "changed")
    print_table(_title("tensors", len(rows), len(found.tensors)), columns, rows)


def _title(what: str, shown: int, total: int) -> str:
    return what if shown == total else f"{what} ({shown} of {total}; --all lists them)"
