"""The `doctor` command: what this machine has, and what the store of a feed can do."""

import argparse
import os
import platform
import secrets
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from deltasync import __version__
from deltasync.cli.output import Output
from deltasync.cli.units import count_text, duration_text, number_text, size_text, time_text
from deltasync.errors import DeltasyncError, NotFoundError, printable
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.kernels import kernels
from deltasync.parallel import threads
from deltasync.store import open_store
from deltasync.store.fencing import PATIENCE_S, probe_fencing
from deltasync.store.local import LocalStore
from deltasync.store.patient import PatientStore, get_record
from deltasync.store.protocol import Store
from deltasync.vllm.releases import NEWEST, OLDEST, is_tested

_PACKAGES = ("numpy", "obstore", "huggingface_hub", "prometheus-client", "torch", "transformers", "trl", "vllm")
_LATENCY_READS = 5
_CLOCK_WARN_S = 30.0
"""Ages of heartbeats and orphans are by the store's clock; a larger difference makes them hard to read."""

_SHM_WARN_BYTES = 1_000_000_000

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `values` are for JSON."""

    name: str
    state: State
    text: str
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "state": self.state, "text": self.text, **self.values}


def doctor(args: argparse.Namespace, out: Output) -> None:
    """Run every check and print one line for each; an error if one has failed."""
    checks = list(_machine())
    written: list[str] = []
    if args.url is not None:
        checks += _store(args, written)
    failed = [check.name for check in checks if check.state == "failed"]
    if out.is_json:
        out.json({"healthy": not failed, "checks": [check.to_json() for check in checks], "probes": written})
    else:
        for check in checks:
            _print(out, check)
        if args.url is not None:
            out.line(_written_text(checks, written), indent="  ")
    if failed:
        raise DeltasyncError(f"{count_text(len(failed), 'check')} failed: {', '.join(failed)}", hint="see above")


def _written_text(checks: Sequence[Check], written: Sequence[str]) -> str:
    """What was written to the store, and whether it is gone."""
    failed = {check.name for check in checks if check.state == "failed"}
    if not written:
        return "wrote nothing"
    if "put and get" in failed:
        return f"could not write under {keys.PROBES}"
    probes = f"wrote {count_text(len(written), 'object')} under {keys.PROBES}"
    if "delete" in failed:
        return f"{probes}, and could not remove them: {', '.join(written)}"
    return f"{probes} and removed them"


def _print(out: Output, check: Check) -> None:
    if out.columns is None:
        print("\t".join(map(printable, (check.state, check.name, check.text))))
    else:
        out.line(f"{check.state:<7}  {check.name:<16}  {check.text}", indent=" " * 27)


def _machine() -> Iterator[Check]:
    yield Check(
        "deltasync",
        "ok",
        f"{__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}",
        {"version": __version__, "python": platform.python_version()},
    )
    versions = {name: _installed(name) for name in _PACKAGES}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    absent = ", ".join(name for name, version in versions.items() if version is None)
    yield Check("packages", "ok", present + (f"; not installed: {absent}" if absent else ""), {"packages": versions})
    if versions["vllm"] is not None and not is_tested(versions["vllm"]):
        tested = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        yield Check("vLLM", "warning", f"the plugin is tested with {tested}, not with {versions['vllm']}")
    yield _checked("kernels", _kernels)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield _checked("threads", lambda: Check("threads", "ok", f"{threads()} on {count_text(cores or 1, 'core')}"))
    memory = _memory()
    if memory is not None:
        total, available = memory
        text = f"{size_text(available)} of {size_text(total)} available"
        yield Check("memory", "ok", text, {"bytes": total, "available_bytes": available})
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        is_small = free < _SHM_WARN_BYTES
        more = ": a vLLM server keeps its mirror there, as large as the weights" if is_small else ""
        state: State = "warning" if is_small else "ok"
        yield Check("shared memory", state, f"{size_text(free)} free in {shm}{more}", {"free_bytes": free})
    for name, path in (("disk", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(path).free
        yield Check(name, "ok", f"{size_text(free)} free in {path}", {"path": str(path), "free_bytes": free})


def _installed(name: str) -> str | None:
    """The release of a package, from its metadata: the package is not imported."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _kernels() -> Check:
    with warnings.catch_warnings():
        # What the warning says is in the check.
        warnings.simplefilter("ignore", RuntimeWarning)
        name = kernels().name
    if name == "reference":
        text = "NumPy, many times slower: install a C++20 compiler and reinstall deltasync"
        return Check("kernels", "warning", text, {"kernels": name})
    return Check("kernels", "ok", name, {"kernels": name})


def _memory() -> tuple[int, int] | None:
    """Bytes of memory, and those that are available; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = {line.partition(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    try:
        return 1024 * int(fields["MemTotal"]), 1024 * int(fields["MemAvailable"])
    except (KeyError, ValueError):
        return None


def _checked(name: str, run: Callable[[], Check]) -> Check:
    try:
        return run()
    except DeltasyncError as error:
        return Check(name, "failed", str(error), {"kind": error.kind})


def _store(args: argparse.Namespace, written: list[str]) -> Iterator[Check]:
    """The checks of a store. Nothing is written with `--read-only`, or to a folder that is no feed."""
    try:
        store = open_store(args.url)
    except DeltasyncError as error:
        yield Check("store", "failed", str(error), {"kind": error.kind})
        return
    with store:
        listed = _checked("list", lambda: _list(store))
        yield listed
        if listed.state == "failed":
            return
        feed = _checked("feed", lambda: _feed(store))
        yield feed
        if args.read_only:
            yield Check("write", "skipped", "--read-only")
        elif isinstance(store, LocalStore) and feed.values.get("head") is None:
            # A probe would create folders at a path that may be mistyped, or between files of the user.
            yield Check("write", "skipped", "there is no feed in this folder; the first `publish` checks it")
        else:
            yield from _probes(store, args.probe_mb, written)


def _list(store: Store) -> Check:
    began_s = time.perf_counter()
    count = sum(1 for _ in store.list(keys.VERSIONS))
    took = duration_text(time.perf_counter() - began_s)
    return Check("list", "ok", f"{store.url}: {count_text(count, 'version')} listed in {took}", {"url": store.url})


def _feed(store: Store) -> Check:
    head = Log(store).head()
    if head is None:
        return Check("feed", "warning", "there is no feed here yet", {"head": None})
    text = f"version {head.version} is the newest, committed {time_text(head.created_unix_s)} UTC"
    return Check("feed", "ok", text, {"head": head.version})


def _probes(store: Store, probe_mb: int, written: list[str]) -> list[Check]:
    """Write, read, time and remove objects under keys that no other process knows."""
    small, created, large = (keys.probe_key(secrets.token_hex(16)) for _ in range(3))
    written.append(small)
    checks = [_checked("put and get", lambda: _put(store, small))]
    try:
        if checks[0].state == "ok":
            if store.capabilities.create_if_absent:
                written.append(created)
            checks.append(_checked("create-if-absent", lambda: _create(store, created)))
            checks.append(_checked("clock", lambda: _clock(store, small)))
            checks.append(_checked("latency", lambda: _latency(store, small)))
            written.append(large)
            checks.append(_checked("bandwidth", lambda: _bandwidth(store, large, probe_mb)))
    finally:
        # Also after an interrupt.
        checks.append(_checked("delete", lambda: _delete(store, written)))
    return checks


def _put(store: Store, key: str) -> Check:
    data = secrets.token_bytes(64)
    store.put(key, data)
    try:
        stored = get_record(store, key)
    except NotFoundError:
        stored = b""
    if stored != data:
        return Check("put and get", "failed", "the store does not have what was just put into it")
    return Check("put and get", "ok", "an object was read back as it was put")


def _create(store: Store, key: str) -> Check:
    if probe_fencing(PatientStore(store, PATIENCE_S), key=key):
        return Check("create-if-absent", "ok", "two writers are kept apart", {"fences": True})
    text = "not available: one writer at a time, by a lease"
    return Check("create-if-absent", "warning", text, {"fences": False})


def _clock(store: Store, key: str) -> Check:
    began_unix_s = time.time()
    store.put(key, b"clock")
    ended_unix_s = time.time()
    listed = [item.modified_unix_s for item in store.list(key) if item.key == key]
    if not listed:
        return Check("clock", "failed", "an object that was just put is not listed")
    # Many stores have whole seconds: any time within that second, and within the request, is no difference.
    ahead_s = max(0.0, listed[0] - ended_unix_s) - max(0.0, began_unix_s - listed[0] - 1)
    if not ahead_s:
        return Check("clock", "ok", "that of the store agrees with this machine's", {"store_ahead_s": 0.0})
    side = "ahead of" if ahead_s > 0 else "behind"
    text = f"that of the store is {duration_text(abs(ahead_s))} {side} this machine's"
    state: State = "warning" if abs(ahead_s) > _CLOCK_WARN_S else "ok"
    return Check("clock", state, text, {"store_ahead_s": round(ahead_s, 3)})


def _latency(store: Store, key: str) -> Check:
    seconds = []
    for _ in range(_LATENCY_READS):
        began_s = time.perf_counter()
        get_record(store, key)
        seconds.append(time.perf_counter() - began_s)
    middle_s = statistics.median(seconds)
    text = f"{duration_text(middle_s)} for a small read, the median of {_LATENCY_READS}"
    return Check("latency", "ok", text, {"read_s": middle_s})


def _bandwidth(store: Store, key: str, probe_mb: int) -> Check:
    data = secrets.token_bytes(probe_mb * 1_000_000)
    began_s = time.perf_counter()
    store.put(key, data)
    put_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    stored = store.get(key)
    get_s = time.perf_counter() - began_s
    if stored != data:
        return Check("bandwidth", "failed", "other bytes came back than were put")
    up, down = (int(len(data) / max(taken_s, 1e-9)) for taken_s in (put_s, get_s))
    text = f"{size_text(up)}/s up, {size_text(down)}/s down, with one object of {number_text(probe_mb)} MB"
    return Check("bandwidth", "ok", text, {"put_bytes_per_s": up, "get_bytes_per_s": down})


def _delete(store: Store, written: list[str]) -> Check:
    for key in written:
        store.delete(key)
    left = [item.key for key in written for item in store.list(key)]
    if left:
        return Check("delete", "failed", f"still there: {', '.join(left)}")
    return Check("delete", "ok", "the probes are gone")
