"""Commands on folders that others write or read: import, export, and publish --watch."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

from deltasync.cli.output import Output, printing
from deltasync.cli.service import poll_until_signal
from deltasync.cli.units import number_text, share_text, size_text
from deltasync.errors import ConflictError, InvalidInputError, NotFoundError
from deltasync.format.manifest import Manifest
from deltasync.trainer.checkpoint import SETTLE_S, CheckpointWatch
from deltasync.trainer.publisher import PublisherOptions
from deltasync.upkeep.prune import Retention

_T = TypeVar("_T")
_POLL_S = 0.2
_ONCE_SETTLES = 2.0
"""Without --follow, how many times the settling time a folder may take to become complete."""


def watch(args: argparse.Namespace, out: Output) -> None:
    """Publish the folders that match, and print a line for each."""
    for name in ("step", "parent", "base", "anchor"):
        if getattr(args, name) not in (None, False):
            raise InvalidInputError(f"--{name} has no meaning with --watch", hint="leave one of them out")
    if (args.keep_anchors is None) != (args.keep_versions is None):
        raise InvalidInputError("--keep-anchors and --keep-versions belong together", hint="pass both, or none")
    retention = None
    if args.keep_anchors is not None:
        retention = Retention(anchors=args.keep_anchors, versions=args.keep_versions)
    options = PublisherOptions(
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


def import_folders(args: argparse.Namespace, out: Output) -> None:
    """Publish folders of deltas, and print a line for each."""
    from deltasync.interop import Importer
    from deltasync.interop.folder import list_folders

    if not args.follow and args.base is None and not list_folders(Path(args.folders)):
        raise NotFoundError(
            f"{args.folders} has no folder weight_v…", hint="give the folder that the trainer writes them to"
        )
    options = PublisherOptions(shadow_path=args.shadow, require_fencing=args.require_fencing)
    with Importer(args.folders, args.url, base=args.base, restart=args.restart, options=options) as importer:
        _advance_all(
            importer.advance,
            lambda publication: _print_version(out, publication.wait()),
            lambda: importer.waiting_for,
            follow=args.follow,
        )


def export(args: argparse.Namespace, out: Output) -> None:
    """Write folders of deltas, and print a line for each."""
    from deltasync.interop import Exported, Exporter

    @printing()
    def show(exported: Exported) -> None:
        if out.is_json:
            out.json_line({**asdict(exported), "path": str(exported.path)})
            return
        kind = "all weights" if exported.base_version is None else f"the change from version {exported.base_version}"
        out.line(f"{exported.path}: {kind}, {size_text(exported.nbytes)}", indent="  ")

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
    settle_s: float = SETTLE_S,
) -> None:
    """Call `advance` until it has nothing more; with `follow`, until SIGINT or SIGTERM.

    Without it, NotFoundError if there is a folder that does not become complete.
    """

    def step() -> bool:
        done = advance()
        if done is not None:
            show(done)
        return done is not None

    if follow:
        # A publisher stops for good where another one writes to its feed.
        poll_until_signal(step, final=(ConflictError,))
        return
    until_s = time.monotonic() + _ONCE_SETTLES * settle_s
    while True:
        if step():
            until_s = time.monotonic() + _ONCE_SETTLES * settle_s
            continue
        problem = waiting_for()
        if problem is None:
            return
        if time.monotonic() > until_s:
            raise NotFoundError(problem, hint="run the command again when it is complete, or remove it")
        time.sleep(_POLL_S)


@printing()
def _print_version(out: Output, manifest: Manifest) -> None:
    if out.is_json:
        out.json_line(
            {
                "version": manifest.version,
                "step": manifest.step,
                "kind": manifest.kind,
                "changed": manifest.changed,
                "bytes": manifest.nbytes,
                "digest": manifest.digest.hex,
            }
        )
        return
    changed = "all weights"
    if manifest.changed is not None:
        share = share_text(manifest.changed, manifest.elements)
        changed = f"{number_text(manifest.changed)} elements changed ({share})"
    out.line(f"version {manifest.version}, step {manifest.step}: {changed}, {size_text(manifest.nbytes)}", indent="  ")
