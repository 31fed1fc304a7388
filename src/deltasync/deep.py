"""The deep part of `verify`: every payload fetched and decoded against the state that it belongs to."""

from collections.abc import Collection, Iterator
from pathlib import Path

from deltasync import blocks
from deltasync.bases import open_base
from deltasync.errors import CorruptError, DeltasyncError, FormatError, MismatchError, NotFoundError
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Payload
from deltasync.format.weights import Weights
from deltasync.log.log import Log
from deltasync.log.payloads import fetch_files, fetch_payloads
from deltasync.log.planning import Edge
from deltasync.log.survey import Survey
from deltasync.progress import Progress, counting
from deltasync.replay import zeros

_DAMAGE = (CorruptError, FormatError, MismatchError, NotFoundError)


class DeepCheck:
    """One walk through the versions in order, holding the weights of the one reached last.

    `damaged` has the error of each manifest (by key) whose payloads are not what it promises; `unchecked` says in words
    what could not be looked at.
    """

    def __init__(
        self,
        log: Log,
        found: Survey,
        known_bad: Collection[str],
        *,
        base: Path | None,
        threads: int | None,
        progress: Progress | None,
    ) -> None:
        self.damaged: dict[str, DeltasyncError] = {}
        self._log = log
        self._head = found.head
        self._base = base
        self._threads = threads
        # What `prune` gave up has no payloads any more.
        self._edges = [edge for edge in found.edges() if edge.key not in known_bad and found.holds(edge)]
        self._count = counting(progress, "verify", sum(edge.nbytes for edge in self._edges))
        self._held: tuple[int, Weights] | None = None
        self._not_decoded = 0
        self._absent_bases: list[str] = []

    @property
    def unchecked(self) -> list[str]:
        """What could not be looked at, in words."""
        told = list(self._absent_bases)
        if self._not_decoded:
            told.append(
                f"{self._not_decoded} manifests whose payloads have the right SHA-256 but were not decoded: "
                "the versions that they start from cannot be rebuilt"
            )
        return told

    def run(self) -> None:
        """Check every edge once."""
        for edge in sorted(self._edges, key=_walking_order):
            try:
                self._check(edge)
            except _DAMAGE as error:
                self.damaged[edge.key] = error
        self._check_files()

    def _check(self, edge: Edge) -> None:
        held = self._weights_of(edge.end if edge.start is None else edge.start)
        if edge.manifest.kind == "base":
            self._enter_base(edge)
        elif edge.start is None and held is None:
            self._enter_anchor(edge)
        elif edge.manifest.kind == "delta" and held is not None:
            self._advance(edge, held)
        else:
            self._check_aside(edge, held)

    def _enter_base(self, edge: Edge) -> None:
        try:
            base = open_base(edge.manifest, at=self._base, threads=self._threads).weights
        except NotFoundError as error:
            self._absent_bases.append(f"the base of version {edge.end}, and what follows from it: {error}")
            return
        self._held = edge.end, Weights(base.layout, tuple(array.copy() for array in base.arrays))

    def _enter_anchor(self, edge: Edge) -> None:
        self._held = None
        weights: Weights | None = None
        for payload in self._payloads(edge.manifest):
            weights = zeros(payload.header.layout) if weights is None else weights
            blocks.decode_into(weights, weights, payload.blocks(), relative=False, threads=self._threads)
        if weights is not None:
            self._require_digest(edge.manifest, weights)
            self._held = edge.end, weights

    def _advance(self, edge: Edge, weights: Weights) -> None:
        # Until all of it is in, these are the weights of no version.
        self._held = None
        for payload in self._payloads(edge.manifest, onto=weights):
            blocks.decode_into(weights, weights, payload.blocks(), relative=True, threads=self._threads)
        if edge.end == self._head:
            self._require_digest(edge.manifest, weights)
        self._held = edge.end, weights

    def _check_aside(self, edge: Edge, old: Weights | None) -> None:
        """A skip, or an anchor of weights that are there already: decoded, and not kept."""
        self._not_decoded += old is None
        for payload in self._payloads(edge.manifest, onto=old):
            relative = edge.start is not None
            if old is None:
                for _ in payload.blocks():
                    pass
            else:
                for _ in blocks.decode(old, payload.blocks(), relative=relative, threads=self._threads):
                    pass

    def _check_files(self) -> None:
        by_ref: dict[PayloadRef, list[Edge]] = {}
        for edge in self._edges:
            if edge.manifest.files is not None:
                by_ref.setdefault(edge.manifest.files, []).append(edge)
        for edges in by_ref.values():
            try:
                fetch_files(self._log.store, edges[0].manifest)
            except _DAMAGE as error:
                self.damaged.update((edge.key, error) for edge in edges)

    def _payloads(self, manifest: Manifest, *, onto: Weights | None = None) -> Iterator[Payload]:
        for payload in fetch_payloads(self._log.store, [manifest]):
            if onto is not None:
                ours = f"the {manifest.kind} to version {manifest.version}"
                payload.header.layout.require_equal(onto.layout, ours=ours, theirs="the version before it")
            yield payload
            if self._count is not None:
                self._count(payload.nbytes)

    def _weights_of(self, version: int) -> Weights | None:
        return self._held[1] if self._held is not None and self._held[0] == version else None

    def _require_digest(self, manifest: Manifest, weights: Weights) -> None:
        found = blocks.digest(weights, threads=self._threads)
        if found != manifest.digest:
            told = f"version {manifest.version} came out with the digest {found}, not {manifest.digest}"
            raise CorruptError(told, rule="restore.digest", version=manifest.version)


def _walking_order(edge: Edge) -> tuple[int, int]:
    """Version by version: first the delta that leads there, then its anchors, then the skips that start there."""
    if edge.manifest.kind == "skip" and edge.start is not None:
        return edge.start, 2
    return edge.end, 0 if edge.start is not None else 1
