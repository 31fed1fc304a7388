"""Rebuild the weights of a version: its anchor or base, then deltas and skips, each proved before the next."""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from deltasync import blocks
from deltasync.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_files, fetch_payloads
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.plan import Edge, Plan, plan
from deltasync.format import keys
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights
from deltasync.parallel import Progress, counting
from deltasync.store import Feed, opened


def open_base(manifest: Manifest, *, at: Path | None = None) -> Checkpoint:
    """The checkpoint that a base names, or the copy of it `at` another place, proved by its state digest.

    NotFoundError if it is not at hand; MismatchError if it is there and has other bits.
    """
    if manifest.base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    checkpoint = open_checkpoint(_located(manifest.base) if at is None else at)
    layout = checkpoint.weights.layout
    if layout.sha256 != manifest.layout_sha256:
        raise MismatchError(
            f"{checkpoint.path} has other tensors than the base of version {manifest.version}",
            version=manifest.version,
            rule="base.layout",
            hint="give the checkpoint that the feed began with",
        )
    found = blocks.digest(checkpoint.weights)
    if found != manifest.digest:
        raise MismatchError(
            f"{checkpoint.path} has the digest {found}, the base of version {manifest.version} has {manifest.digest}",
            version=manifest.version,
            rule="base.digest",
            hint="give the very checkpoint (and revision) that the feed began with",
        )
    return checkpoint


def _located(base: BaseRef) -> Path:
    # Of a name that no file can have, Path.exists raises.
    if os.path.exists(base.checkpoint):
        return Path(base.checkpoint)
    message = f"{base.checkpoint!r:.200}" + ("" if base.revision is None else f" at revision {base.revision!r:.80}")
    hint = "give a local copy of it: `--base DIR`"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        hint += ", or install deltasync[hf] to fetch it from the Hub"
        raise NotFoundError(f"the base {message} is not a folder here", hint=hint) from error
    try:
        return Path(snapshot_download(base.checkpoint, revision=base.revision))
    except (OSError, ValueError, HFValidationError) as error:
        # The client's errors of network, permission and absence are all OSErrors.
        raise NotFoundError(f"the base {message} is not at hand: {error!s:.300}", hint=hint) from error


logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class BlockedError(Exception):
    """An edge of a plan turned out to be of no use. Caught by `with_fallback`."""

    def __init__(self, edge: Edge, cause: DeltasyncError) -> None:
        super().__init__(str(cause))
        self.edge = edge
        self.cause = cause


def with_fallback(
    log: Log,
    target: Manifest,
    attempt: Callable[[Plan], _T],
    *,
    start: Callable[[], int | None] = lambda: None,
    on_blocked: Callable[[BlockedError], None] = lambda blocked: None,
) -> _T:
    """`attempt` the cheapest plan for `target`, and the next best where an edge is damaged, pruned or not at hand.

    `start` tells the version that the caller holds by then: an attempt that fails may have come a part of the way. If
    no way is left, the error that closed the first one.
    """
    avoid: set[str] = set()
    first: DeltasyncError | None = None
    while True:
        held = start()
        try:
            way = _one_step(target, held, avoid)
            way = plan(log, target, start=held, avoid=avoid) if way is None else way
        except NotFoundError as error:
            raise _explained(log, target, error if first is None else first) from None
        try:
            return attempt(way)
        except BlockedError as blocked:
            logger.warning("cannot use %s, looking for another way: %s", blocked.edge.key, blocked.cause)
            on_blocked(blocked)
            avoid.add(blocked.edge.key)
            first = blocked.cause if first is None else first


def load(
    log: Log,
    target: Manifest,
    *,
    base: Path | None = None,
    progress: Progress | None = None,
) -> Weights:
    """The weights of a version, in memory."""

    def attempt(way: Plan) -> Weights:
        weights = zeros(plan_layout(log, way, base=base))
        replay(log, way, weights, base=base, progress=progress)
        return weights

    return with_fallback(log, target, attempt)


def zeros(layout: Layout) -> Weights:
    """Weights to be overwritten; MemoryError becomes one that says how much was asked for."""
    try:
        return Weights(layout, tuple(np.zeros(t.elements, t.dtype.bits_dtype) for t in layout.tensors))
    except MemoryError as error:
        raise CorruptError(
            f"no memory for the {layout.nbytes} bytes of this layout",
            rule="layout.memory",
            hint="if the model is that large, use a machine with more memory",
        ) from error


def plan_layout(log: Log, way: Plan, *, base: Path | None = None) -> Layout:
    """The layout that a plan begins with, read from the start of its first payload."""
    edge = way.edges[0]
    with blocking(edge):
        if edge.manifest.kind == "base":
            return open_base(edge.manifest, at=base).weights.layout
        ref = edge.manifest.payloads[0]
        key = keys.payload_key(ref.sha256)
        payload = Payload.open(lambda offset, length: log.store.get_range(key, offset, length), ref.nbytes)
        if payload.header.layout.sha256 != edge.manifest.layout_sha256:
            raise CorruptError(f"{key} has another layout than its manifest says", rule="manifest.layout", key=key)
        return payload.header.layout


def replay(
    log: Log,
    way: Plan,
    target: Weights,
    *,
    base: Path | None = None,
    progress: Progress | None = None,
) -> None:
    """Overwrite `target`, which nobody else can see yet, with the state that the plan leads to.

    Every block is checked as it is decoded, and the state digest of the whole at the end.
    """
    count = counting(progress, "restore", way.nbytes)
    arriving = fetch_payloads(log.store, (edge.manifest for edge in way.edges))
    for edge in way.edges:
        with blocking(edge):
            if edge.manifest.kind == "base":
                _copy(open_base(edge.manifest, at=base).weights, target)
            for _ in edge.manifest.payloads:
                payload = next(arriving)
                payload.header.layout.require_equal(target.layout, ours=edge.key, theirs="the version before it")
                # Blocks do not overlap and each is decoded before it is written, so that old and new may be one.
                blocks.decode_into(target, target, payload.blocks(), relative=edge.start is not None)
                if count is not None:
                    count(payload.nbytes)
    found = blocks.digest(target, on_progress=counting(progress, "digest", target.layout.elements))
    promised = way.edges[-1].manifest.digest
    if found != promised:
        version = way.edges[-1].end
        raise CorruptError(
            f"version {version} came out with the digest {found}, its manifest promises {promised}",
            rule="restore.digest",
            version=version,
        )


@contextmanager
def blocking(edge: Edge) -> Iterator[None]:
    """What goes wrong in the block makes the edge of no use: BlockedError."""
    try:
        yield
    except (CorruptError, FormatError, MismatchError, NotFoundError) as error:
        raise BlockedError(edge, error) from error


def _one_step(target: Manifest, start: int | None, avoid: Collection[str]) -> Plan | None:
    """From a version to the next one its delta is the way: nothing needs to be listed to know that."""
    edge = Edge(manifest_key(target), target)
    is_next = start is not None and target.kind == "delta" and target.parent == start and edge.key not in avoid
    return Plan((edge,)) if is_next else None


def _explained(log: Log, target: Manifest, error: DeltasyncError) -> DeltasyncError:
    """What is missing below the floor was given up on purpose."""
    floor = log.floor()
    if not isinstance(error, NotFoundError) or target.version >= floor:
        return error
    return NotFoundError(
        f"version {target.version} was pruned: {log.store.url} keeps versions from {floor} on ({error.message})",
        version=target.version,
        key=error.key,
        hint="choose a later version",
    )


def _copy(source: Weights, target: Weights) -> None:
    source.layout.require_equal(target.layout, ours="the base", theirs="the target")
    for before, after in zip(source.arrays, target.arrays, strict=True):
        after[:] = before


def plan_restore(feed: Feed, *, version: int | None = None) -> tuple[Manifest, Plan]:
    """What a restore of a version (the newest by default) would fetch."""
    with opened(feed) as store:
        log = Log(store)
        target = log.require_head() if version is None else log.read(version)
        return target, plan(log, target)


def restore(
    feed: Feed,
    out: str | os.PathLike[str],
    *,
    version: int | None = None,
    base: Path | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the checkpoint of a version (the newest by default) to the folder `out`, whole or not at all.

    `base` is a local copy of the checkpoint that the feed began with, where the one that it names is not at hand. If a
    payload is damaged or gone, another way is taken where there is one. The digest is checked before `out` appears.
    """
    with opened(feed) as store:
        log = Log(store)
        target = log.require_head() if version is None else log.read(version)

        def attempt(way: Plan) -> None:
            layout = plan_layout(log, way, base=base)
            write_checkpoint(
                layout,
                fetch_files(store, target),
                out,
                lambda weights: replay(log, way, weights, base=base, progress=progress),
            )

        with_fallback(log, target, attempt)
        return target
