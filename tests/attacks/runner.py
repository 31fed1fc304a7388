"""Runs hostile payloads, each in a process of its own whose memory is limited, and reports what became of them.

    python tests/attacks/runner.py < jobs.json > results.json

A job names a payload, the state to apply it to, a folder to write to, and how many megabytes it may need.
"""

import contextlib
import io
import json
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deltasync
import deltasync.oneshot  # imported by the commands, whose memory is limited, and not counted
from deltasync.cli.main import main
from deltasync.errors import DeltasyncError
from deltasync.kernels import kernels

MEGABYTE = 1 << 20


def outcome(call: Callable[[], object]) -> list[str | None]:
    """Kind and rule of the error, or its class if it is none of ours; empty if there was none."""
    try:
        call()
    except DeltasyncError as error:
        return [error.kind, error.rule]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return [type(error).__name__, traceback.format_exc()]
    return []


def command(*arguments: str) -> dict[str, Any]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def attempt(job: dict[str, Any]) -> dict[str, Any]:
    """Inspect and apply, by library and by command."""
    payload, old, folder = job["payload"], job["old"], Path(job["folder"])
    with Path("/proc/self/statm").open() as file:
        pages = int(file.read().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + job["megabytes"] * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = Path(old).stat()
    found = {
        "inspect": outcome(lambda: deltasync.inspect(payload)),
        "apply": outcome(lambda: deltasync.apply(old, payload, out=folder / "new.safetensors")),
        "command inspect": command("inspect", payload, "--all"),
        "command apply": command("apply", old, payload, "-o", str(folder / "new.safetensors")),
    }
    after = Path(old).stat()
    return {
        **found,
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "written": sorted(os.listdir(folder)),
        "old is as it was": (state.st_mtime_ns, state.st_size) == (after.st_mtime_ns, after.st_size),
    }


def apart(job: dict[str, Any]) -> dict[str, Any]:
    """`attempt` in a child; says how it ended if it did not end well."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as file:
            json.dump(attempt(job), file)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if status == 0 else {"crashed": status}


if __name__ == "__main__":
    kernels()
    json.dump({job["name"]: apart(job) for job in json.load(sys.stdin)}, sys.stdout)
