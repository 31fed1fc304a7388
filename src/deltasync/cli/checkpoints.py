"""Commands on checkpoints and payloads: diff, apply, inspect, digest."""

import argparse
from pathlib import Path

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.cli.common import (
    Commands,
    add_command,
    add_json,
    add_threads,
    bars,
    bits_text,
    or_dash,
    print_fields,
    print_json,
    print_table,
    share_text,
    size_text,
)
from deltasync.errors import InvalidInputError
from deltasync.files import atomic_write
from deltasync.oneshot import Inspection, apply, diff_chunks, inspect
from deltasync.parallel import counting

_ROWS_MAX = 20


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    _add_diff(commands)
    _add_apply(commands)
    _add_inspect(commands)
    _add_digest(commands)


def _add_diff(commands: Commands) -> None:
    parser = add_command(commands, "diff", _diff, "Write the delta between two checkpoints to a file.")
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("new", metavar="NEW", help="checkpoint folder or .safetensors file")
    parser.add_argument("-o", "--output", metavar="DELTA", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--codec",
        choices=("exp/1", "coo/1"),
        default="exp/1",
        help="exp/1 is the smallest (default), coo/1 has plain indices and values",
    )
    add_threads(parser)


def _diff(args: argparse.Namespace) -> None:
    if args.output.is_dir():
        raise InvalidInputError(f"{args.output} is a folder", hint="name a file to write")
    _require_other_file(args.output, args.old, args.new)
    with bars() as progress:
        atomic_write(args.output, diff_chunks(args.old, args.new, codec=args.codec, progress=progress))
    delta = inspect(args.output)
    elements = delta.layout.elements
    print(
        f"{args.output}: {size_text(delta.nbytes)}, {delta.changed} of {elements} elements changed "
        f"({share_text(delta.changed, elements)}), {bits_text(delta.nbytes, delta.changed)} bits each"
    )


def _add_apply(commands: Commands) -> None:
    parser = add_command(commands, "apply", _apply, "Write the checkpoint that a delta leads to from an older one.")
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("delta", metavar="DELTA", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "-o", "--output", metavar="NEW", required=True, type=Path, help="checkpoint to write, structured as OLD"
    )
    add_threads(parser)


def _apply(args: argparse.Namespace) -> None:
    _require_other_file(args.output, args.delta)
    digest = inspect(args.delta).digest
    with bars() as progress:
        apply(args.old, args.delta, out=args.output, progress=progress)
    print(f"{digest}  {args.output}")


def _require_other_file(output: Path, *inputs: str) -> None:
    for path in inputs:
        if output.exists() and Path(path).exists() and output.samefile(path):
            raise InvalidInputError(f"{output} is an input", hint="choose another output")


def _add_inspect(commands: Commands) -> None:
    parser = add_command(commands, "inspect", _inspect, "Describe the contents of a payload.")
    parser.add_argument("file", metavar="FILE", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "--all", action="store_true", help=f"list every block and tensor, not only the {_ROWS_MAX} most changed"
    )
    add_json(parser)


def _inspect(args: argparse.Namespace) -> None:
    payload = inspect(args.file)
    if args.json:
        print_json(payload.to_json())
        return
    layout = payload.layout
    print_fields(
        (
            ("file", f"{args.file} ({size_text(payload.nbytes)})"),
            ("kind", payload.kind),
            ("layout", f"{len(layout.tensors)} tensors, {layout.elements} elements, {size_text(layout.nbytes)}"),
            ("layout sha256", layout.sha256),
            ("parent digest", or_dash(payload.parent_digest)),
            ("digest", payload.digest.hex),
            ("changed", f"{payload.changed} elements ({share_text(payload.changed, layout.elements)})"),
            ("bits each", bits_text(payload.nbytes, payload.changed)),
        )
    )
    rows = [
        (c.codec, str(c.blocks), str(c.elements), str(c.changed), size_text(c.nbytes), bits_text(c.nbytes, c.changed))
        for c in payload.codecs
    ]
    print_table("codecs", ("codec", "blocks", "elements", "changed", "bytes", "bits each"), rows)
    rows_max = None if args.all else _ROWS_MAX
    _print_blocks(payload, rows_max)
    _print_tensors(payload, rows_max)


def _print_blocks(payload: Inspection, rows_max: int | None) -> None:
    most_changed = sorted(range(len(payload.blocks)), key=lambda i: -payload.blocks[i].changed)[:rows_max]
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
        for i, b in ((i, payload.blocks[i]) for i in sorted(most_changed))
    ]
    columns = ("block: begins at", "codec", "tensors", "elements", "changed", "bytes", "bits each")
    print_table(_title("blocks", len(rows), len(payload.blocks)), columns, rows)


def _print_tensors(payload: Inspection, rows_max: int | None) -> None:
    most_changed = sorted(payload.tensors, key=lambda t: (t.blocks == 0, -(t.changed or 0)))[:rows_max]
    rows = [
        (
            t.spec.name,
            t.spec.dtype.name,
            str(list(t.spec.shape)),
            str(t.blocks),
            "shared" if t.changed is None else str(t.changed),
        )
        for t in most_changed
    ]
    columns = ("tensor", "type", "shape", "blocks", "changed")
    print_table(_title("tensors", len(rows), len(payload.tensors)), columns, rows)


def _title(noun: str, shown: int, total: int) -> str:
    return noun if shown == total else f"{noun} ({shown} of {total}; --all lists them)"


def _add_digest(commands: Commands) -> None:
    parser = add_command(commands, "digest", _digest, "Print the state digest of a checkpoint.")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
    add_json(parser)
    add_threads(parser)


def _digest(args: argparse.Namespace) -> None:
    weights = open_checkpoint(args.checkpoint).weights
    layout = weights.layout
    with bars() as progress:
        digest = blocks.digest(weights, on_progress=counting(progress, "digest", layout.elements))
    if args.json:
        print_json(
            {
                "digest": digest.hex,
                "layout_sha256": layout.sha256,
                "tensors": len(layout.tensors),
                "elements": layout.elements,
                "bytes": layout.nbytes,
            }
        )
    else:
        print(f"{digest}  {args.checkpoint}")
