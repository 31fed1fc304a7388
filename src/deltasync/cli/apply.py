"""`deltasync apply OLD DELTA -o NEW`."""

import argparse
from pathlib import Path

from deltasync.cli.options import Commands, add_threads, require_other_file
from deltasync.cli.progress import bars
from deltasync.inspection import inspect
from deltasync.oneshot import apply


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("apply", help="make a checkpoint from an older one and a delta", description=__doc__)
    parser.add_argument("old", metavar="OLD", help="checkpoint folder or .safetensors file")
    parser.add_argument("delta", metavar="DELTA", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "-o", "--output", metavar="NEW", required=True, type=Path, help="checkpoint to write, of OLD's structure"
    )
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Check the parent, write the checkpoint, whole or not at all, and print its digest."""
    require_other_file(args.output, args.delta)
    digest = inspect(args.delta).digest
    with bars() as progress:
        apply(args.old, args.delta, out=args.output, threads=args.threads, progress=progress)
    print(f"{digest}  {args.output}")
