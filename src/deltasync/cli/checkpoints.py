"""Commands on checkpoints and payloads: diff, apply, inspect, digest."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deltasync.cli.output import (
    ROWS_MAX,
    Column,
    Output,
    bits_text,
    count_text,
    number_column,
    number_text,
    or_dash,
    percent,
    ratio_text,
    share_text,
    size_text,
)
from deltasync.cli.parser import Parser
from deltasync.errors import InvalidInputError
from deltasync.parallel import counting


def diff_arguments(parser: Parser) -> None:
    parser.explain(
        "`deltasync apply` makes the new checkpoint from the old one and this file.",
        example="deltasync diff step-100 step-101 -o step-101.delta",
    )
    parser.add_place("old", help="checkpoint folder or .safetensors file")
    parser.add_place("new", help="checkpoint folder or .safetensors file")
    parser.add_argument("-o", "--output", metavar="DELTA", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--codec",
        choices=("exp/1", "coo/1"),
        default="exp/1",
        help="exp/1 is the smallest (default), coo/1 has plain indices and values",
    )
    parser.add_threads()


def diff(args: argparse.Namespace, out: Output) -> None:
    """Write the delta, and print its size against that of the weights."""
    from deltasync.files import atomic_write, require_replaceable
    from deltasync.oneshot import diff_chunks, is_payload
    from deltasync.oneshot import inspect as read_payload

    _require_other_file(args.output, args.old, args.new)
    require_replaceable(args.output, is_payload, what="a delta")
    with out.bars() as progress:
        atomic_write(args.output, diff_chunks(args.old, args.new, codec=args.codec, progress=progress))
    delta = read_payload(args.output)
    layout = delta.layout
    if out.is_json:
        out.json(
            {
                "output": str(args.output),
                "bytes": delta.nbytes,
                "full_bytes": layout.nbytes,
                "elements": layout.elements,
                "changed": delta.changed,
                "bits_per_changed": delta.bits_per_changed,
                "parent_digest": None if delta.parent_digest is None else delta.parent_digest.hex,
                "digest": delta.digest.hex,
            }
        )
        return
    share = share_text(delta.changed, layout.elements)
    out.line(
        f"{args.output}: {size_text(delta.nbytes)} (all weights are {size_text(layout.nbytes)}, "
        f"{ratio_text(delta.nbytes, layout.nbytes)}); {number_text(delta.changed)} of {number_text(layout.elements)} "
        f"elements changed ({share}), {bits_text(delta.nbytes, delta.changed)} bits each",
        indent="  ",
    )


def apply_arguments(parser: Parser) -> None:
    parser.explain(
        "Refuses a delta that was made from other weights than those of OLD.",
        example="deltasync apply step-100 step-101.delta -o step-101",
    )
    parser.add_place("old", help="checkpoint folder or .safetensors file")
    parser.add_place("delta", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "-o", "--output", metavar="NEW", required=True, type=Path, help="checkpoint to write, structured as OLD"
    )
    parser.add_threads()


def apply(args: argparse.Namespace, out: Output) -> None:
    """Write the checkpoint, and print its digest."""
    from deltasync.oneshot import apply as apply_delta
    from deltasync.oneshot import inspect as read_payload

    _require_other_file(args.output, args.delta)
    digest = read_payload(args.delta).digest
    with out.bars() as progress:
        apply_delta(args.old, args.delta, out=args.output, progress=progress)
    if out.is_json:
        out.json({"output": str(args.output), "digest": digest.hex})
    else:
        out.line(f"{digest}  {args.output}")


def _require_other_file(output: Path, *inputs: str) -> None:
    for path in inputs:
        if output.exists() and Path(path).exists() and output.samefile(path):
            raise InvalidInputError(f"{output} is an input", hint="choose another output")


def inspect_arguments(parser: Parser) -> None:
    parser.explain(
        "With --old it counts the changes of each layer and tensor.",
        example="deltasync inspect step-101.delta --old step-100",
    )
    parser.add_place("file", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "--old", metavar="CHECKPOINT", help="the checkpoint that the delta was made from: count changes by tensor"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"list every layer, block and tensor, not only the {ROWS_MAX} most changed"
    )
    parser.add_threads()


def inspect(args: argparse.Namespace, out: Output) -> None:
    """Print a summary of a payload, and tables by layer, codec, block and tensor."""
    from deltasync.oneshot import inspect as read_payload

    with out.bars() as progress:
        payload = read_payload(args.file, old=args.old, progress=progress)
    if out.is_json:
        out.json(payload.to_json())
        return
    layout = payload.layout
    out.fields(
        (
            ("file", f"{args.file} ({size_text(payload.nbytes)})"),
            ("kind", payload.kind),
            (
                "weights",
                f"{count_text(len(layout.tensors), 'tensor')}, {count_text(layout.elements, 'element')}, "
                f"{size_text(layout.nbytes)} ({ratio_text(payload.nbytes, layout.nbytes)})",
            ),
            ("layout", layout.sha256),
            ("parent digest", or_dash(payload.parent_digest)),
            ("digest", payload.digest.hex),
            ("changed", f"{number_text(payload.changed)} elements ({share_text(payload.changed, layout.elements)})"),
            ("bits each", bits_text(payload.nbytes, payload.changed)),
        )
    )
    rows_max = None if args.all else ROWS_MAX

    def table(noun: str, columns: Sequence[Column], rows: Sequence[Sequence[Any]], total: int) -> None:
        more = "" if len(rows) == total else f" ({len(rows)} of {total:,}; --all lists them)"
        out.table(noun + more, columns, rows)

    layers, blocks = payload.layers, payload.blocks
    changed_column = Column("changed", lambda value: value if isinstance(value, str) else number_text(value))
    if out.columns is not None and len(layers) > 1 and all(y.changed is None for y in layers):
        out.line("layers: every block has elements of several layers; --old CHECKPOINT counts the changes of each")
    else:
        columns: tuple[Column, ...] = (
            Column("layer", is_name=True),
            number_column("tensors", rank=1),
            number_column("elements"),
            changed_column,
            Column("share", "{:.3f} %".format),
        )
        shown = [layers[i] for i in _most_changed([y.changed for y in layers], rows_max)]
        rows: list[tuple[Any, ...]] = [
            (y.name, y.tensors, y.elements, _shared(y.changed), percent(y.changed, y.elements)) for y in shown
        ]
        table("layers", columns, rows, len(layers))
    columns = (
        Column("codec", is_name=True),
        number_column("blocks"),
        number_column("elements", rank=1),
        number_column("changed"),
        Column("bytes", size_text),
        Column("bits each"),
    )
    rows = [
        (c.codec, c.blocks, c.elements, c.changed, c.nbytes, bits_text(c.nbytes, c.changed)) for c in payload.codecs
    ]
    out.table("codecs", columns, rows)
    columns = (
        Column("block"),
        Column("begins at", is_name=True),
        Column("codec", rank=3),
        number_column("tensors", rank=4),
        number_column("elements", rank=5),
        number_column("changed"),
        Column("bytes", size_text, rank=1),
        Column("bits each", rank=2),
    )
    rows = [
        (
            i,
            f"{b.first[0]} [{b.first[1]}]",
            b.codec,
            b.tensors,
            b.elements,
            b.changed,
            b.nbytes,
            bits_text(b.nbytes, b.changed),
        )
        for i, b in ((i, blocks[i]) for i in _most_changed([b.changed for b in blocks], rows_max))
    ]
    table("blocks", columns, rows, len(blocks))
    columns = (
        Column("tensor", is_name=True),
        Column("type"),
        Column("shape", rank=2),
        number_column("blocks", rank=1),
        changed_column,
    )
    most_changed = sorted(payload.tensors, key=lambda t: (t.blocks == 0, -(t.changed or 0)))[:rows_max]
    rows = [
        (t.spec.name, t.spec.dtype.name, str(list(t.spec.shape)), t.blocks, _shared(t.changed)) for t in most_changed
    ]
    table("tensors", columns, rows, len(payload.tensors))


def _most_changed(counts: Sequence[int | None], rows_max: int | None) -> list[int]:
    """The indices of the largest counts, ascending. Counts that are not known come first."""
    by_count = sorted(range(len(counts)), key=lambda i: (counts[i] is not None, -(counts[i] or 0)))
    return sorted(by_count[:rows_max])


def _shared(changed: int | None) -> int | str:
    return "shared" if changed is None else changed


def digest_arguments(parser: Parser) -> None:
    parser.explain(
        "Checkpoints with one digest have the same names, types, shapes and bits.",
        example="deltasync digest checkpoints/step-100",
    )
    parser.add_place("checkpoint", help="checkpoint folder or .safetensors file")
    parser.add_threads()


def digest(args: argparse.Namespace, out: Output) -> None:
    """Print the state digest of a checkpoint."""
    from deltasync import blocks
    from deltasync.checkpoint import open_checkpoint

    weights = open_checkpoint(args.checkpoint).weights
    layout = weights.layout
    with out.bars() as progress:
        found = blocks.digest(weights, on_progress=counting(progress, "digest", layout.elements))
    if out.is_json:
        out.json(
            {
                "digest": found.hex,
                "layout_sha256": layout.sha256,
                "tensors": len(layout.tensors),
                "elements": layout.elements,
                "bytes": layout.nbytes,
            }
        )
    else:
        out.line(f"{found}  {args.checkpoint}")
