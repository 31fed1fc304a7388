"""Is every version of a feed whole? What is damaged, and which versions does it take with it?"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltasync.deep import DeepCheck
from deltasync.errors import CorruptError, DeltasyncError, NotFoundError
from deltasync.format import keys
from deltasync.log.log import Log, require_follows
from deltasync.log.planning import Edge
from deltasync.log.survey import Survey, is_given_up, reachable, survey, without_pruned
from deltasync.progress import Progress
from deltasync.store.protocol import Store


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong, under the key of the manifest that it makes useless. `takes`: versions lost with it."""

    key: str
    error: DeltasyncError
    takes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "kind": self.error.kind,
            "rule": self.error.rule,
            "message": self.error.message,
            "takes": list(self.takes),
        }


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found. `lost` versions cannot be restored any more; `pruned` ones were given up on purpose."""

    head: int | None
    deep: bool
    restorable: tuple[int, ...]
    lost: tuple[int, ...]
    pruned: tuple[int, ...]
    damages: tuple[Damage, ...]
    unchecked: tuple[str, ...]
    orphans: int
    orphan_bytes: int

    @property
    def is_clean(self) -> bool:
        return not self.damages and not self.lost

    def to_json(self) -> dict[str, Any]:
        return {
            "clean": self.is_clean,
            "deep": self.deep,
            "head": self.head,
            "restorable": list(self.restorable),
            "lost": list(self.lost),
            "pruned": list(self.pruned),
            "damages": [damage.to_json() for damage in self.damages],
            "unchecked": list(self.unchecked),
            "orphans": self.orphans,
            "orphan_bytes": self.orphan_bytes,
        }


def verify(
    store: Store,
    *,
    deep: bool = False,
    base: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Walk all chains of a feed. Damage is reported, never raised; StoreError if the store itself fails.

    Shallow: manifests, links, presence and size of payloads. Deep: also their SHA-256, every block decoded against the
    state that it belongs to, and state digests; this needs memory for the weights. `base` is a local copy of the
    checkpoint that the feed began with.
    """
    log = Log(store)
    found = survey(log)
    damages = [Damage(key, error) for key, error in found.damaged.items()]
    damages += _broken_links(found)
    damages += _missing_payloads(found)
    unchecked: list[str] = []
    if deep:
        bad = {damage.key for damage in damages}
        check = DeepCheck(log, found, bad, base=base, threads=threads, progress=progress)
        check.run()
        found = without_pruned(log, found)
        given_up = {edge.key for edge in found.edges() if is_given_up(edge, found.floor) and not found.holds(edge)}
        damages += [Damage(key, error) for key, error in check.damaged.items() if key not in given_up]
        unchecked = check.unchecked
    return _report(found, damages, unchecked, deep=deep)


def _broken_links(found: Survey) -> Iterator[Damage]:
    for version in found.missing():
        key = keys.version_key(version)
        yield Damage(key, NotFoundError(f"version {version} is missing", rule="chain.gap", version=version, key=key))
    for version, manifest in found.versions.items():
        before = found.versions.get(version - 1)
        if before is not None:
            try:
                require_follows(before, manifest)
            except CorruptError as error:
                yield Damage(keys.version_key(version), error)
    for edge in found.edges():
        for at, digest in ((edge.start, edge.manifest.parent_digest), (edge.end, edge.manifest.digest)):
            told = None if at is None else found.versions.get(at)
            if told is not None and digest != told.digest and edge.key != keys.version_key(edge.end):
                text = f"{edge.key} says that version {at} has the digest {digest}, it has {told.digest}"
                yield Damage(edge.key, CorruptError(text, rule="chain.link", key=edge.key, version=at))


def _missing_payloads(found: Survey) -> Iterator[Damage]:
    for edge in found.edges():
        if is_given_up(edge, found.floor):
            continue
        for ref in edge.manifest.refs:
            key = keys.payload_key(ref.sha256)
            stored = found.payloads.get(ref.sha256)
            error: DeltasyncError
            if stored is None:
                error = NotFoundError(f"{key} is missing, {edge.key} names it", rule="payload.missing", key=key)
            elif stored.nbytes != ref.nbytes:
                told = f"{key} has {stored.nbytes} bytes, {edge.key} names {ref.nbytes}"
                error = CorruptError(told, rule="payload.size", key=key)
            else:
                continue
            yield Damage(edge.key, error)


def _report(found: Survey, damages: list[Damage], unchecked: list[str], *, deep: bool) -> Verification:
    bad = {damage.key for damage in damages}
    edges = list(found.edges())
    every = found.all_versions()
    good = reachable(edge for edge in edges if edge.key not in bad and found.holds(edge))
    gone = every - good
    pruned = {v for v in gone if v < found.floor}
    # What was given up on purpose did not hold anything up before the damage.
    standing = [edge for edge in edges if edge.key in bad or found.holds(edge)]
    named = {ref.sha256 for edge in edges for ref in edge.manifest.refs}
    orphans = [item for sha256, item in found.payloads.items() if sha256 not in named]
    return Verification(
        head=found.head,
        deep=deep,
        restorable=tuple(sorted(good)),
        lost=tuple(sorted(gone - pruned)),
        pruned=tuple(sorted(pruned)),
        damages=tuple(replace(d, takes=_taken(standing, d.key, gone - pruned, every)) for d in damages),
        unchecked=tuple(unchecked),
        orphans=len(orphans),
        orphan_bytes=sum(item.nbytes for item in orphans),
    )


def _taken(edges: list[Edge], key: str, lost: set[int], every: set[int]) -> tuple[int, ...]:
    """The lost versions that this damage alone would cost."""
    version = keys.parse_version_key(key)
    without = every - reachable(edge for edge in edges if edge.key != key)
    if version is not None:
        # An unreadable manifest is no edge: without the version, what follows from it by deltas is gone as well.
        without |= {version} & lost
    return tuple(sorted(without & lost))
