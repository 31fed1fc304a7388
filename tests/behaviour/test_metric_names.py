"""Metric names follow Prometheus' conventions, and what the dashboard and the alert rules name exists in a real run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S, processes
from support.feeds import SpyStore, nth, publish, publisher
from support.replicas import TorchTarget, follower, wait_until
from support.servers import missing

from deltasync.format.weights import Weights
from deltasync.replica.events import follower_metrics
from deltasync.replica.folder import HookStatus
from deltasync.store.memory import MemoryStore
from deltasync.trainer.events import PublisherMetrics
from deltasync.upkeep.compact import Compactor
from deltasync.upkeep.prune import Retention
from deltasync.upkeep.relay import Relay
from deltasync.upkeep.stats import upkeep_metrics

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboard.json"
UNITS = ("seconds", "bytes", "elements")
NOT_BASE_UNITS = ("milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "mb", "kb", "percent")


@pytest.fixture(scope="module")
def scrape() -> str:
    """What Prometheus reads from a trainer with a retention, a replica, a compactor and a relay after some versions."""
    store, copy, registry = SpyStore(), MemoryStore(), CollectorRegistry()
    with_metrics = PublisherMetrics(registry=registry)
    retention = Retention(anchors=1, versions=100, every_s=0.01)
    trainer = publisher(store, observer=with_metrics, retention=retention)
    for number in range(3):
        publish(trainer, number).wait(LONG_S)
    wait_until(lambda: has_sample(registry, "deltasync_pruner_runs_total"))
    trainer.close()
    compactor = Compactor(store, levels=(2,))
    assert len(list(compactor.advance())) == 1
    registry.register(upkeep_metrics("compactor", {(): compactor.upkeep}))  # type: ignore[arg-type]
    relay = Relay(store, copy, heartbeats=True)
    assert len(list(relay.advance())) > 0
    registry.register(upkeep_metrics("relay", {(relay.destination,): relay.upkeep}))  # type: ignore[arg-type]
    with follower(store, TorchTarget(Weights.of(nth(0)).layout)) as replica:
        replica.advance(to=1)
        replica.advance()
        hook = HookStatus(version=2)
        registry.register(follower_metrics(replica.status, lambda: hook))
        return generate_latest(registry).decode()


def has_sample(registry: CollectorRegistry, name: str) -> bool:
    return bool(registry.get_sample_value(name))


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def value(text: str, name: str, **labels: str) -> float:
    (found,) = [s.value for f in families(text) for s in f.samples if s.name == name and s.labels == labels]
    return found


def test_names_follow_the_conventions(scrape: str) -> None:
    found = families(scrape)
    assert len(found) > 65
    for family in found:
        assert re.fullmatch(r"deltasync(_[a-z]+)+", family.name), family.name
        assert family.documentation.endswith("."), family.name
        parts = family.name.split("_")
        assert not set(parts) & set(NOT_BASE_UNITS), family.name
        units = [part for part in parts if part in UNITS]
        assert not units or parts[-1] == units[-1], f"{family.name}: the unit is the last part"
        if family.type == "counter":
            assert {s.name for s in family.samples} <= {f"{family.name}_total"}
        else:
            assert family.type == "gauge"
            assert not family.name.endswith(("_total", "_count", "_sum")), family.name


@pytest.fixture(scope="module")
def promtool() -> str:
    return shutil.which("promtool") or missing("promtool is not installed (apt install prometheus)")


def test_promtool_finds_nothing_wrong(promtool: str, scrape: str) -> None:
    for command, text in ((["check", "metrics"], scrape), (["check", "rules", str(ALERTS)], "")):
        done = processes.run([promtool, *command], input=text)
        assert done.returncode == 0, done.stdout + done.stderr


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def test_every_metric_of_the_rules_and_the_dashboard_is_in_a_scrape(scrape: str) -> None:
    scraped = {sample.name for family in families(scrape) for sample in family.samples}
    expressions = [rule["expr"] for rule in rules()] + [t["expr"] for panel in panels() for t in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"deltasync_[a-z_]+", text)}
    assert len(named) > 40
    assert named <= scraped, f"not in a scrape: {sorted(named - scraped)}"


HEALTHY = {"following": 1, "failing": 0, "lag": 0, "stale_seconds": 1, "poll_age_seconds": 1, "exec_failing": 0}
SITUATIONS: dict[str, tuple[dict[str, int], set[str]]] = {
    "at the head": ({}, set()),
    "pinned": ({"lag": 50}, set()),
    "moved on demand": ({"following": 0, "lag": 50, "stale_seconds": 9999, "poll_age_seconds": 9999}, set()),
    "paused": ({"lag": 5, "stale_seconds": 300, "poll_age_seconds": 300}, set()),
    "in a long move": ({"stale_seconds": 500, "poll_age_seconds": 500}, set()),
    "too slow": ({"lag": 9, "stale_seconds": 90}, {"ReplicaBehind"}),
    "paused for long": ({"lag": 9, "stale_seconds": 9999, "poll_age_seconds": 9999}, {"ReplicaBehind", "ReplicaStale"}),
    "store away": ({"failing": 1, "poll_age_seconds": 300}, {"StoreUnreachable", "ReplicaFailing"}),
    "target fails": ({"failing": 1}, {"ReplicaFailing"}),
    "refused": ({"following": 0, "failing": 1}, {"ReplicaStopped", "ReplicaFailing"}),
    "command fails": ({"exec_failing": 1}, {"CommandFailing"}),
}
"""Metrics of a replica that stay as they are for ten minutes, and the alerts that are raised then."""


@pytest.mark.parametrize("situation", SITUATIONS)
def test_alerts_of_a_replica(promtool: str, situation: str, tmp_path: Path) -> None:
    changed, expected = SITUATIONS[situation]
    case = {
        "interval": "1m",
        "input_series": [
            {"series": f'deltasync_{name}{{instance="gpu-7"}}', "values": f"{number}x10"}
            for name, number in (HEALTHY | changed).items()
        ],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "10m",
                "exp_samples": [
                    {"labels": f'{{alertname="Deltasync{alert}"}}', "value": 1} for alert in sorted(expected)
                ],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "tests": [case]}))
    done = processes.run([promtool, "test", "rules", str(file)])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["action"].endswith(".")


def test_panels_have_a_place_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert at["x"] + at["w"] <= 24


def test_the_docs_name_every_metric(scrape: str) -> None:
    text = (ROOT / "docs" / "commands.md").read_text() + (ROOT / "docs" / "trainer.md").read_text()
    for family in families(scrape):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        assert f"`{name}`" in text, name


PHASES_ASKED_FOR = {
    "deltasync_publisher_phase_seconds_total": {"held", "encode", "put", "commit"},
    "deltasync_move_seconds_total": {"plan", "fetch", "decode", "stage", "commit", "pause"},
    "deltasync_compactor_phase_seconds_total": {"replay", "encode", "put", "commit"},
    "deltasync_pruner_phase_seconds_total": {"plan", "delete"},
    "deltasync_relay_phase_seconds_total": {"fetch", "put", "commit"},
}


def test_every_phase_took_time(scrape: str) -> None:
    """But for a pause, which this target does not have, and a commit or deletion that a clock cannot resolve."""
    for name, phases in PHASES_ASKED_FOR.items():
        found = {s.labels["phase"]: s.value for f in families(scrape) for s in f.samples if s.name == name}
        assert found.keys() == phases, name
        assert all(value > 0 for phase, value in found.items() if phase not in ("pause", "held")), (name, found)


def test_the_metrics_of_a_publisher(scrape: str) -> None:
    assert value(scrape, "deltasync_publisher_version") == 2
    assert value(scrape, "deltasync_publisher_versions_total", kind="delta") == 2
    assert value(scrape, "deltasync_publisher_versions_total", kind="anchor") == 1
    assert value(scrape, "deltasync_publisher_payload_bytes_total", kind="delta") > 0
    assert value(scrape, "deltasync_publisher_changed_elements_total") > 0
    assert value(scrape, "deltasync_publisher_failures_total") == 0
    assert value(scrape, "deltasync_publisher_phase_seconds_total", phase="encode") > 0
    assert value(scrape, "deltasync_version") == value(scrape, "deltasync_publisher_version")
    assert value(scrape, "deltasync_move_seconds_total", phase="decode") > value(
        scrape, "deltasync_last_move_seconds", phase="decode"
    )
    assert value(scrape, "deltasync_poll_age_seconds") >= 0
