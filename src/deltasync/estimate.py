"""Estimate what a feed costs: seconds from step to live, bytes, memory and dollars, from rates that were measured.

The model follows a version through the pipeline of docs/architecture.md. `python -m benchmarks.scale` compares it with
runs, for which it measures the rates of the machine. Left out are copies between accelerators and hosts, the time in
which a TCP connection becomes fast, retries, and everything else that uses the same links and cores.
"""

import math
import os
from dataclasses import dataclass, field
from itertools import pairwise

from deltasync import blocks
from deltasync.arguments import whole_number
from deltasync.checkpoint import open_checkpoint
from deltasync.codecs import planes
from deltasync.errors import InvalidInputError
from deltasync.format import limits
from deltasync.oneshot import diff, inspect
from deltasync.parallel import Progress, counting, each
from deltasync.replica.loop import poll_pause_s
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.trainer.versions import DELTA_BYTES_LEAST, DELTA_BYTES_MOST, DELTA_PAYLOADS

STEP_VARIATION = 0.1
"""By which share of it the time between two versions varies: a follower polls less often when it expects none."""

CAPTURE_BYTES_PER_CHANGE = 15
"""Memory of a publication in progress, as measured by `benchmarks.publish`; two can be in progress."""

DECODED_BYTES_PER_CHANGE = 16
"""Memory of a decoded change in a replica: its position and bits, as decoded and as staged."""

_DENSITIES = (
    (0.0000983, 13.07),
    (0.00196, 8.32),
    (0.00516, 7.48),
    (0.01001, 6.95),
    (0.0501, 5.64),
    (0.25, 4.43),
    (0.6, 4.16),
)
"""Shares of bf16 weights that changed, and the bits of each change, as measured by `benchmarks.codec`."""

_LEARNING_RATES = ((1e-6, 0.00196), (3e-6, 0.00516))
"""Learning rates of AdamW, and the share of bf16 weights that a step of SmolLM2-135M changed (`benchmarks.codec`)."""

_ANCHOR_SHARES = {"bf16": 0.664, "fp8": 0.814}
"""The size of an anchor, of that of the weights (`benchmarks.codec`)."""

_ITEM_BYTES = {"bf16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Pass:
    """The time of a pass over weights that does more where they changed: a constant, by weights and by changes."""

    fixed_s: float
    bytes_per_s: float
    changes_per_s: float

    def seconds(self, weight_bytes: float, changed: float, *, speed: float = 1.0) -> float:
        """Seconds for so many weights; `speed` is a factor for everything but the constant."""
        return self.fixed_s + (weight_bytes / self.bytes_per_s + changed / self.changes_per_s) / speed


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a rank or a replica with `cores` cores can do.

    `doubling` is how many times faster two cores were than one; each further doubling of the cores is assumed to be
    worth the same. The round trips are those of requests that wait for each other, without those of the payloads.
    """

    cores: int
    doubling: float
    capture: Pass
    encode: Pass
    decode: Pass
    stage: Pass
    pause: Pass
    anchor_encode_bytes_per_s: float
    anchor_decode_bytes_per_s: float
    commit_round_trips: int
    plan_round_trips: int

    def speed(self, cores: int) -> float:
        """How many times faster so many cores are than those that were measured."""
        return float(self.doubling ** math.log2(cores / self.cores))


MEASURED = Rates(
    cores=2,
    doubling=1.81,
    capture=Pass(0.0, 1.48e10, math.inf),
    encode=Pass(0.0, 7.65e9, math.inf),
    decode=Pass(0.0, 6.91e9, math.inf),
    stage=Pass(0.0, math.inf, 1.25e8),
    pause=Pass(0.0, math.inf, 8.01e7),
    anchor_encode_bytes_per_s=0.823e9,
    anchor_decode_bytes_per_s=0.780e9,
    commit_round_trips=1,
    plan_round_trips=2,
)
"""Two cores with AVX2, 596 million bf16 weights of which 1 % changed: the rates in `benchmarks/results`.

A publisher with a store on disk, its kernels for decoding, vLLM's worker for staging and the pause, and a local store
for anchors. `benchmarks.scale` measures all of them in one run on another machine.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What one step changes of a model, and the bytes that this takes."""

    elements: int
    weight_bytes: int
    changed: int
    delta_bytes: int
    anchor_bytes: int

    @classmethod
    def assumed(cls, elements: int, density: float, *, dtype: str = "bf16") -> "Change":
        """From the share of the weights that change, with the bits for each of them that were measured."""
        if dtype not in _ITEM_BYTES:
            raise InvalidInputError(
                f"there are no measured sizes for {dtype}, only for {' and '.join(_ITEM_BYTES)}",
                hint="give two checkpoints instead: their change is measured",
            )
        whole_number("elements", elements, least=1, most=limits.ELEMENTS_MAX)
        if not 0.0 < density <= 1.0:
            raise InvalidInputError(f"the share of changed weights must be above 0 and at most 1, not {density:g}")
        weight_bytes, changed = elements * _ITEM_BYTES[dtype], max(1, round(elements * density))
        anchor_bytes = math.ceil(weight_bytes * _ANCHOR_SHARES[dtype])
        # A delta never takes more than all weights would: blocks are dense where that is smaller.
        delta_bytes = min(math.ceil(changed * bits_per_change(density) / 8), anchor_bytes)
        return cls(
            elements=elements,
            weight_bytes=weight_bytes,
            changed=changed,
            delta_bytes=delta_bytes,
            anchor_bytes=anchor_bytes,
        )

    @classmethod
    def measured(
        cls, old: str | os.PathLike[str], new: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> "Change":
        """From two checkpoints of the same model, both coded as a publisher would.

        MismatchError names the first tensor whose name, type or shape differs.
        """
        delta = inspect(diff(old, new, progress=progress))
        after, layout, total = open_checkpoint(new).weights, delta.layout, delta.layout.elements
        count, anchor_bytes = counting(progress, "anchor", total), 0
        all_runs = blocks.layout_runs(layout, elements=limits.PLANES_ELEMENTS)
        for block in each(lambda runs: planes.encode(after, runs), all_runs):
            anchor_bytes += len(block.data)
            if count is not None:
                count(int(block.runs[:, 2].sum()))
        return cls(
            elements=total,
            weight_bytes=layout.nbytes,
            changed=delta.changed,
            delta_bytes=delta.nbytes if delta.changed else 0,
            anchor_bytes=anchor_bytes,
        )

    @property
    def density(self) -> float:
        """The share of the elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


def bits_per_change(density: float) -> float:
    """Bits for each changed element: between measured densities by a straight line over their logarithm."""
    density = min(max(density, _DENSITIES[0][0]), _DENSITIES[-1][0])
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(_DENSITIES) if density <= pair[1][0])
    return y0 + (y1 - y0) * math.log(density / x0) / math.log(x1 / x0)


def density_at(learning_rate: float) -> float:
    """The share of bf16 weights that a step of AdamW changes. InvalidInputError far from what was measured."""
    lowest, highest = _LEARNING_RATES[0][0] / 3, _LEARNING_RATES[-1][0] * 3
    if not lowest <= learning_rate <= highest:
        raise InvalidInputError(
            f"steps were measured at learning rates of 1e-6 and 3e-6, which says little about {learning_rate:g}",
            hint="give the share of weights that change, or two checkpoints",
        )
    (x0, y0), (x1, y1) = _LEARNING_RATES
    # A power law through both: it may leave the range by a little.
    return float(y0 * (learning_rate / x0) ** (math.log(y1 / y0) / math.log(x1 / x0)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection to the store. Everything that uses it at the same time shares the rate."""

    bits_per_s: float
    round_trip_s: float = 0.05

    def __post_init__(self) -> None:
        if not (self.bits_per_s > 0 and 0 <= self.round_trip_s < math.inf):
            raise InvalidInputError(
                f"a link must have a rate above 0 and a round trip of at least 0 s, not {self.bits_per_s:g} bit/s and "
                f"{self.round_trip_s:g} s"
            )

    def seconds(self, nbytes: float) -> float:
        """The time that so many bytes take, without any round trip."""
        return 8 * nbytes / self.bits_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Who publishes, who follows, and what connects them with the store.

    `uplinks`: the ranks upload over so many links, equally. `sites`: the replicas are in so many places, and those of
    one place share a link; by default each replica has one of its own. `every_s`: seconds between two steps that are
    published. `cores`: of each rank and each replica.
    """

    ranks: int = 1
    uplink: Link
    uplinks: int = 1
    replicas: int = 1
    downlink: Link
    sites: int | None = None
    every_s: float = 60.0
    cores: int = 2
    anchors: AnchorPolicy = field(default_factory=AnchorPolicy)
    egress_usd_per_gb: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "cores"):
            whole_number(name, getattr(self, name), least=1)
        whole_number("uplinks", self.uplinks, least=1, most=self.ranks, hint="a rank uploads over one link")
        if self.sites is not None:
            whole_number("sites", self.sites, least=1, most=self.replicas, hint="a site has at least one replica")
        if not 0 < self.every_s < math.inf:
            raise InvalidInputError(f"every_s must be above 0, not {self.every_s:g}")
        if not 0 <= self.egress_usd_per_gb < math.inf:
            raise InvalidInputError(f"egress_usd_per_gb must be at least 0, not {self.egress_usd_per_gb:g}")

    @property
    def sharing(self) -> int:
        """How many replicas share a link, where most do."""
        return 1 if self.sites is None else -(-self.replicas // self.sites)

    def put_s(self, nbytes: float) -> float:
        """The time that bytes of all ranks take on their links."""
        return self.uplink.seconds(nbytes / self.uplinks)

    def fetch_s(self, nbytes: float) -> float:
        """The time until every replica has bytes that all of them fetch at once."""
        return self.downlink.seconds(nbytes * self.sharing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Seconds from the end of a step until its weights are served. What overlaps counts once, for the longer part.

    `put` and `fetch` are what the link needs beyond coding: payloads are put while others are encoded, and fetched
    while others are decoded.
    """

    capture: float
    encode: float
    put: float
    commit: float
    poll: float
    plan: float
    fetch: float
    decode: float
    stage: float
    pause: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, name) for name in Phases.__slots__))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes and dollars. `up` is what all ranks put for a version, anchors included; `down` what all replicas fetch."""

    up_bytes: float
    down_bytes: float
    up_bytes_per_hour: float
    down_bytes_per_hour: float
    egress_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a deployment costs. The `copy_` fields are those of full copies over the same links, the transfer alone.

    `publish_every_s` and `follow_every_s`: how often a version can be published, anchors included, and taken. A trainer
    that is faster publishes several steps as one version; a replica that is slower takes several versions at once.
    `anchor_versions`: versions between two anchors, None if none is due. `join_`: a replica that joins late, on
    average: an anchor and half of the deltas until the next one, without skips.
    """

    phases: Phases
    traffic: Traffic
    copy_traffic: Traffic
    versions_per_hour: float
    copy_step_to_live_s: float
    copy_every_s: float
    publish_every_s: float
    follow_every_s: float
    anchor_versions: int | None
    anchor_put_s: float
    join_bytes: float
    join_s: float
    trainer_memory_bytes: float
    replica_memory_bytes: float

    @property
    def step_to_live_s(self) -> float:
        return self.phases.total

    @property
    def held_s(self) -> float:
        """How long a step is held up."""
        return self.phases.capture

    @property
    def pause_s(self) -> float:
        """How long serving pauses."""
        return self.phases.pause


def estimate(change: Change, deployment: Deployment, rates: Rates = MEASURED) -> Estimate:
    """What it costs to publish such a change with each step to such a deployment."""
    d, speed = deployment, rates.speed(deployment.cores)
    rank = (change.weight_bytes / d.ranks, change.changed / d.ranks)
    whole = (change.weight_bytes, change.changed)
    payloads = _payloads(change.delta_bytes / d.ranks)
    encode_s = rates.encode.seconds(*rank, speed=speed)
    put_s = overlapped(encode_s, d.put_s(change.delta_bytes), payloads) - encode_s + d.uplink.round_trip_s
    decode_s = rates.decode.seconds(*whole, speed=speed)
    fetched_s = overlapped(decode_s, d.fetch_s(change.delta_bytes), payloads * d.ranks)
    phases = Phases(
        capture=rates.capture.seconds(*rank, speed=speed),
        encode=encode_s,
        put=put_s,
        commit=rates.commit_round_trips * d.uplink.round_trip_s,
        # The version comes at any time between two polls.
        poll=poll_pause_s(STEP_VARIATION * d.every_s) / 2,
        plan=rates.plan_round_trips * d.downlink.round_trip_s,
        fetch=fetched_s - decode_s + d.downlink.round_trip_s,
        decode=decode_s,
        stage=rates.stage.seconds(*whole, speed=speed),
        pause=rates.pause.seconds(*whole, speed=speed),
    )
    every = anchor_versions(d.anchors, delta_bytes=change.delta_bytes, anchor_bytes=change.anchor_bytes)
    anchor_put_s = overlapped(
        rank[0] / rates.anchor_encode_bytes_per_s / speed, d.put_s(change.anchor_bytes), _shards(change.elements)
    )
    late = 0.0 if every is None else (every - 1) / 2
    anchor_s = overlapped(
        change.weight_bytes / rates.anchor_decode_bytes_per_s / speed,
        # A late replica has its link for itself.
        d.downlink.seconds(change.anchor_bytes),
        _shards(change.elements),
    )
    delta_s = overlapped(decode_s, d.downlink.seconds(change.delta_bytes), payloads * d.ranks)
    # Anchors are put beside deltas, over the same links and with the same cores.
    publish_s = encode_s + phases.put + phases.commit + (0.0 if every is None else anchor_put_s / every)
    versions_per_hour = 3600 / max(d.every_s, publish_s)
    copy_s = (d.put_s(change.weight_bytes), d.fetch_s(change.weight_bytes))
    up_bytes = change.delta_bytes + (0.0 if every is None else change.anchor_bytes / every)

    def traffic(up: float, down: float) -> Traffic:
        down_per_hour = down * d.replicas * versions_per_hour
        return Traffic(
            up_bytes=up,
            down_bytes=down * d.replicas,
            up_bytes_per_hour=up * versions_per_hour,
            down_bytes_per_hour=down_per_hour,
            egress_usd_per_hour=down_per_hour / 1e9 * d.egress_usd_per_gb,
        )

    return Estimate(
        phases=phases,
        traffic=traffic(up_bytes, change.delta_bytes),
        copy_traffic=traffic(change.weight_bytes, change.weight_bytes),
        versions_per_hour=versions_per_hour,
        copy_step_to_live_s=sum(copy_s),
        copy_every_s=max(copy_s),
        publish_every_s=publish_s,
        follow_every_s=phases.plan + fetched_s + phases.stage + phases.pause,
        anchor_versions=every,
        anchor_put_s=anchor_put_s,
        join_bytes=change.anchor_bytes + late * change.delta_bytes,
        join_s=anchor_s + late * delta_s,
        trainer_memory_bytes=rank[0] + 2 * min(CAPTURE_BYTES_PER_CHANGE * rank[1], rank[0]),
        replica_memory_bytes=change.weight_bytes + min(DECODED_BYTES_PER_CHANGE * change.changed, change.weight_bytes),
    )


def overlapped(one_s: float, other_s: float, parts: int) -> float:
    """The time of two kinds of work on parts that pass through both: the longer kind, and one part of the other."""
    return max(one_s, other_s) + min(one_s, other_s) / parts


def anchor_versions(policy: AnchorPolicy, *, delta_bytes: int, anchor_bytes: int) -> int | None:
    """After how many deltas of a size the policy wants another anchor; None if never."""
    rules = []
    if policy.bytes_ratio is not None and delta_bytes:
        rules.append(max(1, math.ceil(policy.bytes_ratio * anchor_bytes / delta_bytes)))
    if policy.versions is not None:
        rules.append(policy.versions)
    return min(rules, default=None)


def _payloads(delta_bytes: float) -> int:
    """The payloads that a rank cuts its part of a delta into."""
    size = min(max(delta_bytes / DELTA_PAYLOADS, DELTA_BYTES_LEAST), DELTA_BYTES_MOST)
    return max(1, math.ceil(delta_bytes / size))


def _shards(elements: int) -> int:
    """The shards of an anchor, or more of them: from some number on they make no difference."""
    return max(1, math.ceil(elements / (1 << 22)))
