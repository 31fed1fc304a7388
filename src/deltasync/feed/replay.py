"""Rebuild the weights of a version: start from an anchor or a base, apply deltas and skips, check the digest."""

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

import numpy as np

from deltasync import blocks
from deltasync.arguments import local_path, optional_path, optional_version
from deltasync.checkpoint import open_checkpoint, write_checkpoint
from deltasync.errors import CorruptError, DeltasyncError, FormatError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.base import locate_base
from deltasync.feed.fetch import fetch_files, fetch_payloads
from deltasync.feed.log import READ_THREADS, Log, manifest_key
from deltasync.feed.plan import Edge, Plan, plan
from deltasync.format import keys, limits
from deltasync.format.companions import has_config
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Payload
from deltasync.format.weights import Changes, Weights
from deltasync.parallel import Progress, counting, each
from deltasync.store import Feed, opened
from deltasync.store.reading import with_reread

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_NO_CONFIG = "version %d of %s has no config.json beside its weights: engines cannot load the folder without one"

_DAMAGE = (CorruptError, FormatError, NotFoundError)

_ALIGNED = 64
"""Where the memory of a tensor begins: at multiples of this many bytes, those of a line of the cache."""


# One edge


def decode_edge(
    edge: Edge,
    payloads: Iterator[Payload],
    weights: Weights,
    use: Callable[[Changes], _T],
    *,
    base: Weights | None = None,
    applied: Collection[str] = (),
    in_place: bool = False,
) -> Iterator[tuple[list[_T], PayloadRef | None]]:
    """Decode and verify the blocks of an edge, for `weights` that hold the version it starts from.

    `use` is called in worker threads with the changes of each block. Its results are given in the order of the blocks,
    with a payload after the last block of it. Blocks are decoded on all cores while later payloads are fetched. Each
    payload is taken from `payloads` when its turn comes; those whose SHA-256 is in `applied` are left out. An edge that
    names a base gives all weights of `base` first. `use` may write the changes to `weights`: blocks do not overlap.
    `in_place`: the blocks of an anchor are decoded straight into `weights` instead, without `use`.
    """
    if base is not None:
        base.layout.require_equal(weights.layout, ours="the base", theirs="the weights")
        whole = blocks.layout_runs(base.layout, elements=limits.PLANES_ELEMENTS)
        for result in each(lambda runs: use(Changes(runs, None, base.region(runs).gather())), whole):
            yield [result], None

    def fetched() -> Iterator[tuple[Payload, int | None, PayloadRef | None]]:
        """The number of each block in its payload, and the payload with the last of them."""
        for ref in edge.manifest.payloads:
            if ref.sha256 not in applied:
                payload = next(payloads)
                payload.header.layout.require_equal(weights.layout, ours=edge.key, theirs="the version before it")
                last = len(payload.block_infos) - 1
                if last < 0:
                    yield payload, None, ref
                for i in range(last + 1):
                    yield payload, i, ref if i == last else None

    def decode(item: tuple[Payload, int | None, PayloadRef | None]) -> tuple[list[_T], PayloadRef | None]:
        payload, i, ref = item
        if i is None:
            return [], ref
        if in_place and edge.start is None:
            blocks.restore_block(weights, payload.block(i))
            return [], ref
        decoded = blocks.decode_block(weights, payload.block(i), relative=edge.start is not None)
        return [use(changes) for changes in decoded], ref

    yield from each(decode, fetched())


def staged_changes(edge: Edge, payloads: Iterator[Payload], weights: Weights) -> list[Changes]:
    """All changes of a delta or skip, decoded and verified. Nothing is written."""
    decoded = decode_edge(edge, payloads, weights, lambda changes: changes)
    return [changes for part, _ in decoded for changes in part]


def apply_edge(
    edge: Edge,
    payloads: Iterator[Payload],
    weights: Weights,
    *,
    base: Weights | None = None,
    on_payload: Callable[[int], None] | None = None,
) -> None:
    """Overwrite `weights`, which hold the version that the edge starts from, with the version that it leads to.

    `on_payload` is called with the size of each payload that was applied. After an error the weights are of no version.
    """
    for _, ref in decode_edge(edge, payloads, weights, partial(blocks.overwrite, weights), base=base, in_place=True):
        if ref is not None and on_payload is not None:
            on_payload(ref.nbytes)


def require_digest(edge: Edge, weights: Weights, *, on_progress: blocks.OnProgress | None = None) -> None:
    """CorruptError unless the weights have the state digest that the manifest of the edge promises."""
    digest = blocks.digest(weights, on_progress=on_progress)
    if digest != edge.manifest.digest:
        raise CorruptError(
            f"the weights of version {edge.end} have the digest {digest}, but its manifest promises "
            f"{edge.manifest.digest}",
            rule="restore.digest",
            key=edge.key,
            version=edge.end,
        )


# Where a plan starts


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The layout of a plan that starts from nothing, and the weights of its base if it starts with one."""

    layout: Layout
    base: Weights | None = None


def open_start(log: Log, plan: Plan, *, base: Path | None = None) -> Start:
    """Read the layout from the start of the first payload, or open the base: `base` is a local copy of it."""
    edge = plan.edges[0]
    with blocking(edge):
        if edge.manifest.kind == "base":
            weights = open_base(edge, at=base)
            return Start(weights.layout, weights)
        ref = edge.manifest.payloads[0]
        key = keys.payload_key(ref.sha256)

        def read_layout() -> Layout:
            payload = Payload.open(lambda offset, length: log.store.get_range(key, offset, length), ref.nbytes)
            if payload.header.layout.sha256 != edge.manifest.layout_sha256:
                raise CorruptError(f"{key} has another layout than its manifest", rule="manifest.layout", key=key)
            return payload.header.layout

        return Start(with_reread(read_layout))


def open_base(edge: Edge, *, at: Path | None = None) -> Weights:
    """The weights of the checkpoint that a base names, or of the copy `at` another path, checked by their digest.

    NotFoundError if the checkpoint is not available; MismatchError if it has other tensors or other bits.
    """
    manifest = edge.manifest
    if manifest.base is None:
        raise InvalidInputError(f"version {manifest.version} is not a base")
    checkpoint = open_checkpoint(locate_base(manifest) if at is None else at)
    if checkpoint.weights.layout.sha256 != manifest.layout_sha256:
        raise MismatchError(
            f"{checkpoint.path} has other tensors than the base of version {manifest.version}",
            version=manifest.version,
            rule="base.layout",
            hint="pass the checkpoint that the feed started with",
        )
    try:
        require_digest(edge, checkpoint.weights)
    except CorruptError as error:
        raise MismatchError(
            f"{checkpoint.path} is not the base of version {manifest.version}: {error.message}",
            version=manifest.version,
            rule="base.digest",
            hint="pass the checkpoint, at the same revision, that the feed started with",
        ) from error
    return checkpoint.weights


def zeros(layout: Layout) -> Weights:
    """Weights to be overwritten; CorruptError, with the size, if there is no memory for them."""
    ends = list(accumulate(-(-t.nbytes // _ALIGNED) * _ALIGNED for t in layout.tensors))
    try:
        # In one piece, which NumPy asks the system to back with huge pages: small tensors would have none.
        memory = np.zeros(ends[-1] if ends else 0, np.uint8)
        starts = zip([0, *ends], layout.tensors, strict=False)
        return Weights(layout, tuple(memory[at : at + t.nbytes].view(t.dtype.bits_dtype) for at, t in starts))
    except MemoryError as error:
        raise CorruptError(
            f"there is no memory for the {layout.nbytes} bytes of this layout",
            rule="layout.memory",
            hint="if the model is that large, use a machine with more memory",
        ) from error


# Whole plans


class BlockedError(Exception):
    """An edge of a plan cannot be used. `with_fallback` catches it and plans around the edge."""

    def __init__(self, edge: Edge, cause: DeltasyncError) -> None:
        super().__init__(str(cause))
        self.edge = edge
        self.cause = cause


@contextmanager
def blocking(edge: Edge) -> Iterator[None]:
    """Turn damage, absence and mismatches in the block into a BlockedError of the edge."""
    try:
        yield
    except (CorruptError, FormatError, MismatchError, NotFoundError) as error:
        raise BlockedError(edge, error) from error


def with_fallback(
    log: Log,
    target: Manifest,
    attempt: Callable[[Plan], _T],
    *,
    start: Callable[[], int | None] = lambda: None,
    on_blocked: Callable[[BlockedError], None] = lambda blocked: None,
) -> _T:
    """Call `attempt` with the cheapest plan for `target`, and with the next best where an edge cannot be used.

    `start` returns the version that the caller holds: a failed attempt may have applied some edges. If no plan is left,
    the error of the first edge that could not be used is raised.
    """
    avoid: set[str] = set()
    first: DeltasyncError | None = None
    blocked: BlockedError | None = None
    while True:
        held = start()
        step = Edge(manifest_key(target), target)
        try:
            if held is not None and step.start == held and target.kind == "delta" and step.key not in avoid:
                # The next version's delta is the plan. Nothing has to be listed for that.
                chosen = Plan((step,))
            else:
                chosen = plan(log, target, start=held, avoid=avoid)
        except NotFoundError as error:
            raise _explained(log, target, error if first is None else first) from None
        if blocked is not None:
            # Not before there is another plan: without one, the error that is raised says the same.
            logger.warning("cannot use %s, trying another plan: %s", blocked.edge.key, blocked.cause)
        try:
            return attempt(chosen)
        except BlockedError as error:
            blocked = error
            on_blocked(blocked)
            avoid.add(blocked.edge.key)
            first = blocked.cause if first is None else first


def _explained(log: Log, target: Manifest, error: DeltasyncError) -> DeltasyncError:
    """Below the floor, something is missing because it was pruned: say so."""
    floor = log.floor()
    if not isinstance(error, NotFoundError) or target.version >= floor:
        return error
    return NotFoundError(
        f"version {target.version} was pruned: {log.store.url} keeps versions from {floor} on ({error.message})",
        version=target.version,
        key=error.key,
        hint=f"choose version {floor} or a later one",
    )


def replay(
    log: Log, plan: Plan, weights: Weights, *, base: Weights | None = None, progress: Progress | None = None
) -> None:
    """Overwrite `weights`, which are not in use yet, with the state that a plan from nothing leads to.

    `base` is what `open_start` gave; without it, a base is opened here. Every block is verified as it is decoded, and
    the state digest of the whole at the end.
    """
    count = counting(progress, "restore", plan.nbytes)
    payloads = fetch_payloads(log.store, (edge.manifest for edge in plan.edges), layout=weights.layout)
    for edge in plan.edges:
        with blocking(edge):
            if edge.manifest.kind == "base" and base is None:
                base = open_base(edge)
            apply_edge(edge, payloads, weights, base=base if edge.start is None else None, on_payload=count)
    require_digest(plan.edges[-1], weights, on_progress=counting(progress, "digest", weights.layout.elements))


def load(log: Log, target: Manifest, *, base: Path | None = None, progress: Progress | None = None) -> Weights:
    """The weights of a version, in memory."""

    def attempt(plan: Plan) -> Weights:
        start = open_start(log, plan, base=base)
        weights = zeros(start.layout)
        replay(log, plan, weights, base=start.base, progress=progress)
        return weights

    return with_fallback(log, target, attempt)


# Files beside the weights


def find_files(log: Log, target: Manifest, *, trust_code: bool = False) -> dict[str, bytes]:
    """The files beside the weights of a version.

    If they are damaged or missing, those of the nearest version that has others are used, with a warning; the error if
    there are none.
    """
    try:
        return fetch_files(log.store, target, trust_code=trust_code)
    except _DAMAGE as error:
        damage = error
    tried = {target.files}
    nearest = sorted(log.versions(), key=lambda version: (abs(version - target.version), version))
    for manifest in each(partial(_readable, log), nearest, waiting=READ_THREADS):
        if manifest is None or manifest.files is None or manifest.files in tried:
            continue
        tried.add(manifest.files)
        with suppress(*_DAMAGE):
            files = fetch_files(log.store, manifest, trust_code=trust_code)
            logger.warning(
                "the files beside the weights of version %d cannot be read, those of version %d are used: %s",
                target.version,
                manifest.version,
                damage,
            )
            return files
    damage.hint = (
        "without these files (`files=False`, `--no-files`) the weights can be restored; publish again to repair"
    )
    raise damage


def _readable(log: Log, version: int) -> Manifest | None:
    try:
        return log.read(version)
    except _DAMAGE:
        return None


def plan_restore(feed: Feed, *, version: int | str | None = None) -> tuple[Manifest, Plan]:
    """The manifest of a version (the newest by default), and the plan by which it would be restored."""
    with opened(feed) as store:
        log = Log(store)
        target = log.resolve(version)
        return target, plan(log, target)


def restore(
    feed: Feed,
    out: str | os.PathLike[str],
    *,
    version: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    files: bool = True,
    trust_code: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Write the checkpoint of a version (the newest by default) to the folder `out`, whole or not at all.

    `version` is a number, or the name of a pin.

    `base` is a local copy of the checkpoint that the feed started with, if the one that the feed names is not
    available. If a payload is damaged or missing, another plan is tried. The digest is checked before `out` appears.
    `files`: also write the files beside the weights; if those of the version cannot be read, those of the nearest
    version with others are used, with a warning. Without, only the weights are written.
    `trust_code`: also write files of the feed that can run code when the folder is loaded, such as `modeling.py`.
    """
    local_path("out", out)
    base_path = optional_path("base", base)
    if not isinstance(version, str):
        optional_version(version)
    with opened(feed) as store:
        log = Log(store)
        target = log.resolve(version)
        beside = find_files(log, target, trust_code=trust_code) if files else {}
        if files and not has_config(beside):
            logger.warning(_NO_CONFIG, target.version, store.url)

        def attempt(plan: Plan) -> None:
            start = open_start(log, plan, base=base_path)
            write_checkpoint(
                start.layout,
                beside,
                out,
                lambda weights: replay(log, plan, weights, base=start.base, progress=progress),
            )

        with_fallback(log, target, attempt)
        return target
