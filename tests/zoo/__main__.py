"""Run the zoo: `python -m zoo [NAME…]` in vLLM's environment. Prints one line of JSON, or a row, for each model.

Each part of the work runs in a child that is forked after vLLM is imported, which takes longer than the rest.
"""

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_HOST_IP="127.0.0.1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_PLUGINS="deltasync",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    TORCH_COMPILE_DISABLE="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.model_executor.models import registry
from vllm.plugins import load_general_plugins
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker import cpu_worker  # noqa: F401

from . import replicas
from .checkpoints import make
from .models import MODELS, Model
from .page import row, write_rows

PARTS = (make, replicas.fresh, replicas.followed, replicas.bare)
_LIMIT_S = 300
"""For each part of the work on one model."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--page", type=Path, help="write the rows of these models to the table of this page")
    options = parser.parse_args()
    # vLLM starts processes to look at classes of models and for workers, and each of them imports vLLM again.
    registry._run_in_subprocess = lambda inspect: inspect()
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    load_general_plugins()
    gc.freeze()
    results = []
    for name in options.names or MODELS:
        results.append(visit(name, MODELS[name]))
        print(json.dumps(results[-1]) if options.page is None else row(results[-1]), flush=True)
    if options.page is not None:
        write_rows(options.page, results)
    return int(any(result["problems"] for result in results))


def visit(name: str, model: Model) -> dict[str, Any]:
    """Follow a feed of one model, start from it, and compare both with a replica that starts with its head."""
    began = time.monotonic()
    problems: list[str] = []
    values: dict[str, Any] = {}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(model.ranks))
    with tempfile.TemporaryDirectory(prefix="deltasync-zoo-") as folder:
        for part in (make, replicas.plain) if model.unserved else PARTS:
            answer = in_child(part, model, Path(folder))
            if "error" in answer:
                problems.append(f"{part.__name__}: {answer['error']}")
                break
            values[part.__name__] = answer["value"]
    if model.unserved:
        failed = "".join(problems).startswith("plain:")
        problems = [] if failed else [*problems, "vLLM serves this model now"]
    elif not problems:
        problems = values["followed"]["problems"] + differences(values["fresh"], values["followed"])
        found = differences(values["fresh"], values["bare"])
        problems += [f"a replica that starts from the feed: {problem}" for problem in found]
    followed = values.get("followed", {})
    return {
        "name": name,
        "architecture": model.architecture,
        **{key: followed.get(key, 0) for key in ("mapped", "computed", "windows")},
        "problems": problems,
        "seconds": round(time.monotonic() - began, 1),
    }


def differences(fresh: dict[str, Any], followed: dict[str, Any]) -> list[str]:
    """What a replica that followed has or answers in another way than a fresh one."""
    problems = []
    if fresh["answers"] != followed["answers"]:
        problems.append("the answers are not those of a fresh replica")
    for rank, (wanted, held) in enumerate(zip(fresh["memory"], followed["memory"], strict=True)):
        other = sorted(key for key in wanted.keys() | held.keys() if wanted.get(key) != held.get(key))
        if other:
            problems.append(f"rank {rank} has {len(other)} differences in memory: {', '.join(other[:8])}")
    return problems


def in_child(function: Callable[..., Any], model: Model, folder: Path) -> dict[str, Any]:
    """What a function returns that runs in a child of its own, as `value`, or its `error`. All it started is ended."""
    path = folder / f"{function.__name__}.json"
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.dup2(2, 1)
        signal.alarm(_LIMIT_S)
        try:
            answer = {"value": function(model, folder)}
        except BaseException as error:  # noqa: BLE001
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error!s:.1000}"}
        path.write_text(json.dumps(answer))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not path.exists():
        return {"error": f"the process ended with status {status}"}
    answer: dict[str, Any] = json.loads(path.read_text())
    return answer


if __name__ == "__main__":
    sys.exit(main())
