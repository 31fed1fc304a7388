"""The Python targets: everything that reads bytes of a feed, of a store or of a file, and the kernels on every set.

A target takes any bytes. It returns, or raises an error of `deltasync.errors` with a kind; everything else is a defect.
What it returns must keep its promises: it comes back from its own bytes, a state has the digest that was promised, all
sets of kernels agree with the reference.
"""

import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support.feeds import Feed
from support.helpers import changed, coo_payload, safetensors_bytes, shard_payload, state, write_sharded

import deltasync
from deltasync import blocks
from deltasync.checkpoint import new_checkpoint, open_checkpoint
from deltasync.codecs.exp import read_steps
from deltasync.errors import CorruptError, DeltasyncError
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.format import keys, limits
from deltasync.format.companions import read_files, write_files
from deltasync.format.digest import StateDigest
from deltasync.format.index import decode_index, encode_index
from deltasync.format.layout import Layout
from deltasync.format.manifest import BaseRef, Manifest, PayloadRef
from deltasync.format.payload import PayloadHeader, write_payload
from deltasync.format.safetensors import parse_header
from deltasync.format.sealed import FORMAT, FeedRecord, FloorRecord, Heartbeat, LeaseRecord, Pin, sealed
from deltasync.format.weights import Region, Weights
from deltasync.interop.folder import Encoding, decode_folder, open_folder, tensor_deltas
from deltasync.interop.folder import write_files as write_delta
from deltasync.kernels import available
from deltasync.kernels import load as load_kernels
from deltasync.replica.folder import RECORD_NAME, FolderTarget
from deltasync.replica.mirror import MirrorRecord
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.trainer.capture import capture
from deltasync.upkeep.prune import Retention, plan_prune
from deltasync.upkeep.verify import verify

from .mutations import Mutator
from .seeds import ABSOLUTE, KINDS, NARROW, PLANES, Head, elements

Others = Callable[[], bytes]

OLD = state()
NEW = changed(OLD)
BOTH = Weights.of(OLD), Weights.of(NEW)


@dataclass(frozen=True)
class Target:
    """`seeds` to begin with, `mutate` one input, `run` it. `megabytes` bounds what a run adds to the memory."""

    seeds: Callable[[], Sequence[bytes]]
    mutate: Callable[[Mutator, bytes, Others], bytes]
    run: Callable[[bytes], object]
    megabytes: int = 256
    corpus: str | None = None
    """The folder of the corpus, if it is not named as the target is."""
    parts: int = 1
    """One run replays one of so many parts of the corpus; the seed says which."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


# Sealed objects

_DIGEST = "0123456789abcdef" * 2
_SHA256 = "ab" * 32


def manifests() -> list[bytes]:
    """One manifest of each kind, with everything that a manifest can have."""
    feed = Feed.of(3)
    skip, anchor = feed.skip(0, 2), feed.late_anchor(2)
    delta = replace(feed.log.read(1), step=7, files=PayloadRef(_SHA256, 9), extra={"reward": "0.5"})
    base = replace(anchor, kind="base", payloads=(), base=BaseRef("org/model", "main"))
    return [m.to_bytes() for m in (feed.log.read(0), delta, skip, anchor, base)]


def read_manifest(data: bytes) -> object:
    manifest = Manifest.from_bytes(data)
    require(Manifest.from_bytes(manifest.to_bytes()) == manifest, "the manifest does not come back")
    return manifest


def record(kind: Any, *seeds: Any) -> Target:
    """A sealed record with `from_bytes` and `to_bytes`."""

    def run(data: bytes) -> object:
        found = kind.from_bytes(data)
        require(kind.from_bytes(found.to_bytes()) == found, "the record does not come back")
        return found

    return Target(lambda: [seed.to_bytes() for seed in seeds], Mutator.sealed, run)


def folder_records() -> list[bytes]:
    return [sealed({"format": FORMAT, "version": 3, "digest": _DIGEST})]


def read_folder_record(data: bytes) -> object:
    """As a target reads it that finds the folder of an earlier process: any other record is no record."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, ".x.deltasync", "v3")
        folder.mkdir(parents=True)
        (folder / RECORD_NAME).write_bytes(data)
        Path(home, "x").symlink_to(".x.deltasync/v3")
        target = FolderTarget(Path(home, "x"))
        try:
            target.open()
            return target.version
        finally:
            target.close()


# Containers


def headers() -> list[bytes]:
    return [safetensors_bytes(OLD), safetensors_bytes({}), *payloads()]


def read_safetensors(data: bytes) -> object:
    header = parse_header(data)
    require(
        sum(e.end - e.begin for e in header.entries) == len(data) - header.data_begin, "the entries leave bytes out"
    )
    return header


def mutate_container(mutator: Mutator, data: bytes, others: Others) -> bytes:
    """Any bytes, or the JSON of the header, with a length that fits more often than not."""
    length = int.from_bytes(data[:8], "little")
    if mutator.one_in(3) or not 0 < length <= len(data) - 8:
        return mutator.bytes(data, others)
    text = mutator.json_text(data[8 : 8 + length].rstrip(), others)
    claimed = mutator.random.choice((0, 1, length, 1 << 40, 1 << 63)) if mutator.one_in(8) else len(text)
    return claimed.to_bytes(8, "little") + text + data[8 + length :]


def companions() -> list[bytes]:
    plain = {"config.json": b"{}", "tokenizer/vocab.txt": b"a\nb", "generation_config.json": b"{}"}
    return [write_files(plain), write_files({}), write_files({"a/b/c/d": b"", "modeling.py": b"import os"})]


def read_companions(data: bytes) -> object:
    """Read them, and write them into a checkpoint: nothing may appear beside its folder."""
    files = read_files(data)
    with tempfile.TemporaryDirectory() as home:
        with new_checkpoint(Layout.of([]), files, Path(home, "out")):
            pass
        found = [p.relative_to(Path(home, "out")).as_posix() for p in Path(home).rglob("*") if p.is_file()]
        require(sorted(found) == sorted([*files, "model.safetensors"]), "other files were written than were read")
    return sorted(files)


def checkpoint_indexes() -> list[bytes]:
    with tempfile.TemporaryDirectory() as home:
        write_sharded(Path(home), OLD)
        return [Path(home, "model.safetensors.index.json").read_bytes()]


def read_checkpoint(data: bytes) -> object:
    """A checkpoint folder whose index of shards is these bytes."""
    with tempfile.TemporaryDirectory() as home:
        write_sharded(Path(home), OLD)
        Path(home, "model.safetensors.index.json").write_bytes(data)
        return open_checkpoint(home).weights.layout


# Folders of deltas


def write_delta_folder(home: Path, encoding: Encoding) -> Path:
    """A folder as slime writes it, with one file."""
    folder = home / "weight_v000001"
    folder.mkdir()
    deltas = tensor_deltas(BOTH[1], capture(BOTH[1], BOTH[0]))
    write_delta(folder, deltas, version=1, base_version=0, encoding=encoding, checksum_format="adler32")
    return folder


def delta_folder_files(suffix: str) -> list[bytes]:
    found = []
    for encoding in ("xor", "overwrite"):
        with tempfile.TemporaryDirectory() as home:
            [file] = write_delta_folder(Path(home), encoding).glob(f"*{suffix}")
            found.append(file.read_bytes())
    return found


def read_delta_folder(data: bytes, suffix: str) -> object:
    """A folder in which one file is these bytes."""
    with tempfile.TemporaryDirectory() as home:
        path = write_delta_folder(Path(home), "xor")
        [file] = path.glob(f"*{suffix}")
        file.write_bytes(data)
        folder = open_folder(path)
        return None if folder is None else [changes.values.tolist() for changes in decode_folder(folder, BOTH[0])]


def delta_folder(suffix: str, mutate: Callable[[Mutator, bytes, Others], bytes]) -> Target:
    return Target(lambda: delta_folder_files(suffix), mutate, lambda data: read_delta_folder(data, suffix))


# Payloads


def payloads() -> list[bytes]:
    whole = blocks.encode_delta(*BOTH)
    found = deltasync.diff(OLD, NEW)
    anchor = Feed.of(1)
    (key,) = anchor.payload_keys(anchor.log.read(0))
    parent, digest = blocks.digest(BOTH[0]), blocks.digest(BOTH[1])
    header = PayloadHeader("delta", BOTH[0].layout, parent, digest, 7)
    return [found, anchor.store.get(key), write_payload(header, whole), shard_payload()]


def plain_payloads() -> list[bytes]:
    return [deltasync.diff(OLD, NEW, codec="coo/1"), coo_payload()]


def apply_payload(data: bytes) -> object:
    """Inspect and apply: the result must have the digest that the payload promises."""
    promised = deltasync.inspect(data).digest
    new = deltasync.apply(OLD, data)
    require(deltasync.digest(new) == promised, "the new state does not have the digest of the payload")
    return promised


def indexes() -> list[bytes]:
    texts = []
    for payload in (*payloads(), *plain_payloads()):
        entry = next(e for e in parse_header(payload).entries if e.name == "deltasync.index")
        texts.append(zlib.decompress(payload[entry.begin : entry.end]))
    return texts


def read_index(data: bytes) -> object:
    """The text of an index, compressed as a writer would."""
    layout, records = decode_index(zlib.compress(data, 1))
    again, others = decode_index(encode_index(layout, records))
    require(again == layout and len(others) == len(records), "the index does not come back")
    require(all((a.runs == b.runs).all() for a, b in zip(records, others, strict=True)), "runs do not come back")
    return layout


# Whole feeds


@cache
def feed_objects() -> Mapping[str, bytes]:
    """A feed with every kind of object: versions, an anchor, a skip, payloads, files, records, heartbeats."""
    feed = Feed(MemoryStore())
    feed.anchor(OLD)
    for _ in range(3):
        feed.delta()
    feed.skip(0, 2)
    feed.late_anchor(3)
    log = Log(feed.store)
    files = PayloadRef.of(companions()[0])
    feed.store.put(keys.payload_key(files.sha256), companions()[0])
    feed.store.put(keys.version_key(3), replace(log.read(3), files=files).to_bytes())
    feed.store.put(keys.FLOOR, FloorRecord(1).to_bytes())
    feed.store.put(keys.pin_key("best"), Pin("best", 2, log.read(2).digest.hex, "why", 1_700_000_000).to_bytes())
    log.beat(Heartbeat("replica-1", 2, 1_700_000_000, {"digest": _DIGEST}))
    return {item.key: feed.store.get(item.key) for item in feed.store.list()}


_KEY_BYTES = 200


def feeds() -> list[bytes]:
    """An input is a key, padded, and the bytes of its object; all other objects are those of `feed_objects`."""
    return [key.encode().ljust(_KEY_BYTES, b" ") + data for key, data in feed_objects().items()]


def mutate_feed(mutator: Mutator, data: bytes, others: Others) -> bytes:
    key, body = data[:_KEY_BYTES], data[_KEY_BYTES:]

    def bodies() -> bytes:
        return others()[_KEY_BYTES:]

    if mutator.one_in(10):
        # Another key of the same kind, or any: a manifest of another version, a payload as a heartbeat.
        text = mutator.random.choice((others()[:_KEY_BYTES].decode(errors="replace"), key.decode(errors="replace")))
        digits = str(mutator.random.choice((0, 5, 10**18, 2**63 - 1, 2**63, 10**20 - 1))).zfill(20)[:20]
        text = text.replace("0000000000000000000", digits[:19]) if mutator.one_in(2) else text
        key = text.encode()[:_KEY_BYTES].ljust(_KEY_BYTES, b" ")
    if key.startswith(b"payloads/"):
        return key + mutator.payload(body, bodies)
    return key + mutator.sealed(body, bodies)


def read_feed(data: bytes) -> object:
    """Put the object into the feed, with manifests that name a changed payload by its new hash, and read it all.

    A version that loads must have the digest of its manifest. Verifying and planning to prune change nothing.
    """
    key, body = data[:_KEY_BYTES].decode(errors="replace").strip(), data[_KEY_BYTES:]
    objects = dict(feed_objects())
    was = PayloadRef.of(objects[key]) if key in objects and key.startswith(keys.PAYLOADS) else None
    objects[key] = body
    if was is not None:
        ref = PayloadRef.of(body)
        objects[keys.payload_key(ref.sha256)] = objects.pop(key)
        for name in [name for name in objects if name.startswith((keys.VERSIONS, keys.ANCHORS, keys.SKIPS))]:
            manifest = Manifest.from_bytes(objects[name])
            refs = tuple(ref if old == was else old for old in manifest.payloads)
            files = ref if manifest.files == was else manifest.files
            objects[name] = replace(manifest, payloads=refs, files=files).to_bytes()
    store = MemoryStore()
    for name, content in objects.items():
        store.put(name or "empty", content)
    log = Log(store)
    results: list[object] = []

    def attempt(call: Callable[[], object]) -> None:
        try:
            results.append(call())
        except DeltasyncError as error:
            results.append((error.kind, error.rule))

    def load_version(version: int) -> StateDigest:
        manifest = log.read(version)
        digest = blocks.digest(load(log, manifest))
        require(digest == manifest.digest, f"version {version} was loaded with another digest")
        return digest

    attempt(log.feed)
    attempt(log.head)
    attempt(log.heartbeats)
    attempt(lambda: log.compare(log.heartbeats()))
    for version in (0, 2, 3):
        attempt(lambda version=version: load_version(version))
    attempt(lambda: sorted(fetch_files(store, log.read(3))))
    attempt(lambda: len(verify(store, deep=True).damages))
    attempt(lambda: plan_prune(store, Retention(anchors=1, versions=1)) is None)
    require({item.key for item in store.list()} == {name or "empty" for name in objects}, "reading changed the store")
    return results


# Kernels

Result = tuple[Any, ...]


def decoded(name: str, codec: str, region: Region, block: bytes) -> Result:
    """What one set of kernels makes of a block: its result, or kind and rule of the error."""
    kernels = load_kernels(name)
    try:
        if codec == PLANES:
            return (kernels.decode_planes(block, region.elements, region.dtype).tobytes(),)
        positions, values, lanes = kernels.decode_changes(region, block, absolute=codec == ABSOLUTE)
    except CorruptError as error:
        return (error.kind, error.rule)
    return positions.tobytes(), values.tobytes(), lanes


def read_tables(region: Region, block: bytes, changes: int | None) -> None:
    """The steps by the tables of a block: all changes have one if the block can be decoded."""
    try:
        steps = read_steps(lambda offset, length: block[offset : offset + length], len(block), region.dtype)
    except CorruptError as error:
        require(changes is None, f"a block that can be decoded has no steps: {error}")
    else:
        require(changes is None or round(float(steps.sum())) == changes, "a change has no step")


def compare(codec: str) -> Target:
    """Every set of kernels against the NumPy reference, on the corpus of the native target."""

    def run(data: bytes) -> object:
        head, block = Head.read(data)
        region = head.region()
        wanted = decoded("reference", codec, region, block)
        for name in available():
            require(
                decoded(name, codec, region, block) == wanted, f"{name} and the reference differ: {wanted[:2]!r:.80}"
            )
        if codec == "relative":
            read_tables(region, block, None if len(wanted) == 2 else len(wanted[0]) // 4)
        return wanted if len(wanted) == 2 else "decoded"

    def mutate(mutator: Mutator, data: bytes, others: Others) -> bytes:
        size = len(data) - len(Head.read(data)[1])
        head, block = data[:size], data[size:]
        if mutator.one_in(6):
            return mutator.bytes(head, others)[:size].ljust(size, b"\0") + block
        if codec == PLANES or mutator.one_in(3):
            return head + mutator.bytes(block, others)
        return head + mutator.block(block, absolute=codec == ABSOLUTE)

    # The native target replays all of it, and the reference is slow.
    return Target(lambda: [b"\0" * 16], mutate, run, megabytes=512, corpus=codec, parts=4)


def run_large(data: bytes) -> object:
    """Blocks of up to 2^25 elements: every native set against the portable one. The reference would take minutes."""
    place, look, seed, shift, codec = data.ljust(5, b"\0")[:5]
    dtype, count = KINDS[NARROW[place % len(NARROW)]], limits.BLOCK_ELEMENTS_MAX >> shift % 10
    bits = elements(dtype, look % 4, seed % 2, min(count, 1 << 16))
    bits = np.tile(bits, count // len(bits))
    region = Region(dtype, (bits,), np.array([[0, 0, count]]), np.array([[5, 7, 0]], np.uint64))
    name = ("relative", ABSOLUTE, PLANES)[codec % 3]
    native = [name for name in available() if name != "reference"]
    wanted = decoded(native[-1], name, region, data[5:])
    for other in native[:-1]:
        require(decoded(other, name, region, data[5:]) == wanted, f"{other} and {native[-1]} differ")
    return wanted if len(wanted) == 2 else "decoded"


def mutate_large(mutator: Mutator, data: bytes, others: Others) -> bytes:
    if mutator.one_in(4):
        return mutator.bytes(data[:5], others)[:5].ljust(5, b"\0") + data[5:]
    return data[:5] + mutator.block(data[5:], absolute=data[4:5] == b"\1")


TARGETS: dict[str, Target] = {
    "manifest": Target(manifests, Mutator.sealed, read_manifest),
    "feed record": record(FeedRecord, FeedRecord("feed", 1_700_000_000)),
    "floor": record(FloorRecord, FloorRecord(7)),
    "lease": record(LeaseRecord, LeaseRecord("writer", 1_700_000_000)),
    "heartbeat": record(Heartbeat, Heartbeat("a", 7, 1_700_000_000, {"digest": _DIGEST}), Heartbeat("b", None, 1)),
    "pin": record(Pin, Pin("best", 7, _DIGEST, "", 1_700_000_000), Pin("v8", 8, _DIGEST, "why", 1)),
    "mirror record": record(MirrorRecord, MirrorRecord(3, 4, frozenset({_SHA256})), MirrorRecord()),
    "folder record": Target(folder_records, Mutator.sealed, read_folder_record),
    "safetensors": Target(headers, mutate_container, read_safetensors),
    "companions": Target(companions, mutate_container, read_companions),
    "checkpoint index": Target(checkpoint_indexes, Mutator.json_text, read_checkpoint),
    "delta folder index": delta_folder(".json", Mutator.json_text),
    "delta folder file": delta_folder(".safetensors", mutate_container),
    "index": Target(indexes, Mutator.json_text, read_index, megabytes=1024),
    "payload": Target(payloads, Mutator.payload, apply_payload, megabytes=1024),
    "coo payload": Target(plain_payloads, Mutator.payload, apply_payload, megabytes=1024),
    "feed": Target(feeds, mutate_feed, read_feed, megabytes=1024),
    "kernels relative": compare("relative"),
    "kernels absolute": compare("absolute"),
    "kernels planes": compare("planes"),
    "kernels large": Target(
        lambda: [b"\4\0\0\0\2" + b"\0"], mutate_large, run_large, megabytes=2048, corpus="large", parts=4
    ),
}
