"""Check every version of a feed: which objects are damaged, and which versions are lost with them."""

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from deltasync.arguments import optional_path
from deltasync.errors import CorruptError, DeltasyncError, FormatError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_files, fetch_payloads
from deltasync.feed.log import Log, require_follows
from deltasync.feed.plan import Edge
from deltasync.feed.route import open_base
from deltasync.format import keys
from deltasync.format.manifest import PayloadRef
from deltasync.format.payload import Payload
from deltasync.format.weights import zeros
from deltasync.parallel import Progress, counting
from deltasync.state import State
from deltasync.store import Feed, opened
from deltasync.upkeep.survey import ORPHAN_S, Survey, is_given_up, reachable, survey, without_pruned

_SURVEYS = 3
"""How often a feed is read if its floor is above its head: both may rise at the same time."""

_DAMAGE = (CorruptError, FormatError, MismatchError, NotFoundError)


class DeepCheck:
    """One walk through the versions in order, holding the weights of the last one that was rebuilt.

    `damaged` has the error of each manifest, by key, whose payloads are not what it promises.
    """

    def __init__(
        self,
        log: Log,
        survey: Survey,
        known_bad: Collection[str],
        *,
        base: Path | None,
        progress: Progress | None,
    ) -> None:
        self.damaged: dict[str, DeltasyncError] = {}
        self._log = log
        self._head = survey.head
        self._base = base
        # The payloads of edges that `prune` gave up are gone.
        self._edges = [edge for edge in survey.edges if edge.key not in known_bad and survey.holds(edge)]
        self._bridges = _bridges(self._edges)
        self._count = counting(progress, "verify", sum(edge.nbytes for edge in self._edges))
        self._state = State(scratch=True)
        self._not_decoded = 0
        self._absent_bases: list[str] = []

    @property
    def unchecked(self) -> list[str]:
        """What could not be checked, in words."""
        if not self._not_decoded:
            return self._absent_bases
        return [
            *self._absent_bases,
            f"{self._not_decoded} manifests whose payloads have the right SHA-256 but were not decoded: "
            "the versions that they start from cannot be rebuilt",
        ]

    def run(self) -> None:
        """Check every edge once, and the files beside the weights."""

        def order(edge: Edge) -> tuple[int, int, bool]:
            """By version: first the delta that leads to it, then its anchors, then the skips that start from it."""
            if edge.manifest.kind == "skip" and edge.start is not None:
                return edge.start, 2, edge.key in self._bridges
            return edge.end, 0 if edge.start is not None else 1, False

        by_files: dict[PayloadRef, list[Edge]] = {}
        for edge in sorted(self._edges, key=order):
            if edge.manifest.files is not None:
                by_files.setdefault(edge.manifest.files, []).append(edge)
            try:
                self._check(edge)
            except _DAMAGE as error:
                self.damaged[edge.key] = error
        for edges in by_files.values():
            try:
                fetch_files(self._log.store, edges[0].manifest, trust_code=True)
            except _DAMAGE as error:
                self.damaged.update((edge.key, error) for edge in edges)

    def _check(self, edge: Edge) -> None:
        payloads = fetch_payloads(self._log.store, [edge.manifest], verify_blocks=True)
        is_held = self._state.version == (edge.end if edge.start is None else edge.start)
        if edge.manifest.kind == "base":
            try:
                base = open_base(edge, at=self._base)
            except NotFoundError as error:
                self._absent_bases.append(f"the base of version {edge.end}, and the versions built on it: {error}")
                return
            self._state = State(zeros(base.layout), edge.manifest, scratch=True)
            self._state.require_weights().copy_from(base)
        elif edge.start is None and not is_held:
            first = next(payloads, None)
            if first is not None:
                self._state = State(zeros(first.header.layout), scratch=True)
                self._rebuild(edge, chain((first,), payloads), is_proved=False)
        elif is_held and (edge.manifest.kind == "delta" or edge.key in self._bridges):
            self._rebuild(edge, payloads, is_proved=edge.end != self._head)
        elif is_held:
            for nbytes in self._state.check(edge, payloads):
                self._add(nbytes)
        else:
            self._not_decoded += 1
            for payload in payloads:
                for _ in payload.blocks():
                    pass
                self._add(payload.nbytes)

    def _rebuild(self, edge: Edge, payloads: Iterator[Payload], *, is_proved: bool) -> None:
        """Hold the version of an edge. Blocks add up to the digest of a delta: only that of the head is checked."""
        for nbytes in self._state.take(edge, payloads):
            self._add(nbytes)
        if is_proved:
            self._state.at = edge.manifest
        else:
            self._state.prove(edge)

    def _add(self, nbytes: int) -> None:
        if self._count is not None:
            self._count(nbytes)


def _bridges(edges: Collection[Edge]) -> set[str]:
    """The skips by which the walk goes on where there is no delta: the shortest one from each such version."""
    with_delta = {edge.start for edge in edges if edge.manifest.kind == "delta"}
    shortest: dict[int, Edge] = {}
    for edge in sorted((edge for edge in edges if edge.manifest.kind == "skip"), key=lambda edge: edge.end):
        if edge.start is not None and edge.start not in with_delta:
            shortest.setdefault(edge.start, edge)
    return {edge.key for edge in shortest.values()}


@dataclass(frozen=True, slots=True)
class Damage:
    """An error, with the key of the manifest that cannot be used for it. `takes` are the versions lost with it."""

    key: str
    error: DeltasyncError
    takes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "kind": self.error.kind,
            "rule": self.error.rule,
            "message": self.error.message,
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`. `lost` versions can no longer be restored; `pruned` ones were given up on purpose."""

    head: int | None
    deep: bool
    restorable: tuple[int, ...]
    lost: tuple[int, ...]
    pruned: tuple[int, ...]
    damages: tuple[Damage, ...]
    unchecked: tuple[str, ...]
    orphans: int
    orphan_bytes: int
    young_orphans: int = 0
    """Those of the orphans that were put within a day, which `prune` leaves alone."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is damaged or lost. A feed with versions of which none can be restored is not clean."""
        return not self.damages and not self.lost and (self.head is None or bool(self.restorable))

    def to_json(self) -> dict[str, Any]:
        # The versions that damages cost, as ranges, with the keys of those that cost the same ones. By identity:
        # thousands of damages can share one tuple of as many versions, which takes long to hash.
        shared: dict[int, tuple[tuple[int, ...], list[str]]] = {}
        for damage in self.damages:
            if damage.takes:
                shared.setdefault(id(damage.takes), (damage.takes, []))[1].append(damage.key)
        return {
            "clean": self.is_clean,
            "deep": self.deep,
            "head": self.head,
            "restorable": list(self.restorable),
            "lost": list(self.lost),
            "pruned": list(self.pruned),
            "damages": [damage.to_json() for damage in self.damages],
            "takes": [
                {"versions": keys.ranges(versions), "keys": list(dict.fromkeys(by))} for versions, by in shared.values()
            ],
            "unchecked": list(self.unchecked),
            "orphans": self.orphans,
            "orphan_bytes": self.orphan_bytes,
            "young_orphans": self.young_orphans,
        }


def verify(
    feed: Feed,
    *,
    deep: bool = False,
    base: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Check all manifests and payloads of a feed. Damage is reported, not raised; StoreError if the store fails.

    Shallow: manifests, links, presence and size of payloads. Deep: also their SHA-256, every block decoded against the
    state that it belongs to, and state digests; this needs memory for the weights. `base` is a local copy of the
    checkpoint that the feed started with.
    """
    with opened(feed) as store:
        young_unix_s = time.time() - ORPHAN_S
        log = Log(store)
        contents = survey(log)
        for _ in range(_SURVEYS - 1):
            # New versions may have been committed, and old ones pruned, while the manifests were read.
            if contents.head is not None and contents.floor > contents.head:
                contents = survey(log)
        contents = _checked_floor(log, contents)
        damages = list(_damages(contents))
        unchecked: list[str] = []
        if deep:
            bad = {damage.key for damage in damages}
            check = DeepCheck(log, contents, bad, base=optional_path("base", base), progress=progress)
            check.run()
            contents = without_pruned(log, contents)
            if contents.head is None or log.head(after=contents.head) is None:
                # Otherwise the feed has gone on meanwhile, and a floor above the head that was read is no damage.
                contents = _checked_floor(log, contents)
            gone = [edge for edge in contents.edges if not contents.holds(edge)]
            given_up = {edge.key for edge in gone if is_given_up(edge, contents.floor)}
            damages += [Damage(key, error) for key, error in check.damaged.items() if key not in given_up]
            unchecked = check.unchecked
        bad = {damage.key for damage in damages}
        every = contents.all_versions()
        good = reachable(edge for edge in contents.edges if edge.key not in bad and contents.holds(edge))
        pruned = {version for version in every - good if version < contents.floor}
        lost = every - good - pruned
        # Edges that were pruned on purpose could not be used before the damage either.
        standing = [edge for edge in contents.edges if edge.key in bad or contents.holds(edge)]
        taken = _taken(standing, bad, lost, every)
        named = {ref.sha256 for edge in contents.edges for ref in edge.manifest.refs}
        orphans = [item for sha256, item in contents.payloads.items() if sha256 not in named]
        return Verification(
            head=contents.head,
            deep=deep,
            restorable=tuple(sorted(good)),
            lost=tuple(sorted(lost)),
            pruned=tuple(sorted(pruned)),
            damages=tuple(replace(d, takes=taken.get(d.key, ())) for d in [*damages, *_broken_pins(contents, good)]),
            unchecked=tuple(unchecked),
            orphans=len(orphans),
            orphan_bytes=sum(item.nbytes for item in orphans),
            young_orphans=sum(item.modified_unix_s >= young_unix_s for item in orphans),
        )


def _checked_floor(log: Log, contents: Survey) -> Survey:
    """The survey with a floor that is above the head as damage: it would pass off every version as pruned."""
    head, floor = contents.head, contents.floor
    if head is None or floor <= head:
        return contents
    key = max((keys.FLOOR, keys.COPY), key=log.floor_of)
    error = CorruptError(
        f"{key} promises versions from {floor} on, but version {head} is the newest",
        rule="floor.version",
        key=key,
        hint="if the feed was rolled back, delete this object: the next `deltasync prune` or `relay` writes it again",
    )
    return replace(contents, floor=0, damaged={**contents.damaged, key: error})


def _damages(contents: Survey) -> Iterator[Damage]:
    """What is damaged by the manifests and the listing alone: unreadable manifests, broken links, missing payloads."""
    for key, error in contents.damaged.items():
        yield Damage(key, error)
    for gap in contents.gaps():
        key = keys.version_key(gap[0])
        missing = f"version {gap[0]} is missing" if len(gap) == 1 else f"versions {gap[0]} to {gap[-1]} are missing"
        yield Damage(key, NotFoundError(missing, rule="chain.gap", version=gap[0], key=key))
    for version, manifest in contents.versions.items():
        before = contents.versions.get(version - 1)
        if before is not None:
            try:
                require_follows(before, manifest)
            except CorruptError as broken:
                yield Damage(keys.version_key(version), broken)
    for edge in contents.edges:
        for at, digest in ((edge.start, edge.manifest.parent_digest), (edge.end, edge.manifest.digest)):
            known = None if at is None else contents.versions.get(at)
            if known is not None and digest != known.digest and edge.key != keys.version_key(edge.end):
                message = f"{edge.key} promises the digest {digest} for version {at}, which has {known.digest}"
                yield Damage(edge.key, CorruptError(message, rule="chain.link", key=edge.key, version=at))
    for edge in contents.edges:
        for ref in () if is_given_up(edge, contents.floor) else edge.manifest.refs:
            key = keys.payload_key(ref.sha256)
            stored = contents.payloads.get(ref.sha256)
            if stored is None:
                error = NotFoundError(f"{key} is missing, but {edge.key} needs it", rule="payload.missing", key=key)
            elif stored.nbytes != ref.nbytes:
                message = f"{key} has {stored.nbytes} bytes, but {edge.key} promises {ref.nbytes}"
                error = CorruptError(message, rule="payload.size", key=key)
            else:
                continue
            yield Damage(edge.key, error)


def _broken_pins(contents: Survey, restorable: Collection[int]) -> Iterator[Damage]:
    for pin in contents.pins:
        key, manifest = keys.pin_key(pin.name), contents.versions.get(pin.version)
        error: DeltasyncError
        if manifest is not None and manifest.digest.hex != pin.digest:
            message = f"the pin {pin.name} promises the digest {pin.digest} for version {pin.version}"
            error = CorruptError(message, rule="pin.digest", key=key, version=pin.version)
        elif pin.version not in restorable:
            message = f"version {pin.version}, which the pin {pin.name} keeps, cannot be restored"
            error = NotFoundError(message, rule="pin.lost", key=key, version=pin.version)
        else:
            continue
        yield Damage(key, error)


def _taken(edges: list[Edge], bad: Collection[str], lost: set[int], every: set[int]) -> dict[str, tuple[int, ...]]:
    """The lost versions that each damage alone would cost, by the key that it is about."""
    always = (every - reachable(edges)) & lost
    # One tuple for all damages that cost no more than this: there can be thousands of both.
    always_sorted = tuple(sorted(always))
    # Damaged edges without which a lost version may be out of reach: any number of others costs no time. Each version
    # is reached by one edge, an undamaged one where there is one; the paths to the lost versions count.
    reached: dict[int | None, Edge | None] = {None: None}
    for edge in sorted(edges, key=lambda edge: (edge.end, edge.key in bad)):
        if edge.start in reached:
            reached.setdefault(edge.end, edge)
    needed: set[str] = set()
    for version in lost:
        step = reached.get(version)
        while step is not None and step.key not in needed:
            needed.add(step.key)
            step = reached[step.start]
    taken: dict[str, tuple[int, ...]] = {}
    for key in bad:
        without = always
        if key in needed:
            without = (every - reachable(edge for edge in edges if edge.key != key)) & lost
        own = keys.parse_version_key(key)
        # An unreadable manifest is not among the edges: its version is lost too.
        if own is not None and own in lost and own not in without:
            without = without | {own}
        taken[key] = always_sorted if without is always else tuple(sorted(without))
    return taken
