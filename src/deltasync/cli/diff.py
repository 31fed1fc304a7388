"""`deltasync diff OLD NEW -o DELTA`."""

import argparse
from pathlib import Path

from deltasync.cli.options import Commands, add_threads, require_other_file
from deltasync.cli.output import bits_text, share_text, size_text
from deltasync.cli.progress import bars
from deltasync.errors import InvalidInputError
from deltasync.files import atomic_write
from deltasync.inspection import inspect
from deltasync.oneshot import diff_chunks


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("diff", help="write the delta between two checkpoints", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("new", metavar="NEW", help="checkpoint folder or .safetensors file")
    parser.add_argument("-o", "--output", metavar="DELTA", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--codec", choices=("exp/1", "coo/1"), default="exp/1", help="smallest, or plain indices and values"
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Write the delta, whole or not at all, and say how large it is."""
    if args.output.is_dir():
        raise InvalidInputError(f"{args.output} is a folder", hint="name a file to write")
    require_other_file(args.output, args.old, args.new)
    with bars() as progress:
        chunks = diff_chunks(args.old, args.new, codec=args.codec, threads=args.threads, progress=progress)
        atomic_write(args.output, chunks)
    found = inspect(args.output)
    elements = found.layout.elements
    print(
        f"{args.output}: {size_text(found.nbytes)}, {found.changed} of {elements} elements changed "
        f"({share_text(found.changed, elements)}), {bits_text(found.nbytes, found.changed)} bits each"
    )
