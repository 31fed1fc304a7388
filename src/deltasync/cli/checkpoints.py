"""Commands on checkpoints and payloads: diff, apply, inspect, digest."""

import argparse
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.cli.common import (
    Commands,
    add_json,
    add_threads,
    bars,
    bits_text,
    print_fields,
    print_json,
    print_table,
    require_other_file,
    share_text,
    size_text,
)
from deltasync.errors import InvalidInputError
from deltasync.files import atomic_write
from deltasync.oneshot import Inspection, apply, diff_chunks, inspect
from deltasync.parallel import counting


def register(commands: Commands) -> None:
    """Add the commands of this module to the parser."""
    for add in (register_diff, register_apply, register_inspect, register_digest):
        add(commands)


def register_diff(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("diff", help="write the delta between two checkpoints")
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("new", metavar="NEW", help="checkpoint folder or .safetensors file")
    parser.add_argument("-o", "--output", metavar="DELTA", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--codec", choices=("exp/1", "coo/1"), default="exp/1", help="smallest, or plain indices and values"
    )
    add_threads(parser)
    parser.set_defaults(run=run_diff)


def run_diff(args: argparse.Namespace) -> None:
    """Write the delta, whole or not at all, and say how large it is."""
    if args.output.is_dir():
        raise InvalidInputError(f"{args.output} is a folder", hint="name a file to write")
    require_other_file(args.output, args.old, args.new)
    with bars() as progress:
        chunks = diff_chunks(args.old, args.new, codec=args.codec, progress=progress)
        atomic_write(args.output, chunks)
    found = inspect(args.output)
    elements = found.layout.elements
    print(
        f"{args.output}: {size_text(found.nbytes)}, {found.changed} of {elements} elements changed "
        f"({share_text(found.changed, elements)}), {bits_text(found.nbytes, found.changed)} bits each"
    )


def register_apply(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("apply", help="make a checkpoint from an older one and a delta")
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("delta", metavar="DELTA", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "-o", "--output", metavar="NEW", required=True, type=Path, help="checkpoint to write, of OLD's structure"
    )
    add_threads(parser)
    parser.set_defaults(run=run_apply)


def run_apply(args: argparse.Namespace) -> None:
    """Check the parent, write the checkpoint, whole or not at all, and print its digest."""
    require_other_file(args.output, args.delta)
    digest = inspect(args.delta).digest
    with bars() as progress:
        apply(args.old, args.delta, out=args.output, progress=progress)
    print(f"{digest}  {args.output}")


_ROWS_MAX = 20


def register_inspect(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("inspect", help="say what a payload holds")
    parser.add_argument("file", metavar="FILE", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "--all", action="store_true", help=f"list every block and tensor, not the {_ROWS_MAX} most changed"
    )
    add_json(parser)
    parser.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> None:
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


def register_digest(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("digest", help="print the state digest of a checkpoint")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run_digest)


def run_digest(args: argparse.Namespace) -> None:
    """Print the digest and the path, as sha256sum does."""
    weights = open_checkpoint(args.checkpoint).weights
    layout = weights.layout
    with bars() as progress:
        digest = blocks.digest(weights, on_progress=counting(progress, "digest", layout.elements))
    if not args.json:
        print(f"{digest}  {args.checkpoint}")
        return
    print_json(
        {
            "digest": digest.hex,
            "layout_sha256": layout.sha256,
            "tensors": len(layout.tensors),
            "elements": layout.elements,
            "bytes": layout.nbytes,
        }
    )
