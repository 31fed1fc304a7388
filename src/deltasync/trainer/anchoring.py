"""Anchors: when one is due, and writing one from the shadow while the shadow advances to later versions.

The bits that later versions replace are kept until the anchor is written. No second copy of the weights is needed, and
no delta waits for an anchor.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from deltasync.blocks import Changed
from deltasync.errors import CorruptError, InvalidInputError
from deltasync.feed.plan import Plan
from deltasync.feed.writer import Writer
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Bits, Region, Runs
from deltasync.store.retry import Retry
from deltasync.trainer.capture import Shadow
from deltasync.trainer.events import AnchorProgress, Observer, PublishEvent
from deltasync.trainer.shards import Shards
from deltasync.trainer.version import Join, Part, alone, put_anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorPolicy:
    """An anchor is due when the deltas since the last one have `bytes_ratio` times its size, or after `versions`."""

    bytes_ratio: float | None = 1.0
    versions: int | None = None

    def __post_init__(self) -> None:
        if (self.bytes_ratio is not None and self.bytes_ratio <= 0) or (
            self.versions is not None and self.versions < 1
        ):
            raise InvalidInputError(f"{self} is never or always due", hint="use None to leave a rule out")

    def is_due(self, *, delta_bytes: int, anchor_bytes: int, versions: int) -> bool:
        """Whether this much since the last anchor, of that size, asks for a new one."""
        by_bytes = self.bytes_ratio is not None and delta_bytes >= self.bytes_ratio * anchor_bytes
        return by_bytes or (self.versions is not None and versions >= self.versions)


logger = logging.getLogger(__name__)


class PastWeights:
    """The weights of the version that the shadow had when this was made."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._replaced: list[Changed] = []

    @property
    def layout(self) -> Layout:
        return self._shadow.weights.layout

    def note(self, replaced: Changed) -> None:
        """The shadow lost these bits just now. Called with its lock held."""
        self._replaced.append(replaced)

    def region(self, runs: Runs) -> Region:
        """A copy of some elements, as they were."""
        with self._shadow.lock:
            region = self._shadow.weights.region(runs)
            bits = region.gather()
            replaced = list(self._replaced)
        # The oldest last: an element that changed twice gets the bits that it had first.
        for changed in reversed(replaced):
            self._put_back(bits, runs, changed)
        return region.holding(bits)

    def _put_back(self, bits: Bits, runs: Runs, changed: Changed) -> None:
        begin = 0
        for ordinal, first, count in runs.tolist():
            found = changed.get(self.layout.tensors[ordinal].name)
            if found is not None:
                indices, values = found
                lo, hi = np.searchsorted(indices, (first, first + count))
                bits[indices[lo:hi].astype(np.int64) - first + begin] = values[lo:hi]
            begin += count


class Anchoring:
    """Decides when an anchor is due and writes it in a thread of its own. Guarded by the shadow's lock."""

    def __init__(
        self,
        writer: Writer,
        shadow: Shadow,
        policy: AnchorPolicy,
        *,
        retry_s: float,
        observer: Observer | None,
        shards: Shards | None = None,
        join: Join[Manifest] = alone,
    ) -> None:
        self._writer = writer
        self._shadow = shadow
        self._policy = policy
        self._retry_s = retry_s
        self._observer = observer
        self._shards = shards
        self._join = join
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="deltasync-anchor")
        self._past: list[PastWeights] = []
        self._wanted = False
        self._since = AnchorBacklog(0, 0, 0)
        self._spent = False, AnchorBacklog(0, 0, 0)
        """What asked for the anchor that is being written: it asks again if that fails."""

    def resume(self, since: "AnchorBacklog") -> None:
        """What lies behind the last anchor of a feed that exists."""
        self._since = since

    def request(self) -> None:
        """The next version gets an anchor, whatever the policy says."""
        with self._shadow.lock:
            self._wanted = True

    def note(self, replaced: Changed) -> None:
        """The shadow moved on and lost these bits. Called with its lock held."""
        for past in self._past:
            past.note(replaced)

    def consider(self, manifest: Manifest) -> None:
        """A version was committed, and the shadow stands at it. Called with its lock held."""
        if self.is_due(manifest):
            self.begin(manifest)

    def is_due(self, manifest: Manifest) -> bool:
        """Whether the version that was just committed should get an anchor. Asked once for each; the lock is held."""
        self._since = self._since.after(manifest)
        if manifest.kind == "anchor":
            self._wanted = False
        if self._past or not (self._wanted or self._since.is_due(self._policy)):
            return False
        self._spent = self._wanted, self._since
        self._wanted = False
        self._since = AnchorBacklog(self._since.anchor_bytes, 0, 0)
        return True

    def begin(self, manifest: Manifest) -> None:
        """Write an anchor of the version that the shadow stands at. Called with its lock held."""
        past = PastWeights(self._shadow)
        self._past.append(past)
        self._pool.submit(self._add, manifest, past).add_done_callback(lambda done: self._end(past, done))

    def close(self) -> None:
        """Wait for an anchor that is being written."""
        self._pool.shutdown()

    def _add(self, manifest: Manifest, past: PastWeights) -> PublishEvent:
        retry = Retry(self._retry_s)
        started = time.perf_counter()
        put_s = 0.0

        def make() -> Part:
            nonlocal put_s
            version = manifest.version
            refs, digest = retry(
                lambda: put_anchor(self._writer, past, version, shards=self._shards, progress=AnchorProgress(version))
            )
            put_s = time.perf_counter() - started
            return Part(refs, digest - self._zero, None)

        def finish(part: Part) -> Manifest:
            anchor = _anchor_of(manifest, part, self._zero + part.digest_delta)
            retry(lambda: self._writer.add_anchor(anchor))
            return anchor

        anchor = self._join(f"the anchor of version {manifest.version}", make, finish)
        return PublishEvent(
            kind="anchor",
            version=manifest.version,
            step=manifest.step,
            elements=manifest.elements,
            changed=None,
            payload_bytes=anchor.nbytes,
            held_s=0.0,
            encode_s=0.0,
            put_s=put_s,
            commit_s=time.perf_counter() - started - put_s,
            coalesced=0,
            retries=retry.count,
        )

    @property
    def _zero(self) -> StateDigest:
        return layout_digest(self._shadow.weights.layout if self._shards is None else self._shards.layout)

    def _end(self, past: PastWeights, done: "Future[PublishEvent]") -> None:
        error = done.exception()
        with self._shadow.lock:
            self._past.remove(past)
            if error is None:
                self._since = replace(self._since, anchor_bytes=done.result().payload_bytes)
            else:
                wanted, since = self._spent
                self._wanted, self._since = self._wanted or wanted, since.plus(self._since)
        if error is not None:
            # The feed is whole without it.
            logger.error("the anchor was not written, the next version gets one: %s", error)
        elif self._observer is not None:
            self._observer(done.result())


@dataclass(frozen=True, slots=True)
class AnchorBacklog:
    """The size of the last anchor, and what was committed since."""

    anchor_bytes: int
    delta_bytes: int
    versions: int

    @classmethod
    def of(cls, way: Plan) -> "AnchorBacklog":
        """From the way that a late joiner takes to the head."""
        first = way.edges[0]
        return cls(_anchor_bytes(first.manifest), way.nbytes - first.nbytes, len(way.edges) - 1)

    def after(self, manifest: Manifest) -> "AnchorBacklog":
        """With one version more."""
        if manifest.kind != "delta":
            return AnchorBacklog(_anchor_bytes(manifest), 0, 0)
        return AnchorBacklog(self.anchor_bytes, self.delta_bytes + manifest.nbytes, self.versions + 1)

    def plus(self, later: "AnchorBacklog") -> "AnchorBacklog":
        """With what was committed later."""
        return replace(self, delta_bytes=self.delta_bytes + later.delta_bytes, versions=self.versions + later.versions)

    def is_due(self, policy: AnchorPolicy) -> bool:
        """Whether a new anchor should be written."""
        return policy.is_due(delta_bytes=self.delta_bytes, anchor_bytes=self.anchor_bytes, versions=self.versions)


def _anchor_of(manifest: Manifest, part: Part, digest: StateDigest) -> Manifest:
    """The manifest of an anchor of a version, once its digest is proved."""
    if digest != manifest.digest:
        raise CorruptError(
            f"the shadow gives the digest {digest} for version {manifest.version}, which has {manifest.digest}",
            rule="shadow.digest",
            version=manifest.version,
            hint="the memory of this machine may be faulty: restart the trainer from its checkpoint",
        )
    return replace(
        manifest, kind="anchor", parent=None, parent_digest=None, changed=None, payloads=part.payloads, base=None
    )


def _anchor_bytes(manifest: Manifest) -> int:
    """The size of an anchor; of a base, what it would have: about 1.3 bytes for an element of two."""
    return manifest.nbytes if manifest.kind == "anchor" else manifest.elements * 4 // 3
