"""What it takes to refuse hostile input: peak memory and time of each refusal.

    python -m benchmarks.refusals [NAME]...

Each input is built by one child process and refused by another, which may have only `ADDRESS_BYTES` more of address
space than it has when it begins. Memory is the peak above what the process had before; time is the processor's, and the
clock's beside it. Prints a table and writes `benchmarks/results/refusals.json` (`refusals-partial.json` with names).

Memory above 64 MiB or more than 2 s is marked. What remains marked has a reason: see `REASONS`.
"""

import json
import logging
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import deltasync
from benchmarks.report import Row, print_table, say, write_results
from deltasync.errors import DeltasyncError
from deltasync.feed.fetch import fetch
from deltasync.feed.files import fetch_files
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys, limits
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.payload import Block, PayloadHeader, write_payload
from deltasync.format.safetensors import header_bytes
from deltasync.format.sealed import FORMAT, Heartbeat
from deltasync.format.weights import Weights
from deltasync.kernels import kernels
from deltasync.state import load
from deltasync.store import open_store
from deltasync.trainer.versions import put_anchor
from deltasync.upkeep.verify import verify
from tests.attacks.bombs import BOMBS, Bomb
from tests.support.helpers import resealed

ADDRESS_BYTES = 2 << 30
PEAK_BYTES_BOUND = 64 << 20
SECONDS_BOUND = 2.0
HUGE_BYTES = 1 << 40
"""The size of objects that are sparse files: no process may read them whole."""

MiB = 1 << 20


@dataclass(frozen=True, slots=True)
class Hostile:
    """`build` writes the input below a folder, `refuse` reads it there and is expected to end with kind and rule.

    A kind of None means that the input is passed over: nothing may depend on it.
    """

    build: Callable[[Path], object]
    refuse: Callable[[Path], object]
    kind: str | None
    rule: str | None


def feed_of(folder: Path) -> tuple[Upload, Manifest]:
    """A feed of one small anchor in a folder."""
    upload = Upload(open_store(str(folder / "feed")))
    upload.open()
    layout = Layout.of([TensorSpec("w", DTYPES["BF16"], (1000,))])
    weights = Weights(layout, (np.zeros(1000, np.uint16),))
    part = put_anchor(upload, weights, 0)
    digest = layout_digest(layout) + part.digest_delta
    manifest = Manifest("anchor", 0, layout.sha256, digest, 1000, upload.id, 1_700_000_000, payloads=part.payloads)
    upload.commit(manifest)
    return upload, manifest


def log_of(folder: Path) -> Log:
    return Log(open_store(str(folder / "feed")))


def load_head(folder: Path) -> object:
    return load(log_of(folder), log_of(folder).read(0))


def fetch_head(folder: Path) -> object:
    log = log_of(folder)
    return fetch(log.store, log.read(0).payloads[0])


def put(folder: Path, key: str, data: bytes) -> None:
    """Replace an object of the feed."""
    open_store(str(folder / "feed")).put(key, data)


def replace_fields(folder: Path, **fields: Any) -> None:
    """Let the manifest have other fields, and a seal that fits."""
    key = keys.version_key(0)
    put(folder, key, resealed(open_store(str(folder / "feed")).get(key), fields))


def claiming(nbytes: int) -> Callable[[Path], object]:
    """A manifest that promises a payload of that size; the object is small."""

    def build(folder: Path) -> None:
        _, manifest = feed_of(folder)
        replace_fields(folder, payloads=[{"sha256": manifest.payloads[0].sha256, "bytes": nbytes}])

    return build


def huge(key: str) -> Callable[[Path], object]:
    """A feed with an object that is a sparse file of a terabyte."""

    def build(folder: Path) -> None:
        feed_of(folder)
        path = folder / "feed" / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(HUGE_BYTES)

    return build


def text_manifest(middle: bytes) -> Callable[[Path], object]:
    """A manifest of nearly the largest size, with an unknown field that repeats `middle`."""

    def build(folder: Path) -> None:
        feed_of(folder)
        count = (limits.MANIFEST_BYTES_MAX - 4096) // len(middle)
        text = b'{"format":"deltasync/1","junk":[' + middle * count + b"0]}"
        (folder / "feed" / keys.version_key(0)).write_bytes(text)

    return build


def many_payloads(folder: Path) -> None:
    """A manifest of nearly the largest size that names as many payloads as fit, and whose seal is wrong."""
    _, manifest = feed_of(folder)
    refs = tuple(PayloadRef(f"{i:064x}", i) for i in range(160_000))
    data = replace(manifest, payloads=refs).to_bytes()
    (folder / "feed" / keys.version_key(0)).write_bytes(data.replace(b'"elements":1000', b'"elements":1001'))


def junk_heartbeats(folder: Path) -> None:
    """2,000 heartbeats that are junk, of another replica, or from the future."""
    feed_of(folder)
    (folder / "feed" / "replicas").mkdir()
    for i in range(2000):
        data = Heartbeat(f"other-{i}", 2**62, 2**62, {"a": "b" * 1000}).to_bytes() if i % 2 else b"\0" * 60_000
        (folder / "feed" / keys.replica_key(f"r{i}")).write_bytes(data)


def junk_keys(folder: Path) -> None:
    """3,000 manifests that nothing wrote, at versions far apart."""
    feed_of(folder)
    for i in range(1, 3001):
        (folder / "feed" / keys.version_key(i * 10**12)).write_bytes(b"junk")


def no_versions_lost(folder: Path) -> object:
    """The one version must still be restorable, and all junk must be named."""
    found = verify(str(folder / "feed"))
    if len(found.damages) < 3000 or 0 not in found.restorable:
        raise AssertionError(f"{len(found.damages)} damages, {len(found.restorable)} restorable")
    return load_head(folder)


def vast_anchor(folder: Path) -> None:
    """An anchor of a few kilobytes that holds 2^35 elements of 8 bytes, in blocks of one symbol, and its manifest."""
    upload, manifest = feed_of(folder)
    count = 1024
    layout = Layout.of([TensorSpec("w", DTYPES["U64"], (count * limits.BLOCK_ELEMENTS_MAX,))])
    full = limits.BLOCK_ELEMENTS_MAX
    data = b"\0" * 16
    one = [Block("planes/1", np.array([[0, i * full, full]]), full, StateDigest.ZERO, data) for i in range(count)]
    digest = layout_digest(layout)
    ref = upload.put(write_payload(PayloadHeader("anchor", layout, None, digest, 0), one))
    vast = replace(manifest, layout_sha256=layout.sha256, elements=layout.elements, digest=digest, payloads=(ref,))
    (folder / "feed" / keys.version_key(0)).write_bytes(vast.to_bytes())


def companion_names(names: Callable[[], list[str]], **fields: Any) -> Callable[[Path], object]:
    """A feed whose files beside the weights have these names."""

    def build(folder: Path) -> None:
        upload, _ = feed_of(folder)
        specs = [TensorSpec(name, DTYPES["U8"], (0,)) for name in names()]
        ref = upload.put(header_bytes(specs, {"format": FORMAT, "kind": "files"}))
        replace_fields(folder, files={"sha256": ref.sha256, "bytes": ref.nbytes, **fields})

    return build


def read_companions(folder: Path) -> object:
    log = log_of(folder)
    return fetch_files(log.store, log.read(0))


def deep(begin: bytes, depth: int, end: bytes) -> bytes:
    return b'{"format":"deltasync/1","a":' + begin * depth + b"1" + end * depth + b"}"


def deep_record(folder: Path) -> None:
    feed_of(folder)
    (folder / "feed" / keys.FEED).write_bytes(deep(b"[", 30_000, b"]"))


def deep_header(folder: Path) -> None:
    text = deep(b'{"a":', 1_000_000, b"}")
    (folder / "payload").write_bytes(len(text).to_bytes(8, "little") + text)


def many_tensors(folder: Path) -> None:
    """A header of as many tensors as the limit on JSON values allows, which is no payload."""
    entries = (f'"{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(1_150_000))
    text = ("{" + ",".join(entries) + "}").encode()
    (folder / "payload").write_bytes(len(text).to_bytes(8, "little") + text)


def inspect(folder: Path) -> object:
    return deltasync.inspect(folder / "payload")


def bomb(found: Bomb) -> Hostile:
    """One of the bombs of tests/attacks."""

    def build(folder: Path) -> None:
        found.write(folder / "payload")
        if found.old is not None:
            found.old(folder / "old")

    def refuse(folder: Path) -> object:
        if found.old is None:
            return inspect(folder)
        return deltasync.apply(folder / "old", folder / "payload", out=folder / "new")

    return Hostile(build, refuse, found.error, found.rule)


HOSTILE: dict[str, Hostile] = {
    "payload promised with 8.6 GB": Hostile(claiming(8_600_000_000), fetch_head, "corrupt", "payload.size"),
    "payload promised with 2^62 bytes": Hostile(claiming(1 << 62), fetch_head, "corrupt", "payload.size"),
    "anchor promised with 2^62 bytes": Hostile(claiming(1 << 62), load_head, "corrupt", "safetensors.truncated"),
    "manifest of 1 TB": Hostile(huge(keys.version_key(0)), load_head, "corrupt", "manifest.size"),
    "feed record of 1 TB": Hostile(huge(keys.FEED), lambda f: log_of(f).feed(), "corrupt", "feed.size"),
    "floor of 1 TB": Hostile(huge(keys.FLOOR), lambda f: log_of(f).floor(), "corrupt", "floor.size"),
    "heartbeat of 1 TB": Hostile(huge(keys.replica_key("a")), lambda f: log_of(f).heartbeats(), None, None),
    "2,000 junk heartbeats": Hostile(junk_heartbeats, lambda f: log_of(f).heartbeats(), None, None),
    "3,000 junk keys, verify": Hostile(junk_keys, no_versions_lost, None, None),
    "manifest of empty lists": Hostile(text_manifest(b"[],"), load_head, "corrupt", "manifest.json"),
    "manifest of numbers": Hostile(text_manifest(b"0,"), load_head, "corrupt", "manifest.field"),
    "manifest of 160,000 payloads": Hostile(many_payloads, load_head, "corrupt", "manifest.sha256"),
    "record nested 30,000 deep": Hostile(deep_record, lambda f: log_of(f).feed(), "corrupt", "feed.json"),
    "header nested 1,000,000 deep": Hostile(deep_header, inspect, "corrupt", "safetensors.json"),
    "header of 1,150,000 tensors": Hostile(many_tensors, inspect, "format", "payload.format"),
    "anchor of 2^35 elements": Hostile(vast_anchor, load_head, "corrupt", "layout.memory"),
    "companion of 1,000,000 slashes": Hostile(
        companion_names(lambda: ["/" * 1_000_000]), read_companions, "corrupt", "files.path"
    ),
    "companions promised with 2^62 bytes": Hostile(
        companion_names(lambda: ["a"], bytes=1 << 62), read_companions, "corrupt", "files.size"
    ),
    "companions with 200,000 bad names": Hostile(
        companion_names(lambda: [f"../{i}" for i in range(200_000)]), read_companions, "corrupt", "files.path"
    ),
    **{name: bomb(found) for name, found in BOMBS.items()},
}

REASONS = {
    "companions with 200,000 bad names": "11 MB of header: the limit of the safetensors format is 100 MB",
    "planes-of-one-byte": "2^25 elements of 8 bytes are 256 MiB: a layout that the reader has already",
    "changes-of-one-byte": "2^25 changes are what one block may hold: the limit of the format",
    "changes-of-one-byte-in-bytes": "2^25 changes are what one block may hold: the limit of the format",
    "header-of-99-megabytes": "the header itself: the limit of the safetensors format",
    "header of 1,150,000 tensors": "60 MB of header: a model may have 2^20 tensors",
    "index-of-spaces": "64 MiB of index: the limit of the format",
    "index-of-too-many-values": "64 MiB of index: the limit of the format",
    "index-of-many-lists": "2^22 lists within the 2^23 values that an index of 2^20 tensors may have",
    "long-json-names": "64 MiB of index: the limit of the format",
    "runs-without-end": "2^22 runs: what sharded tensors may have",
    "manifest of 160,000 payloads": "16 MiB of manifest: the limit of the format",
    "manifest of numbers": "16 MiB of manifest: the limit of the format",
}
"""Why an input exceeds a bound."""


def idle_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def attempt(hostile: Hostile, folder: Path) -> dict[str, Any]:
    """Refuse the input in this process, with limited address space."""
    kernels()
    with Path("/proc/self/statm").open() as file:
        pages = int(file.read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ADDRESS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before, clock, cpu = idle_bytes(), time.perf_counter(), time.process_time()
    outcome: dict[str, Any] = {"kind": None, "rule": None}
    try:
        hostile.refuse(folder)
    except DeltasyncError as error:
        outcome = {"kind": error.kind, "rule": error.rule}
    except Exception:  # noqa: BLE001 - it is the result
        outcome = {"kind": traceback.format_exc(), "rule": None}
    spent = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - clock}
    return {**outcome, **spent, "peak_bytes": idle_bytes() - before}


def apart(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of `work` in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                json.dump(work(), file)
            code = 0
        except Exception:  # noqa: BLE001 - the parent reports that it failed
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    result: dict[str, Any] = json.loads(text) if status == 0 else {"kind": f"ended with {status}"}
    return result


def measure(name: str, hostile: Hostile) -> Row:
    """Build an input and refuse it."""
    say(name)
    with tempfile.TemporaryDirectory(prefix="deltasync-refusals-") as home:
        folder = Path(home)

        def build() -> dict[str, Any]:
            hostile.build(folder)
            return {}

        apart(build)
        # Blocks on the disk, so that what is sparse counts as little as it takes.
        nbytes = sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())
        found = apart(lambda: attempt(hostile, folder))
    expected = found.get("kind") == hostile.kind and found.get("rule") == hostile.rule
    peak, cpu_s = found.get("peak_bytes", 0), found.get("cpu_s", 0.0)
    exceeds = peak > PEAK_BYTES_BOUND or cpu_s > SECONDS_BOUND
    return {
        "input": name,
        "on disk KiB": nbytes // 1024,
        "kind": found.get("kind") or "passed over",
        "rule": found.get("rule") or "",
        "as expected": expected,
        "peak MiB": peak / MiB,
        "cpu s": cpu_s,
        "s": found.get("seconds", 0.0),
        "exceeds": REASONS.get(name, "NO REASON") if exceeds else "",
    }


def main() -> int:
    logging.getLogger("deltasync").setLevel(logging.CRITICAL)
    chosen = sys.argv[1:] or list(HOSTILE)
    rows = [measure(name, HOSTILE[name]) for name in chosen]
    print_table("refusals", rows)
    name = "refusals" if chosen == list(HOSTILE) else "refusals-partial"
    say(f"written to {write_results(name, {'refusals': rows})}")
    return 0 if all(row["as expected"] and row["exceeds"] != "NO REASON" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
