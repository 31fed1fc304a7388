"""Commands on folders that others write or read: import, export, and publish --watch."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import deltasync
from deltasync.cli.output import Output, number_text, share_text, size_text
from deltasync.cli.parser import Parser, add_shadow, whole_number
from deltasync.cli.service import poll_until_signal
from deltasync.errors import ConflictError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from deltasync.format.manifest import Manifest
    from deltasync.interop import Exported

_T = TypeVar("_T")
_POLL_S = 0.2
_ONCE_SETTLES = 2.0
"""Without --follow, how many times the settling time a folder may take to become complete."""


def watch(args: argparse.Namespace, out: Output) -> None:
    """Publish the folders that match, and print a line for each."""
    from deltasync.trainer.checkpoint import SETTLE_S, CheckpointWatch

    for name in ("step", "parent", "base", "anchor"):
        if getattr(args, name) not in (None, False):
            raise InvalidInputError(f"--{name} has no meaning with --watch", hint="leave one of them out")
    if (args.keep_anchors is None) != (args.keep_versions is None):
        raise InvalidInputError("--keep-anchors and --keep-versions belong together", hint="pass both, or none")
    retention = None
    if args.keep_anchors is not None:
        retention = deltasync.Retention(anchors=args.keep_anchors, versions=args.keep_versions)
    options = deltasync.PublisherOptions(
        shadow_path=args.shadow,
        require_fencing=args.require_fencing,
        must_exist=args.must_exist,
        retention=retention,
    )
    settle_s = SETTLE_S if args.settle_s is None else args.settle_s
    with CheckpointWatch(
        args.checkpoint,
        args.url,
        after=args.after,
        marker=args.marker,
        settle_s=settle_s,
        trust_code=args.trust_code,
        options=options,
    ) as watched:
        if args.once and not watched.folders():
            # A mistyped pattern must not look as if everything were published.
            raise NotFoundError(
                f"no folder matches {args.checkpoint}",
                hint="check the pattern: its last * stands for the number in the name of a folder",
            )
        _advance_all(
            watched.advance,
            lambda publication: _print_version(out, publication.wait()),
            lambda: watched.waiting_for,
            follow=not args.once,
            settle_s=settle_s,
        )


def import_arguments(parser: Parser) -> None:
    parser.explain(
        "Each weight_v… becomes a version, after every tensor passed its checksum.",
        example="deltasync import run/weights s3://bucket/run-42 --base Qwen3-8B --follow",
    )
    parser.set_defaults(function="import_folders")
    parser.add_place("folders", help="the folder that the trainer writes weight_v000001, … to")
    parser.add_url()
    parser.add_follow("folders")
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the checkpoint that the trainer began with: the version of a new feed"
    )
    parser.add_argument(
        "--restart", action="store_true", help="the trainer began again at --base: publish that, then the folders"
    )
    add_shadow(parser)
    parser.add_require_fencing()
    parser.add_threads()


def import_folders(args: argparse.Namespace, out: Output) -> None:
    """Publish folders of deltas, and print a line for each."""
    from deltasync.interop import Importer
    from deltasync.interop.folder import list_folders

    if not args.follow and args.base is None and not list_folders(Path(args.folders)):
        raise NotFoundError(
            f"{args.folders} has no folder weight_v…", hint="give the folder that the trainer writes them to"
        )
    options = deltasync.PublisherOptions(shadow_path=args.shadow, require_fencing=args.require_fencing)
    with Importer(args.folders, args.url, base=args.base, restart=args.restart, options=options) as importer:
        _advance_all(
            importer.advance,
            lambda publication: _print_version(out, publication.wait()),
            lambda: importer.waiting_for,
            follow=args.follow,
        )


def export_arguments(parser: Parser) -> None:
    parser.explain(
        "The first folder is a checkpoint, each further one the change to a version.",
        example="deltasync export s3://bucket/run-42 shared/weights --follow",
    )
    parser.add_url()
    parser.add_place("folders", help="folder to write weight_v000000, … to")
    parser.add_follow()
    parser.add_argument(
        "--format", choices=("xor", "overwrite"), default="xor", help="how changes are written (default: xor)"
    )
    parser.add_argument(
        "--checksum",
        choices=("adler32", "xxh3-128", "blake3"),
        default="adler32",
        help="checksum of each tensor (default: adler32)",
    )
    parser.add_argument(
        "--from", dest="start", type=whole_number, metavar="N", help="first version (default: the oldest that is kept)"
    )
    parser.add_base()
    parser.add_trust_code("write")
    parser.add_threads()


def export(args: argparse.Namespace, out: Output) -> None:
    """Write folders of deltas, and print a line for each."""
    from deltasync.interop import Exporter

    def show(exported: "Exported") -> None:
        kind = "all weights" if exported.base_version is None else f"the change from version {exported.base_version}"
        text = f"{exported.path}: {kind}, {size_text(exported.nbytes)}"
        out.event({**asdict(exported), "path": str(exported.path)}, text)

    with Exporter(
        args.url,
        args.folders,
        encoding=args.format,
        checksum_format=args.checksum,
        start=args.start,
        base=args.base,
        trust_code=args.trust_code,
    ) as exporter:
        _advance_all(exporter.advance, show, lambda: None, follow=args.follow)


def _advance_all(
    advance: Callable[[], _T | None],
    show: Callable[[_T], None],
    waiting_for: Callable[[], str | None],
    *,
    follow: bool,
    settle_s: float | None = None,
) -> None:
    """Call `advance` until it has nothing more; with `follow`, until SIGINT or SIGTERM.

    Without it, NotFoundError if there is a folder that does not become complete.
    """

    from deltasync.trainer.checkpoint import SETTLE_S

    def step() -> bool:
        done = advance()
        if done is not None:
            show(done)
        return done is not None

    if follow:
        # A publisher stops for good where another one writes to its feed.
        poll_until_signal(step, final=(ConflictError,))
        return
    patience_s = _ONCE_SETTLES * (SETTLE_S if settle_s is None else settle_s)
    until_s = time.monotonic() + patience_s
    while True:
        if step():
            until_s = time.monotonic() + patience_s
            continue
        problem = waiting_for()
        if problem is None:
            return
        if time.monotonic() > until_s:
            raise NotFoundError(problem, hint="run the command again when it is complete, or remove it")
        time.sleep(_POLL_S)


def _print_version(out: Output, m: "Manifest") -> None:
    changed = "all weights"
    if m.changed is not None:
        changed = f"{number_text(m.changed)} elements changed ({share_text(m.changed, m.elements)})"
    fields = {name: getattr(m, name) for name in ("version", "step", "kind", "changed")}
    out.event(
        {**fields, "bytes": m.nbytes, "digest": m.digest.hex},
        f"version {m.version}, step {m.step}: {changed}, {size_text(m.nbytes)}",
    )
