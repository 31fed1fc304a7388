"""The objects that fixed weights become: payloads by their SHA-256, manifests and records field by field."""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from golden import FILES, Labels, check_json, fixed_state, fixed_tensors, noise, options
from support import LONG_S, processes
from support.feeds import NoFenceStore
from support.helpers import write_sharded

import deltasync
from deltasync import BaseRef, Follower, Retention, Store
from deltasync.format import keys
from deltasync.store import open_store
from deltasync.store.memory import MemoryStore
from deltasync.torch import ModuleTarget, Publisher, ShardedPublisher

NOW_UNIX_S = 1_700_000_000
TIMES = ("created_unix_s", "expires_unix_s", "unix_s", "timeline")
SECONDS = ("_s", "_unix_s", "_unix_ms")


def objects(store: Store) -> dict[str, Any]:
    """All objects. What is sealed is canonical JSON: its fields, without times and random ids, are its bytes."""
    labels = Labels()
    return {item.key: described(item.key, store.get(item.key), labels) for item in store.list()}


def described(key: str, data: bytes, labels: Labels) -> Any:
    if key.startswith(keys.PAYLOADS):
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header.pop("__metadata__", {})
        shapes = {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
        return {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "metadata": metadata, "tensors": shapes}
    fields = json.loads(data)
    seal = fields.pop("sha256")
    assert hashlib.sha256(canonical(fields)).hexdigest() == seal
    assert canonical({**fields, "sha256": seal}) == data
    for name in TIMES:
        if name in fields:
            fields[name] = sorted(fields[name]) if isinstance(fields[name], dict) else "<time>"
    for name, value in fields.get("facts", {}).items():
        fields["facts"][name] = "<time>" if name.endswith(SECONDS) else value
    return json.loads(labels.ids(json.dumps(fields)))


def canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def trained(store: Store, **given: Any) -> Store:
    """A run of four versions, the third of which gets an anchor, and one of two more."""
    for steps in ((0, 1, 2, 3), (4, 5)):
        with Publisher(store, options=options(**given)) as publisher:
            for step in steps:
                extra = {"reward": "0.71"} if step == 1 else None
                publisher.publish(fixed_tensors(step), step=10 * step, anchor=step == 2, extra=extra).wait(LONG_S)
    return store


def test_a_feed_with_anchors_deltas_and_skips() -> None:
    store = trained(MemoryStore())
    deltasync.compact(store, levels=(2, 4))
    check_json("bytes_feed.json", objects(store))


def test_large_weights_are_cut_into_payloads() -> None:
    """Two shards of an anchor, several payloads of a delta, which changes every third element to anything."""
    store, count = MemoryStore(), (1 << 22) + 1000
    bits = noise("large", 2 * count).view("<u2") & 0x3FFF
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    with Publisher(store, options=options(files={})) as publisher:
        publisher.publish({"large": tensor}, step=0).wait(LONG_S)
        bits[::3] = noise("change", 2 * len(bits[::3])).view("<u2") & 0x3FFF
        publisher.publish({"large": tensor}, step=1).wait(LONG_S)
    found = objects(store)
    assert [len(found[keys.version_key(version)]["payloads"]) for version in range(2)] == [2, 3]
    check_json("bytes_large.json", {key: found[key] for key in found if key.startswith(keys.VERSIONS)})


def weights_only(store: Store) -> dict[str, Any]:
    """Payloads, and what versions say about them."""
    found = objects(store)
    fields = ("kind", "version", "digest", "layout_sha256", "payloads", "files")
    return {
        key: value if key.startswith(keys.PAYLOADS) else {name: value[name] for name in fields}
        for key, value in found.items()
        if key.startswith((keys.PAYLOADS, keys.VERSIONS))
    }


def streamed(store: Store, folder: Path) -> None:
    """Tensors that come one by one."""
    with Publisher(store, options=options()) as publisher:
        for step in range(3):
            publisher.publish(iter(fixed_tensors(step).items()), step=step).wait(LONG_S)


def mapped(store: Store, folder: Path) -> None:
    """The last weights in a file."""
    for step in range(3):
        with Publisher(store, options=options(shadow_path=folder / "shadow")) as publisher:
            publisher.publish(fixed_tensors(step), step=step).wait(LONG_S)


def in_folders(store: Store, folder: Path) -> None:
    for step in range(3):
        write_sharded(folder / str(step), fixed_state(step))
        for name, data in FILES.items():
            (folder / str(step) / name).parent.mkdir(exist_ok=True)
            (folder / str(step) / name).write_bytes(data)
        deltasync.publish(store, folder / str(step), step=step)


@pytest.mark.parametrize("write", [streamed, mapped, in_folders])
def test_every_way_to_publish_gives_the_same_bytes(write: Callable[[Store, Path], None], tmp_path: Path) -> None:
    plain, other = MemoryStore(), MemoryStore()
    with Publisher(plain, options=options()) as publisher:
        for step in range(3):
            publisher.publish(fixed_tensors(step), step=step).wait(LONG_S)
    write(other, tmp_path)
    assert weights_only(other) == weights_only(plain)


def test_a_feed_that_begins_with_a_base_and_a_feed_of_an_adapter() -> None:
    based, adapter = MemoryStore(), MemoryStore()
    with Publisher(based, options=options(base=BaseRef("org/model", "abc"), files={})) as publisher:
        for step in range(2):
            publisher.publish(fixed_tensors(step), step=step).wait(LONG_S)
    name = "base_model.model.layers.0.q_proj.lora_{}.weight"
    files = {"adapter_config.json": b'{"peft_type": "LORA", "r": 4}'}
    with Publisher(adapter, options=options(files=files)) as publisher:
        for step in range(2):
            whole = fixed_tensors(step)
            a, b = whole["layers.0.up.weight"][:4], whole["embed.weight"][:, :4]
            publisher.publish({name.format("A"): a, name.format("B"): b}, step=step).wait(LONG_S)
    check_json("bytes_other_feeds.json", {"base": objects(based), "adapter": objects(adapter)})


def test_a_sharded_feed_of_one_rank() -> None:
    store = MemoryStore()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with ShardedPublisher(store, options=options()) as publisher:
            for step in range(2):
                publisher.publish(fixed_tensors(step), step=step).wait(LONG_S)
    finally:
        dist.destroy_process_group()
    check_json("bytes_one_rank.json", objects(store))


@pytest.mark.e2e
def test_a_feed_of_two_ranks(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("sharded.py"))]
    with ExitStack() as ended:
        starts = ([*command, str(rank), "2", str(tmp_path)] for rank in range(2))
        ranks = [ended.enter_context(processes.running(start, stderr=subprocess.PIPE)) for start in starts]
        for process in ranks:
            _, err = process.communicate(timeout=LONG_S)
            assert process.returncode == 0, err
    check_json("bytes_ranks.json", objects(open_store(tmp_path / "feed")))


def test_records() -> None:
    """Of a pin, a pruner, a relay, a replica, and a writer to a store that cannot fence."""
    store, copy, unfenced, found = trained(MemoryStore()), MemoryStore(), NoFenceStore(), {}
    deltasync.pin(store, 1, name="best", note="reward 0.71", clock=lambda: NOW_UNIX_S)
    with Follower(store, ModuleTarget(fixed_tensors()), replica="replica-1", beat_s=3600) as replica:
        replica.advance()
        replica.scrub()
        replica.pin(4)
        replica.advance()
        found["a replica"] = objects(store)[keys.replica_key("replica-1")]
    found["a pin"] = objects(store)[keys.pin_key("best")]
    deltasync.relay(store, copy)
    deltasync.prune(store, deltasync.plan_prune(store, Retention(anchors=1, versions=1)))
    found["a pruner"] = objects(store)[keys.FLOOR]
    found["a relay"] = objects(copy)[keys.COPY]
    with Publisher(unfenced, options=options()) as publisher:
        publisher.publish(fixed_tensors()).wait(LONG_S)
        found["a writer without a fence"] = objects(unfenced)[keys.LEASE]
    found["a feed"] = objects(unfenced)[keys.FEED]
    assert [item.key for item in store.list(keys.REPLICAS)] == [item.key for item in unfenced.list(keys.LEASE)] == []
    check_json("bytes_records.json", found)
