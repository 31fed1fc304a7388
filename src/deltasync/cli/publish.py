"""`deltasync publish URL CHECKPOINT`."""

import argparse
from pathlib import Path

from deltasync.cli.feed import add_url, feed, manifest_json, whole_number
from deltasync.cli.options import Commands, add_json, add_threads
from deltasync.cli.output import print_json, share_text, size_text
from deltasync.cli.progress import bars
from deltasync.format.manifest import BaseRef
from deltasync.publish import publish_checkpoint


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("publish", help="commit a checkpoint as the next version", description=__doc__)
    add_url(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="checkpoint folder or .safetensors file")
    parser.add_argument("--step", type=whole_number, metavar="N", help="the trainer's step, for people")
    parser.add_argument(
        "--parent",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint that was published last (else it is rebuilt from the feed)",
    )
    parser.add_argument(
        "--anchor", action="store_true", help="add all weights, for late joiners; also for another set of tensors"
    )
    parser.add_argument(
        "--base",
        metavar="NAME[@REVISION]",
        help="first version only: replicas have this checkpoint as NAME, a folder or a Hub id; nothing is uploaded",
    )
    parser.add_argument(
        "--require-fencing", action="store_true", help="refuse a store that cannot keep two writers apart"
    )
    add_json(parser)
    add_threads(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Commit, and say what it took."""
    with feed(args.url) as store, bars() as progress:
        m = publish_checkpoint(
            store,
            args.checkpoint,
            step=args.step,
            parent=args.parent,
            anchor=args.anchor,
            base=None if args.base is None else base_ref(args.base),
            require_fencing=args.require_fencing,
            threads=args.threads,
            progress=progress,
        )
    if args.json:
        print_json(manifest_json(m))
        return
    changed = "" if m.changed is None else f", {m.changed} elements changed ({share_text(m.changed, m.elements)})"
    print(f"version {m.version}: {m.kind} of {size_text(m.nbytes)}{changed}, digest {m.digest}")


def base_ref(text: str) -> BaseRef:
    """NAME or NAME@REVISION; a path has no revision, whatever is in it."""
    name, at, revision = text.rpartition("@")
    return BaseRef(text) if text.startswith(("/", ".")) or not at else BaseRef(name, revision)
