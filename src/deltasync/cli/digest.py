"""`deltasync digest CHECKPOINT`."""

import argparse

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.cli.options import Commands, add_json, add_threads
from deltasync.cli.output import print_json
from deltasync.cli.progress import bars
from deltasync.progress import counting


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("digest", help="print the state digest of a checkpoint", description=__doc__)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Print the digest and the path, as sha256sum does."""
    weights = open_checkpoint(args.checkpoint).weights
    layout = weights.layout
    with bars() as progress:
        digest = blocks.digest(weights, threads=args.threads, on_progress=counting(progress, "digest", layout.elements))
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
