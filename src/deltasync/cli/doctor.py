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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import deltasync
from deltasync import __version__
from deltasync.cli.output import Output, count_text, duration_text, number_text, size_text, time_text
from deltasync.cli.parser import FEED_VARIABLE, Parser, number_within
from deltasync.errors import DeltasyncError, NotFoundError, printable
from deltasync.format import keys
from deltasync.parallel import threads

if TYPE_CHECKING:
    from deltasync.store.protocol import Store

PROBE_MB_MAX = 1024
"""The bandwidth probe is held in memory twice."""

_PACKAGES = ("numpy", "obstore", "huggingface_hub", "prometheus-client", "torch", "transformers", "trl", "vllm")
_LATENCY_READS = 5
_CLOCK_WARN_S = 30.0
"""Ages of heartbeats and orphans are by the store's clock; a larger difference makes them hard to read."""

_SHM_WARN_BYTES = 1_000_000_000

State = Literal["ok", "warning", "failed", "skipped"]
Checks = list[dict[str, Any]]
"""The lines of the report, each with `name`, `state`, `text`, and more values for JSON."""


def doctor_arguments(parser: Parser) -> None:
    parser.explain(
        "Writes only objects under probes/, and removes them. Exits with 1 on failure.",
        example="deltasync doctor s3://bucket/run-42",
    )
    parser.add_place(
        "url", optional=True, help=f"the feed (default: {FEED_VARIABLE}; without it, only this machine is checked)"
    )
    parser.add_argument("--read-only", action="store_true", help="write nothing: only list and read")
    parser.add_argument(
        "--probe-mb",
        type=lambda text: number_within(text, least=1, most=PROBE_MB_MAX),
        default=8,
        metavar="N",
        help="size of the bandwidth probe in MB (default: 8)",
    )


def doctor(args: argparse.Namespace, out: Output) -> None:
    """Run every check and print one line for each; an error if one has failed."""
    checks: Checks = []
    written: list[str] = []
    _check_machine(checks)
    if args.url is not None:
        _check_store(checks, args, written)
    failed = [check["name"] for check in checks if check["state"] == "failed"]
    if out.is_json:
        out.json({"healthy": not failed, "checks": checks, "probes": written})
    else:
        for check in checks:
            name, state, text = check["name"], check["state"], check["text"]
            if out.columns is None:
                print("\t".join(map(printable, (state, name, text))))
            else:
                out.line(f"{state:<7}  {name:<16}  {text}", indent=" " * 27)
        if args.url is not None:
            probes = f"wrote {count_text(len(written), 'object')} under {keys.PROBES} and removed them"
            if not written:
                probes = "wrote nothing"
            elif "put and get" in failed:
                probes = f"could not write under {keys.PROBES}"
            elif "delete" in failed:
                objects = f"wrote {count_text(len(written), 'object')} under {keys.PROBES}"
                probes = f"{objects}, and could not remove them: {', '.join(written)}"
            out.line(probes, indent="  ")
    if failed:
        raise DeltasyncError(f"{count_text(len(failed), 'check')} failed: {', '.join(failed)}", hint="see above")


def _add(checks: Checks, name: str, state: State, text: str, **values: Any) -> None:
    checks.append({"name": name, "state": state, "text": text, **values})


@contextmanager
def _checking(checks: Checks, name: str) -> Iterator[None]:
    """An error of ours in the block is a check that has failed."""
    try:
        yield
    except DeltasyncError as error:
        _add(checks, name, "failed", str(error), kind=error.kind)


def _check_machine(checks: Checks) -> None:
    from deltasync.kernels import kernels
    from deltasync.vllm.releases import NEWEST, OLDEST, is_tested

    python = platform.python_version()
    text = f"{__version__}, Python {python}, {platform.system()} {platform.machine()}"
    _add(checks, "deltasync", "ok", text, version=__version__, python=python)
    versions = {name: _installed(name) for name in _PACKAGES}
    present = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    absent = ", ".join(name for name, version in versions.items() if version is None)
    _add(checks, "packages", "ok", present + (f"; not installed: {absent}" if absent else ""), packages=versions)
    if versions["vllm"] is not None and not is_tested(versions["vllm"]):
        tested = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
        _add(checks, "vLLM", "warning", f"the plugin is tested with {tested}, not with {versions['vllm']}")
    with _checking(checks, "kernels"), warnings.catch_warnings():
        # What the warning says is in the check.
        warnings.simplefilter("ignore", RuntimeWarning)
        name = kernels().name
        slow = "NumPy, many times slower: install a C++20 compiler and reinstall deltasync"
        is_slow = name == "reference"
        _add(checks, "kernels", "warning" if is_slow else "ok", slow if is_slow else name, kernels=name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with _checking(checks, "threads"):
        _add(checks, "threads", "ok", f"{threads()} on {count_text(cores or 1, 'core')}")
    # Not every system says how much memory there is.
    with suppress(OSError, KeyError, ValueError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = {line.partition(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
        total, available = 1024 * int(fields["MemTotal"]), 1024 * int(fields["MemAvailable"])
        text = f"{size_text(available)} of {size_text(total)} available"
        _add(checks, "memory", "ok", text, bytes=total, available_bytes=available)
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        is_small = free < _SHM_WARN_BYTES
        more = ": a vLLM server keeps its mirror there, as large as the weights" if is_small else ""
        text = f"{size_text(free)} free in {shm}{more}"
        _add(checks, "shared memory", "warning" if is_small else "ok", text, free_bytes=free)
    for name, path in (("disk", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(path).free
        _add(checks, name, "ok", f"{size_text(free)} free in {path}", path=str(path), free_bytes=free)


def _installed(name: str) -> str | None:
    """The release of a package, from its metadata: the package is not imported."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def _check_store(checks: Checks, args: argparse.Namespace, written: list[str]) -> None:
    """The checks of a store. Nothing is written with `--read-only`, or to a folder that is no feed."""
    from deltasync.feed.log import Log
    from deltasync.store.local import LocalStore

    with _checking(checks, "store"):
        store = deltasync.open_store(args.url)
    if checks[-1]["name"] == "store":
        return
    with store:
        with _checking(checks, "list"):
            began_s = time.perf_counter()
            count = sum(1 for _ in store.list(keys.VERSIONS))
            took = duration_text(time.perf_counter() - began_s)
            _add(checks, "list", "ok", f"{store.url}: {count_text(count, 'version')} listed in {took}", url=store.url)
        if checks[-1]["state"] == "failed":
            return
        with _checking(checks, "feed"):
            head = Log(store).head()
            if head is None:
                _add(checks, "feed", "warning", "there is no feed here yet", head=None)
            else:
                text = f"version {head.version} is the newest, committed {time_text(head.created_unix_s)} UTC"
                _add(checks, "feed", "ok", text, head=head.version)
        if args.read_only:
            _add(checks, "write", "skipped", "--read-only")
        elif isinstance(store, LocalStore) and checks[-1].get("head") is None:
            # A probe would create folders at a path that may be mistyped, or between files of the user.
            _add(checks, "write", "skipped", "there is no feed in this folder; the first `publish` checks it")
        else:
            try:
                _probe(checks, store, args.probe_mb, written)
            finally:
                # Also after an interrupt.
                with _checking(checks, "delete"):
                    for key in written:
                        store.delete(key)
                    left = [item.key for key in written for item in store.list(key)]
                    gone = f"still there: {', '.join(left)}" if left else "the probes are gone"
                    _add(checks, "delete", "failed" if left else "ok", gone)


def _probe(checks: Checks, store: "Store", probe_mb: int, written: list[str]) -> None:
    """Write, read and time objects under keys that no other process knows. Those keys are added to `written`."""
    from deltasync.store.patient import PatientStore
    from deltasync.store.probe import PATIENCE_S, probe_fencing
    from deltasync.store.reading import get_record

    small, created, large = (keys.probe_key(secrets.token_hex(16)) for _ in range(3))
    written.append(small)
    with _checking(checks, "put and get"):
        data = secrets.token_bytes(64)
        store.put(small, data)
        try:
            stored = get_record(store, small)
        except NotFoundError:
            stored = b""
        if stored == data:
            _add(checks, "put and get", "ok", "an object was read back as it was put")
        else:
            _add(checks, "put and get", "failed", "the store does not have what was just put into it")
    if checks[-1]["state"] == "failed":
        return
    if store.capabilities.create_if_absent:
        written.append(created)
    with _checking(checks, "create-if-absent"):
        if probe_fencing(PatientStore(store, PATIENCE_S), key=created):
            _add(checks, "create-if-absent", "ok", "two writers are kept apart", fences=True)
        else:
            text = "not available: one writer at a time, by a lease"
            _add(checks, "create-if-absent", "warning", text, fences=False)
    with _checking(checks, "clock"):
        began_unix_s = time.time()
        store.put(small, b"clock")
        ended_unix_s = time.time()
        listed = [item.modified_unix_s for item in store.list(small) if item.key == small]
        at_unix_s = listed[0] if listed else began_unix_s
        # Many stores have whole seconds: any time within that second, and within the request, is no difference.
        ahead_s = max(0.0, at_unix_s - ended_unix_s) - max(0.0, began_unix_s - at_unix_s - 1)
        if not listed:
            _add(checks, "clock", "failed", "an object that was just put is not listed")
        elif not ahead_s:
            _add(checks, "clock", "ok", "that of the store agrees with this machine's", store_ahead_s=0.0)
        else:
            side = "ahead of" if ahead_s > 0 else "behind"
            text = f"that of the store is {duration_text(abs(ahead_s))} {side} this machine's"
            state: State = "warning" if abs(ahead_s) > _CLOCK_WARN_S else "ok"
            _add(checks, "clock", state, text, store_ahead_s=round(ahead_s, 3))
    with _checking(checks, "latency"):
        seconds = []
        for _ in range(_LATENCY_READS):
            began_s = time.perf_counter()
            get_record(store, small)
            seconds.append(time.perf_counter() - began_s)
        middle_s = statistics.median(seconds)
        text = f"{duration_text(middle_s)} for a small read, the median of {_LATENCY_READS}"
        _add(checks, "latency", "ok", text, read_s=middle_s)
    written.append(large)
    with _checking(checks, "bandwidth"):
        data = secrets.token_bytes(probe_mb * 1_000_000)
        began_s = time.perf_counter()
        store.put(large, data)
        put_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        stored = store.get(large)
        get_s = time.perf_counter() - began_s
        up, down = (int(len(data) / max(taken_s, 1e-9)) for taken_s in (put_s, get_s))
        if stored == data:
            text = f"{size_text(up)}/s up, {size_text(down)}/s down, with one object of {number_text(probe_mb)} MB"
            _add(checks, "bandwidth", "ok", text, put_bytes_per_s=up, get_bytes_per_s=down)
        else:
            _add(checks, "bandwidth", "failed", "other bytes came back than were put")
