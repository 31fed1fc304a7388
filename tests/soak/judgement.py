"""The end of a soak: everything comes to rest, and is compared with what an uninterrupted training has at each step."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deltasync import blocks
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.replica.folder import recorded_version
from deltasync.state import load
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.torch.tensors import host_bits
from deltasync.upkeep.verify import verify

from .processes import Life, MiB, Sample, grows, wait_until
from .system import System
from .training import Training, state_hash, weights_hash

END_S = 180.0
"""Within this time after the faults a process must end, or reach the head. A client waits two minutes for an answer."""

RSS_GROWTH_BYTES = 48 * MiB
DESCRIPTOR_GROWTH = 16
POINTS = 30
"""How many samples of a life the report has."""

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp|\.[^/]*\.part", re.ASCII)
_ON_DISK = {"model", "model.lock", ".model.deltasync", "mirror", "mirror.json", "mirror.lock", "lost+found"}


@dataclass(frozen=True, slots=True)
class Expected:
    """The weights after a step."""

    hash: str
    digest: StateDigest


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found at the end. `facts` are printed."""

    problems: list[str]
    facts: dict[str, Any]


def conclude(system: System) -> Verdict:
    """Let the system come to rest, and judge it. The faults are over."""
    problems = list(system.problems)
    _end(system, "trainer", problems)
    system.roles["pruner"].kill()
    system.roles["pruner"].start()
    if not wait_until(lambda: system.roles["pruner"].ended() is not None, within_s=END_S):
        problems.append("the last prune does not end")
    elif system.roles["pruner"].lives[-1].exit != 0:
        life = system.roles["pruner"].lives[-1]
        problems.append(f"the last prune failed: {system.roles['pruner'].said(life)[-1000:]}")
    with open_store(system.url) as store:
        log = Log(store)
        head = log.require_head()
        for name in system.replicas:
            if not wait_until(lambda name=name: system.version_of(name) == head.version, within_s=END_S):
                found, said = system.version_of(name), system.roles[name].said(system.roles[name].lives[-1])
                problems.append(f"{name} is at version {found}, not at the head {head.version}: {said[-1500:]}")
        problems += _vllm_problems(system, head.version)
        for name in system.replicas:
            _end(system, name, problems)
        manifests = list(log.read_many(range(head.version + 1)))
        layout = load(log, head).layout
        expected = _expected(system.folder, {m.step for m in manifests if m.step is not None}, layout)
        problems += _feed_problems(store, log, manifests, expected)
        problems += _replica_problems(system, manifests, expected)
        problems += _leftovers(system, store)
        problems += _growth(system)
        facts = _facts(system, store, manifests)
    return Verdict(problems, facts)


def _end(system: System, name: str, problems: list[str]) -> None:
    role = system.roles[name]
    status = role.terminate(within_s=END_S)
    if status != 0:
        said = role.said(role.lives[-1])[-1500:]
        problems.append(f"{name} ended with {status} instead of 0 when it was asked to end: {said}")


def _vllm_problems(system: System, head: int) -> list[str]:
    """A scrub compares all weights of the server with its mirror, whose bits are compared later."""
    if system.vllm is None:
        return []
    answer = system.vllm.control("scrub")
    wanted = {"version": head, "damaged": [], "unseen_elements": 0}
    return [] if answer == wanted else [f"the scrub of vLLM answered {answer}, not {wanted}"]


def _expected(folder: Path, steps: set[int], layout: Layout) -> dict[int, Expected]:
    torch.set_num_threads(1)
    training, found = Training(folder), {}
    while training.step < max(steps):
        training.train()
        if training.step in steps:
            cast = {name: tensor.to(torch.bfloat16) for name, tensor in training.state.items()}
            arrays = tuple(host_bits(cast[spec.name], spec.dtype) for spec in layout.tensors)
            found[training.step] = Expected(state_hash(cast), blocks.digest(Weights(layout, arrays)))
    return found


def _feed_problems(
    store: Store, log: Log, manifests: Sequence[Manifest], expected: Mapping[int, Expected]
) -> Iterable[str]:
    found = verify(store, deep=True)
    if not found.is_clean:
        yield f"verify: {found.damages}, lost {found.lost}"
    promised = set(range(log.floor(), len(manifests)))
    if not promised <= set(found.restorable):
        yield f"verify: versions {sorted(promised - set(found.restorable))} cannot be restored"
    for manifest in manifests:
        if manifest.step is None or manifest.digest != expected[manifest.step].digest:
            yield f"version {manifest.version} has not the digest of step {manifest.step}"
    for version in found.restorable:
        step = manifests[version].step
        if step is None or weights_hash(load(log, manifests[version])) != expected[step].hash:
            yield f"version {version} has other bits than step {step}"


def _replica_problems(system: System, manifests: Sequence[Manifest], expected: Mapping[int, Expected]) -> Iterable[str]:
    head = manifests[-1]

    def hash_of(version: int) -> str | None:
        step = manifests[version].step if version < len(manifests) else None
        return None if step is None else expected[step].hash

    for line in _lines(system.folder / "published.jsonl"):
        if line["version"] > head.version or manifests[line["version"]].step != line["step"]:
            yield f"the trainer has committed {line}, which the feed does not have"
    served = list(system.served)
    for name in ("torch", "steady"):
        lines = [(name, line["version"], line["hash"]) for line in _lines(system.folder / f"{name}.jsonl")]
        if not lines or lines[-1][1] != head.version:
            yield f"the last version of {name} is {lines[-1:]}, not {head.version}"
        served += lines
    for name, version, found in served:
        if found != hash_of(version):
            yield f"{name} has served version {version} with other bits than its step"
    if recorded_version(system.link.resolve()) != head.version:
        yield f"the folder has version {recorded_version(system.link.resolve())}, not {head.version}"
    mirrors = [system.mirror, system.folder / "torch.mirror"]
    mirrors += [system.folder / "vllm.mirror"] if system.vllm is not None else []
    for path in (system.link, *mirrors):
        try:
            found = weights_hash(open_checkpoint(path).weights)
        except DeltasyncError as error:
            yield f"{path.name} cannot be read: {error}"
            continue
        if found != hash_of(head.version):
            yield f"{path.name} has other bits than the head"


def _leftovers(system: System, store: Store) -> Iterable[str]:
    """Temporary files and folders, heartbeats, and shared memory that no process uses any more."""
    for path in system.folder.rglob("*"):
        if _TEMPORARY.fullmatch(path.name):
            yield f"{path.relative_to(system.folder)} is left over"
    odd = {path.name for path in system.disk.iterdir()} - _ON_DISK
    if odd:
        yield f"left over on the disk of the folder replica: {sorted(odd)}"
    versions = sorted(path.name for path in (system.disk / ".model.deltasync").iterdir())
    if len(versions) > 2:
        yield f"more versions than the live one and the one before: {versions}"
    beats = [item.key for item in store.list(keys.REPLICAS)]
    if beats:
        yield f"heartbeats of replicas that have left: {beats}"
    for role in system.roles.values():
        left = [str(path) for path in role.shared_memory if path.exists()]
        if left:
            yield f"{role.name} has left {left} in shared memory"


def _growth(system: System) -> Iterable[str]:
    for role in system.roles.values():
        for life in role.lives if role.is_long_lived else ():
            if grows([sample.rss_bytes for sample in life.settled], RSS_GROWTH_BYTES):
                values = [sample.rss_bytes // MiB for sample in thinned(life.settled)]
                yield f"the memory of {role.name} grows without bound: {values} MiB"
            if grows([sample.descriptors for sample in life.settled], DESCRIPTOR_GROWTH):
                values = [sample.descriptors for sample in thinned(life.settled)]
                yield f"the open descriptors of {role.name} grow without bound: {values}"


def _facts(system: System, store: Store, manifests: Sequence[Manifest]) -> dict[str, Any]:
    """What happened, for the report."""
    published = list(_lines(system.folder / "published.jsonl"))
    faults, roles = system.faults, system.roles
    counts = {
        name: {key: sum(life[key] for life in lives.values()) for key in next(iter(lives.values()))}
        for name, lives in system.counts.items()
    }
    return {
        "versions": len(manifests),
        "steps": max(m.step or 0 for m in manifests),
        "anchors": sum(line["kind"] == "anchor" for line in published),
        "published_bytes": sum(line["payload_bytes"] for line in published),
        "publish_retries": sum(line["retries"] for line in published),
        "coalesced": sum(line["coalesced"] for line in published),
        "requests": len(system.proxy.seen),
        "spoiled_answers": dict(sorted(system.proxy.spoiled.items())),
        "kills": {name: role.kills for name, role in roles.items() if role.kills},
        "stops": {name: role.stops for name, role in roles.items() if role.stops},
        "clock_jumps": {f"{seconds:+d} s": count for seconds, count in sorted(faults.jumps.items())},
        "full_disks": faults.fills,
        "exits_for_lack_of_space": faults.no_space_exits,
        "prunes_by_exit_code": {str(code): count for code, count in sorted(faults.prunes.items())},
        "probes_left": sum(1 for _ in store.list(keys.PROBES)),
        "served_versions_compared": len(system.served)
        + sum(len(list(_lines(system.folder / f"{name}.jsonl"))) for name in ("torch", "steady")),
        "vllm_answers": dict(sorted(system.answers.items())),
        "followers": counts,
        "processes": {
            name: _use(role.lives) for name, role in roles.items() if any(life.samples for life in role.lives)
        },
    }


def thinned(samples: Sequence[Sample]) -> Sequence[Sample]:
    """About `POINTS` of the samples."""
    return samples[:: max(1, len(samples) // POINTS)]


def _use(lives: Sequence[Life]) -> dict[str, Any]:
    """Memory and descriptors: of the longest life at its start, its end and over time, and the most of all."""
    life = max(lives, key=lambda life: (len(life.settled), len(life.samples)))
    longest = life.settled or life.samples
    every = [sample for life in lives for sample in life.samples]
    return {
        "lives": len(lives),
        "longest_s": round(longest[-1].at_s - longest[0].at_s),
        "rss_mib": {
            "first": longest[0].rss_bytes // MiB,
            "last": longest[-1].rss_bytes // MiB,
            "max": max(sample.rss_bytes for sample in every) // MiB,
        },
        "descriptors": {
            "first": longest[0].descriptors,
            "last": longest[-1].descriptors,
            "max": max(sample.descriptors for sample in every),
        },
        "over_time": [
            {"at_s": round(sample.at_s), "rss_mib": sample.rss_bytes // MiB, "descriptors": sample.descriptors}
            for sample in thinned(longest)
        ],
    }


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    return (json.loads(line) for line in path.read_bytes().splitlines()) if path.exists() else ()
