"""The store benchmark: a payload and an anchor, put and got, against plain files and against obstore alone.

    python -m benchmarks.store [--quick]

Writes `benchmarks/results/store.json`; a quick run writes `store-partial.json`, which git ignores. Both stores lie on
the same disk of this machine: SeaweedFS runs beside the benchmark and takes its share of the cores.
"""

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from benchmarks.machine import Call, Timing, time_rounds
from benchmarks.report import Row, print_table, say, write_results
from deltasync.feed.fetch import fetch
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store import open_store
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import FaultyStore
from deltasync.trainer.versions import put_anchor
from tests.support.servers import seaweed

PAYLOAD_BYTES = 64 << 20
ANCHOR_ELEMENTS = 596_049_920
"""The elements of Qwen3-0.6B: 1.19 GB of bfloat16."""

TENSOR_ELEMENTS = 1 << 25
REPEATS = 5
ANCHOR_REPEATS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """How large a run is."""

    payload_bytes: int
    anchor_elements: int
    repeats: int
    anchor_repeats: int


FULL = Plan(PAYLOAD_BYTES, ANCHOR_ELEMENTS, REPEATS, ANCHOR_REPEATS)
QUICK = Plan(4 << 20, 1 << 22, 2, 1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.store", description="Measure stores.")
    parser.add_argument("--quick", action="store_true", help="small objects and few repeats: a smoke test")
    plan = QUICK if parser.parse_args(arguments).quick else FULL
    weights = _weights(plan.anchor_elements)
    payload = np.random.default_rng(0).bytes(plan.payload_bytes)
    tables: dict[str, list[Row]] = {"payload": [], "anchor": [], "requests": _requests()}
    with tempfile.TemporaryDirectory(prefix="deltasync-bench-") as name, _stores(Path(name)) as stores:
        plain = Plain(Path(name) / "plain")
        for label, store, client in stores:
            say(f"payload, {label}")
            tables["payload"] += _payload(label, store, client, plain, payload, plan.repeats)
            say(f"anchor, {label}")
            tables["anchor"] += _anchor(label, store, client, plain, weights, plan.anchor_repeats)
    for title, rows in tables.items():
        print_table(title, rows)
    path = write_results("store" if plan is FULL else "store-partial", tables)
    say(f"results in {path.parent.name}/{path.name}")


@dataclass(frozen=True, slots=True)
class Plain:
    """The least that anyone can do: one file, written and synced, or read."""

    path: Path

    def write(self, parts: Sequence[bytes | memoryview]) -> None:
        with self.path.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> bytes:
        return self.path.read_bytes()


@contextmanager
def _stores(folder: Path) -> Iterator[list[tuple[str, Store, S3Store | None]]]:
    """Each store, with a bare client of obstore for the same server."""
    with seaweed() as server:
        os.environ.update(server.environment)
        client = S3Store(server.bucket, prefix="plain", client_options={"allow_http": True})
        yield [
            ("file://", open_store(str(folder / "feed")), None),
            ("s3:// (SeaweedFS)", open_store(server.url("feed")), client),
        ]


def _payload(label: str, store: Store, client: S3Store | None, plain: Plain, payload: bytes, repeats: int) -> list[Row]:
    """One payload, as a commit puts it and a replica fetches it, SHA-256 included."""
    upload = Upload(store)
    ref = upload.put(payload)
    plain.write([payload])
    calls = [
        Call("plain put", lambda: plain.write([payload]), len(payload)),
        Call("plain get", plain.read, len(payload)),
        Call("put", lambda: upload.put(payload), len(payload)),
        Call("get", lambda: fetch(store, ref), len(payload)),
    ]
    if client is not None:
        calls += _bare(client, payload)
    return _rows(label, time_rounds(calls, repeats=repeats))


def _anchor(
    label: str, store: Store, client: S3Store | None, plain: Plain, weights: Weights, repeats: int
) -> list[Row]:
    """All weights, coded as shards and put; then fetched, decoded and proved. Coding alone: into memory."""
    arrays = [array.view(np.uint8).data for array in weights.arrays]
    nbytes = weights.layout.nbytes
    upload = Upload(store)
    aside = Upload(MemoryStore())
    manifest = _committed(upload, weights)
    held = _committed(aside, weights)
    calls = [
        Call("plain put", lambda: plain.write(arrays), nbytes),
        Call("plain get", plain.read, nbytes),
        Call("coding of put", lambda: put_anchor(Upload(MemoryStore()), weights, 0), nbytes),
        Call("coding of get", lambda: load(aside.log, held), nbytes),
        Call("put", lambda: put_anchor(upload, weights, 0), nbytes, prepare=lambda: _clear(store)),
        Call("get", lambda: load(Log(store), manifest), nbytes),
    ]
    if client is not None:
        calls += _bare(client, b"".join(arrays))
    return _rows(label, time_rounds(calls, repeats=repeats, warmup=0))


def _bare(client: S3Store, data: bytes) -> list[Call]:
    obstore.put(client, "object", data)
    return [
        Call("obstore put", lambda: obstore.put(client, "object", data), len(data)),
        Call("obstore get", lambda: obstore.get(client, "object").bytes(), len(data)),
    ]


def _rows(label: str, timings: dict[str, Timing]) -> list[Row]:
    rows: list[Row] = []
    for verb in ("put", "get"):
        timing, plain = timings[verb], timings[f"plain {verb}"]
        bare, coding = timings.get(f"obstore {verb}"), timings.get(f"coding of {verb}")
        rows.append(
            {
                "store": label,
                "verb": verb,
                "MB": timing.nbytes / 1e6,
                "seconds": timing.median_seconds,
                "GB/s": timing.median,
                "coding alone, share": None if coding is None else coding.median_seconds / timing.median_seconds,
                "plain file, seconds": plain.median_seconds,
                "/ plain file": timing.median_seconds / plain.median_seconds,
                "/ obstore alone": None if bare is None else timing.median_seconds / bare.median_seconds,
            }
        )
    return rows


def _requests() -> list[Row]:
    """Round trips, counted."""
    store = FaultyStore(MemoryStore())
    upload = Upload(store)
    upload.open()
    layout = _weights(1024).layout
    rows: list[Row] = []

    def count(what: str, run: Callable[[], object]) -> None:
        before = len(store.operations)
        run()
        rows.append({"what": what, "requests": len(store.operations) - before})

    count("commit of one payload", lambda: upload.commit(_manifest(upload, layout, (upload.put(b"payload"),))))
    count("head check, nothing new", lambda: upload.log.head(after=0))
    count("open a writer on a feed (probe, feed, head)", lambda: Upload(store).open())
    return rows


def _committed(upload: Upload, weights: Weights) -> Manifest:
    part = put_anchor(upload, weights, 0)
    digest = layout_digest(weights.layout) + part.digest_delta
    manifest = replace(_manifest(upload, weights.layout, part.payloads), digest=digest)
    upload.commit(manifest)
    return manifest


def _manifest(upload: Upload, layout: Layout, refs: tuple[PayloadRef, ...]) -> Manifest:
    return Manifest(
        kind="anchor",
        version=0,
        layout_sha256=layout.sha256,
        digest=StateDigest.ZERO,
        elements=layout.elements,
        payloads=refs,
        writer=upload.id,
        created_unix_s=0,
    )


def _clear(store: Store) -> None:
    """Without its payloads, so that no shard is found there and left out."""
    for item in store.list("payloads/"):
        store.delete(item.key)


def _weights(elements: int) -> Weights:
    """Normal weights as bfloat16 bits; every tensor has values of its own."""
    rng = np.random.default_rng(1)
    sizes = [min(TENSOR_ELEMENTS, elements - at) for at in range(0, elements, TENSOR_ELEMENTS)]
    layout = Layout.of(TensorSpec(f"layer.{i:03d}", DTYPES["BF16"], (size,)) for i, size in enumerate(sizes))
    draw = (rng.standard_normal(size, np.float32) * np.float32(0.02) for size in sizes)
    return Weights(layout, tuple((values.view(np.uint32) >> 16).astype(np.uint16) for values in draw))


if __name__ == "__main__":
    main()
