"""Shards of torch tensors, and versions that several processes make together."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support import LONG_S, join
from support.feeds import NOW_UNIX_S, put_anchor
from support.helpers import BF16, changed
from test_trainer_shards import flat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from deltasync import blocks
from deltasync.blocks import encode_changes
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import (
    InvalidInputError,
)
from deltasync.feed.log import Log
from deltasync.feed.upload import LATE_S, Upload
from deltasync.format import keys
from deltasync.format.digest import layout_digest
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.format.weights import Bits, Weights
from deltasync.parallel import Pool
from deltasync.state import State
from deltasync.store.memory import MemoryStore
from deltasync.torch import ShardedPublisher
from deltasync.torch.sharded import owned
from deltasync.trainer.capture import capture
from deltasync.trainer.group import Decision, Group, Message
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.shards import Box, Shards, ShardWeights, chunk
from deltasync.trainer.versions import Metadata, Part, VersionWriter
from deltasync.upkeep.restore import restore
from deltasync.upkeep.verify import verify

# What torch itself makes of a placement, on every rank of a mesh that exists in name only.


def each_rank(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Iterator[DTensor]:
    world = math.prod(mesh_shape)
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = init_device_mesh("cpu", tuple(mesh_shape))
            whole = torch.arange(math.prod(shape)).reshape(tuple(shape))
            yield distribute_tensor(whole, mesh, placements, src_data_rank=None)
        finally:
            dist.destroy_process_group()


PLACEMENTS = {
    "rows": ((65, 3), (4,), [Shard(0)]),
    "fewer rows than ranks": ((3, 2), (4,), [Shard(0)]),
    "columns": ((5, 7), (2,), [Shard(1)]),
    "middle": ((3, 5, 2), (4,), [Shard(1)]),
    "replicated": ((4, 4), (3,), [Replicate()]),
    "replicated and sharded": ((65,), (2, 2), [Replicate(), Shard(0)]),
    "sharded and replicated": ((9, 2), (2, 2), [Shard(0), Replicate()]),
    "rows and columns": ((65, 33), (2, 2), [Shard(0), Shard(1)]),
    "rows twice": ((13, 2), (2, 2), [Shard(0), Shard(0)]),
    "rows twice, the right first": ((65, 2), (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "pieces of every third": ((20, 2), (2,), [_StridedShard(0, split_factor=3)]),
    "three dimensions of a mesh": ((9, 8, 7), (2, 2, 2), [Shard(2), Replicate(), Shard(0)]),
    "a scalar": ((), (2,), [Replicate()]),
    "nothing": ((0, 4), (2,), [Shard(0)]),
}


@pytest.mark.parametrize("name", PLACEMENTS)
def test_every_element_of_a_placement_is_owned_once(name: str) -> None:
    shape, mesh_shape, placements = PLACEMENTS[name]
    seen: list[int] = []
    for rank, tensor in enumerate(each_rank(shape, mesh_shape, placements)):
        box, local = owned("w", tensor, rank)
        assert tuple(local.shape) == box.local_shape
        # The value of an element is its index in the whole.
        assert local.reshape(-1).tolist() == flat(box).tolist()
        seen += local.reshape(-1).tolist()
    assert sorted(seen) == list(range(math.prod(shape)))


def test_a_rank_outside_the_mesh_owns_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh = dist.device_mesh.DeviceMesh("cpu", [0, 1])
        box, local = owned("w", DTensor.from_local(torch.zeros(0), mesh, [Shard(0)], shape=(6,), stride=(1,)), 2)
    finally:
        dist.destroy_process_group()
    assert (box.elements, local.numel()) == (0, 0)


def test_of_several_meshes_with_a_copy_the_one_of_rank_0_publishes() -> None:
    seen: list[int] = []
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
            seen += owned("w", distribute_tensor(torch.arange(5), mesh, [Shard(0)], src_data_rank=None), rank)[
                1
            ].tolist()
        finally:
            dist.destroy_process_group()
    assert sorted(seen) == list(range(5))


def test_plain_tensors_belong_to_the_first_rank() -> None:
    for tensor in (torch.tensor(3.0), torch.ones(2, 3).t()):
        assert owned("w", tensor, 0)[0].elements == tensor.numel()
        assert torch.equal(owned("w", tensor, 0)[1].reshape(tensor.shape), tensor)
        assert owned("w", tensor, 1)[0].elements == 0


def test_what_cannot_be_published_is_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(InvalidInputError, match=r"'sum\.me'.*Partial|'sum\.me' is placed as P"):
            owned("sum.me", DTensor.from_local(torch.zeros(4), mesh, [Partial()]), 1)
        wrong = DTensor.from_local(torch.zeros(3, 4), mesh, [Shard(0)], shape=(10, 4), stride=(4, 1))
        with pytest.raises(InvalidInputError, match=r"rank 1 has \[3, 4\] of tensor 'w' where \[5, 4\] belongs"):
            owned("w", wrong, 1)
    finally:
        dist.destroy_process_group()


# Several processes, played by threads.


class Table:
    """A group of threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        pairs = product(range(size), repeat=2)
        self._sent: dict[tuple[int, int], SimpleQueue[Message]] = {pair: SimpleQueue() for pair in pairs}

    def seat(self, rank: int, after: threading.Event | None = None) -> "Seat":
        """The place of one thread. Its agreements wait for `after`."""
        return Seat(self, rank, after)

    def sent(self, sender: int, receiver: int) -> "SimpleQueue[Message]":
        return self._sent[sender, receiver]


class Seat(Group):
    def __init__(self, table: Table, rank: int, after: threading.Event | None) -> None:
        super().__init__(rank, table.size, timeout_s=LONG_S)
        self._table, self._after = table, after

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        assert self._after is None or self._after.wait(LONG_S)
        with super().report_errors():
            yield

    def fork(self) -> Group:
        raise NotImplementedError

    def share(self, bits: Bits) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def _send(self, rank: int, message: Message) -> None:
        self._table.sent(self.rank, rank).put(message)

    def _receive(self, rank: int, timeout_s: float) -> Message:
        return self._table.sent(rank, self.rank).get(timeout=timeout_s)


def together(size: int, act: Callable[[int], None]) -> None:
    """`act` in a thread for each rank; their errors here."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            act(rank)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    if errors:
        raise errors[0]


def model(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "by rows": rng.standard_normal((65, 40)).astype(BF16),
        "by columns": rng.standard_normal((33, 50)).astype(BF16),
        "in the middle": rng.standard_normal((4, 9, 5)).astype(np.float32),
        "for one": rng.standard_normal((7,)).astype(np.float32),
        "scalar": np.array(3, np.int64),
        "empty": np.empty((0, 4), BF16),
        "few": rng.standard_normal((2, 3)).astype(BF16),
    }


AXES = {"by rows": 0, "by columns": 1, "in the middle": 1, "few": 0}


def shards_of(layout: Layout, rank: int, size: int) -> Shards:
    found = []
    for spec in layout.tensors:
        box = Box.whole(spec.shape)
        axis = AXES.get(spec.name)
        if axis is not None:
            spans = list(box.spans)
            spans[axis] = chunk(spans[axis], rank, size)
            box = Box(box.shape, tuple(spans))
        elif rank:
            box = Box.empty(spec.shape)
        found.append(box)
    return Shards(layout, found)


def shard_of(weights: Weights, shards: Shards) -> ShardWeights:
    arrays = tuple(array[flat(box)] for array, box in zip(weights.arrays, shards.boxes, strict=True))
    return ShardWeights(shards.local, arrays, shards)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_make_the_versions_that_one_process_makes(size: int, tmp_path: Path) -> None:
    store = MemoryStore()
    states = [model()]
    for step in range(3):
        states.append(changed(states[-1], seed=step + 1, share=0.2 if step else 0.9))
    wholes = [Weights.of(state) for state in states]
    manifests: list[Manifest] = []
    tables = Table(size), Table(size)

    def run(rank: int) -> None:
        upload = Upload(store, retry_s=1.0)
        if rank == 0:
            upload.open()
        shards = shards_of(wholes[0].layout, rank, size)
        mine = shard_of(wholes[0], shards)
        shadow = State(mine)
        plain = Weights(shards.local, mine.arrays)
        versions = VersionWriter(upload=upload, layout=wholes[0].layout, shards=shards, group=tables[0].seat(rank))
        advanced = threading.Event()
        anchors, pool = replace(versions, group=tables[1].seat(rank, advanced)), Pool(1, "anchor")
        made = versions.anchor(mine, None, Metadata(step=0)).manifest
        shadow.apply([], made)
        for step, whole in enumerate(wholes[1:], 1):
            manifests.extend([made] * (rank == 0))
            captured = capture(plain, Weights(shards.local, shard_of(whole, shards).arrays))
            changes = partial(encode_changes, mine, captured)
            made = versions.delta(changes, made, Metadata(step=step)).manifest
            with shadow.lock:
                shadow.apply(captured, made)
                if step == 2:
                    # It is written once version 3 has overwritten the shadow.
                    shadow.pasts.append(shadow.past())
                    anchor = pool.submit(anchors.add_anchor, made, shadow.pasts[0])
        advanced.set()
        manifests.extend([made] * (rank == 0))
        assert anchor.result(LONG_S).manifest.version == 2
        pool.shutdown()

    together(size, run)
    assert [m.digest for m in manifests] == [blocks.digest(whole) for whole in wholes]
    changes = [
        sum(int((a != b).sum()) for a, b in zip(before.arrays, after.arrays, strict=True))
        for before, after in pairwise(wholes)
    ]
    assert [m.changed for m in manifests] == [None, *changes]
    found = verify(store, deep=True)
    assert (found.damages, found.restorable, found.orphans) == ((), (0, 1, 2, 3), 0)
    assert len(store.get(f"anchors/{2:020d}.json")) > 0
    for version, whole in enumerate(wholes):
        restore(store, tmp_path / str(version), version=version)
        restored = open_checkpoint(tmp_path / str(version)).weights
        assert restored.layout == whole.layout
        for found_bits, bits in zip(restored.arrays, whole.arrays, strict=True):
            assert found_bits.tobytes() == bits.tobytes()


class Waiting(Seat):
    """A place at which `then` is called once, after this rank has put its payloads and before it says so."""

    def __init__(self, table: Table, rank: int, then: Callable[[], None]) -> None:
        super().__init__(table, rank, None)
        self._then = [then]

    @contextmanager
    def decision(self, about: str, mine: object) -> Iterator[Decision]:
        if self._then:
            self._then.pop()()
        with super().decision(about, mine) as decision:
            yield decision


@pytest.mark.parametrize("skew_s", [-600.0, 600.0])
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("kind", ["anchor", "delta"])
def test_payloads_that_one_rank_put_hours_before_the_other_are_put_again(kind: str, early: int, skew_s: float) -> None:
    """`prune` may have removed them. The clocks of the ranks differ, and only the early one knows when it put."""
    store, table, wholes = MemoryStore(), Table(2), [Weights.of(model()), Weights.of(changed(model(), seed=1))]
    hours_later, slept_s = threading.Event(), 0.0

    def sleep() -> None:
        """Hours pass, in which a pruner removes what no manifest names, and then the other rank puts its part."""
        nonlocal slept_s
        slept_s = 2.0 * LATE_S
        named = {ref.sha256 for version in Log(store).versions() for ref in Log(store).read(version).payloads}
        for item in store.list(keys.PAYLOADS):
            if keys.parse_payload_key(item.key) not in named:
                store.delete(item.key)
        hours_later.set()

    def run(rank: int) -> None:
        upload = Upload(store, clock=lambda: NOW_UNIX_S + skew_s * rank + slept_s)
        if rank == 0:
            upload.open()
        shards = shards_of(wholes[0].layout, rank, 2)
        mine = shard_of(wholes[0], shards)
        new = Weights(shards.local, shard_of(wholes[1], shards).arrays)
        captured = capture(Weights(shards.local, mine.arrays), new)
        prompt = VersionWriter(upload=upload, layout=wholes[0].layout, shards=shards, group=table.seat(rank))
        seat = Waiting(table, rank, sleep) if rank == early else table.seat(rank, hours_later)
        tired = replace(prompt, group=seat)
        if kind == "anchor":
            tired.anchor(mine, None, Metadata(step=0))
        else:
            made = prompt.anchor(mine, None, Metadata(step=0)).manifest
            tired.delta(partial(encode_changes, mine, captured), made, Metadata(step=1))

    together(2, run)
    assert slept_s, "hours have passed"
    found = verify(store, deep=True)
    assert (found.damages, found.restorable) == ((), (0,) if kind == "anchor" else (0, 1))


def test_a_base_has_the_digest_of_all_ranks() -> None:
    store, table, whole = MemoryStore(), Table(3), Weights.of(model())

    def run(rank: int) -> None:
        upload, shards = Upload(store), shards_of(whole.layout, rank, 3)
        if rank == 0:
            upload.open()
        mine = shard_of(whole, shards)
        versions = VersionWriter(upload=upload, layout=whole.layout, shards=shards, group=table.seat(rank))
        base = BaseRef("some/checkpoint")
        manifest = versions.base(mine, base, Metadata(step=0)).manifest
        assert (manifest.kind, manifest.payloads) == ("base", ())
        assert manifest.digest == blocks.digest(whole)

    together(3, run)


@pytest.mark.parametrize("size", [2, 4])
def test_partial_digests_add_up(size: int) -> None:
    weights = Weights.of(model())
    total = layout_digest(weights.layout)
    for rank in range(size):
        shard = shard_of(weights, shards_of(weights.layout, rank, size))
        total += blocks.digest(shard) - layout_digest(shard.layout)
    assert total == blocks.digest(weights)


def test_weights_without_elements_make_one_shard() -> None:
    weights = Weights.of({"empty": np.empty((0, 4), BF16)})
    parts = []
    for rank in range(3):
        shards = shards_of(weights.layout, rank, 3)
        upload = Upload(MemoryStore())
        refs, digest = put_anchor(upload, shard_of(weights, shards), 0, shards=shards)
        parts.append(Part(refs, digest - layout_digest(weights.layout), None))
    assert len(Part.total(parts).payloads) == 1


def test_a_rank_without_elements_puts_nothing() -> None:
    weights = Weights.of({"w": np.ones(1, np.float32)})
    shards = shards_of(weights.layout, 1, 2)
    refs, digest = put_anchor(Upload(MemoryStore()), shard_of(weights, shards), 0, shards=shards)
    assert (refs, digest) == ((), layout_digest(weights.layout))


def test_another_sharding_is_named() -> None:
    layout = Weights.of(model()).layout
    shards = shards_of(layout, 0, 2)
    shards.require(shards_of(layout, 0, 2).boxes)
    with pytest.raises(InvalidInputError, match="'by columns' is sharded in another way"):
        shards.require(shards_of(layout, 1, 2).boxes)


def test_skips_are_refused() -> None:
    """No rank has all weights."""
    with pytest.raises(InvalidInputError, match="writes no skips") as caught:
        ShardedPublisher(MemoryStore(), options=PublisherOptions(skips=(4, 16)))
    assert "deltasync compact --follow" in str(caught.value)
