"""The model of the pipeline: what a feed would cost."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import changed, state, write_sharded

import deltasync
from deltasync import AnchorPolicy
from deltasync.errors import InvalidInputError, MismatchError
from deltasync.estimate import (
    MEASURED,
    Change,
    Deployment,
    Link,
    Pass,
    Rates,
    anchor_versions,
    bits_per_change,
    density_at,
    estimate,
    overlapped,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

GBIT = Link(bits_per_s=1e9, round_trip_s=0.05)
ROUND = Rates(
    cores=2,
    doubling=2.0,
    capture=Pass(0.1, 10e9, math.inf),
    encode=Pass(0.2, 5e9, 1e8),
    decode=Pass(0.3, 4e9, 1e8),
    stage=Pass(0.4, math.inf, 1e7),
    pause=Pass(0.5, math.inf, 1e8),
    anchor_encode_bytes_per_s=1e9,
    anchor_decode_bytes_per_s=2e9,
    commit_round_trips=1,
    plan_round_trips=3,
)
CHANGE = Change(
    elements=10_000_000_000,
    weight_bytes=20_000_000_000,
    changed=100_000_000,
    delta_bytes=100_000_000,
    anchor_bytes=14_000_000_000,
)


def deployment(**options: Any) -> Deployment:
    return Deployment(**{"uplink": GBIT, "downlink": GBIT, **options})


# --- the model --------------------------------------------------------------------------------------------------------


def test_an_estimate_by_hand() -> None:
    """20 GB in 4 ranks over 2 links, to 6 replicas in 2 sites; the 25 MB of a rank are 16 payloads."""
    found = estimate(
        CHANGE, deployment(ranks=4, uplinks=2, replicas=6, sites=2, cores=4, egress_usd_per_gb=0.1, every_s=30), ROUND
    )
    phases = found.phases
    assert phases["capture"] == pytest.approx(0.1 + 5e9 / 10e9 / 2)
    encode_s = 0.2 + (5e9 / 5e9 + 25e6 / 1e8) / 2
    assert phases["encode"] == pytest.approx(encode_s)
    # 0.4 s on the links is less than the encoder needs: only the last of 16 payloads of a rank comes after it.
    assert phases["put"] == pytest.approx(0.4 / 16 + 0.05)
    assert phases["commit"] == pytest.approx(0.05)
    assert phases["poll"] == pytest.approx(0.1 * 30 / 8 / 2)
    assert phases["plan"] == pytest.approx(0.15)
    # Three replicas share a link: 2.4 s, while 3.3 s are decoded.
    assert phases["decode"] == pytest.approx(0.3 + (20e9 / 4e9 + 1) / 2)
    assert phases["fetch"] == pytest.approx(2.4 / 64 + 0.05)
    assert phases["stage"] == pytest.approx(0.4 + 10 / 2)
    assert phases["pause"] == pytest.approx(0.5 + 1 / 2)
    assert found.step_to_live_s == pytest.approx(sum(phases.values()))
    assert (found.held_s, found.pause_s) == (phases["capture"], phases["pause"])
    assert found.anchor_versions == 140
    assert found.traffic.up_bytes == pytest.approx(100e6 + 14e9 / 140)
    assert found.traffic.down_bytes == pytest.approx(600e6)
    assert found.versions_per_hour == pytest.approx(120)
    assert found.traffic.egress_usd_per_hour == pytest.approx(120 * 0.6 * 0.1)
    assert found.copy_traffic.egress_usd_per_hour == pytest.approx(120 * 120 * 0.1)
    assert found.copy_step_to_live_s == pytest.approx(80 + 480)
    assert found.join_bytes == pytest.approx(14e9 + 69.5 * 100e6)
    assert found.trainer_memory_bytes == pytest.approx(5e9 + 2 * 15 * 25e6)
    assert found.replica_memory_bytes == pytest.approx(20e9 + 16 * 100e6)


def test_what_a_trainer_pays_does_not_depend_on_the_replicas() -> None:
    def paid(replicas: int) -> tuple[object, ...]:
        found = estimate(CHANGE, deployment(replicas=replicas, sites=1), ROUND)
        p = found.phases
        return (
            p["capture"],
            p["encode"],
            p["put"],
            p["commit"],
            found.traffic.up_bytes_per_hour,
            found.trainer_memory_bytes,
        )

    assert paid(1) == paid(16) == paid(1000)


@pytest.mark.parametrize("option", ["elements", "density", "replicas"])
def test_costs_grow_linearly_or_slower(option: str) -> None:
    def costs(factor: int) -> np.ndarray:
        by = {name: factor if name == option else 1 for name in ("elements", "density", "replicas")}
        change = Change.assumed(10**9 * by["elements"], 0.001 * by["density"])
        found = estimate(change, deployment(replicas=by["replicas"], sites=1))
        times = [*found.phases.values(), found.traffic.up_bytes, found.traffic.down_bytes, found.join_bytes]
        return np.array(times)

    assert np.all(costs(10) <= 10.0001 * costs(1))


def test_a_trainer_that_is_faster_than_its_link_publishes_less_often() -> None:
    slow = Link(bits_per_s=1e6)
    found = estimate(CHANGE, deployment(uplink=slow, every_s=1.0), ROUND)
    assert found.publish_every_s > 800
    assert found.versions_per_hour == pytest.approx(3600 / found.publish_every_s)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.integers(1, 1000))
def test_overlap_is_between_the_longer_part_and_the_sum(one: float, other: float, parts: int) -> None:
    found = overlapped(one, other, parts)
    assert max(one, other) <= found <= (one + other) * (1 + 1e-12)
    assert overlapped(one, other, 1) == pytest.approx(one + other)


@given(
    st.one_of(st.none(), st.floats(0.01, 10)),
    st.one_of(st.none(), st.integers(1, 300)),
    st.integers(1, 1000),
    st.integers(1, 5000),
)
def test_anchors_are_due_when_the_policy_says(
    ratio: float | None, versions: int | None, delta_bytes: int, anchor_bytes: int
) -> None:
    policy = AnchorPolicy(bytes_ratio=ratio, versions=versions)
    found = anchor_versions(policy, delta_bytes=delta_bytes, anchor_bytes=anchor_bytes)
    if found is None:
        assert ratio is versions is None
        return
    due = [
        policy.is_due(delta_bytes=n * delta_bytes, anchor_bytes=anchor_bytes, versions=n)
        for n in range(max(1, found - 1), found + 1)
    ]
    assert due == [False, True][-len(due) :]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1, not 0"),
        ({"replicas": 0}, "replicas must be at least 1, not 0"),
        ({"cores": 1.5}, "cores must be a whole number, not 1.5"),
        ({"ranks": 2, "uplinks": 3}, "uplinks must be from 1 to 2, not 3"),
        ({"replicas": 2, "sites": 3}, "sites must be from 1 to 2, not 3"),
        ({"every_s": 0.0}, "every_s must be above 0, not 0"),
        ({"every_s": math.nan}, "every_s must be above 0, not nan"),
        ({"egress_usd_per_gb": -1.0}, "egress_usd_per_gb must be at least 0, not -1"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        deployment(**options)
    assert caught.value.message == message


@pytest.mark.parametrize(("bits_per_s", "round_trip_s"), [(0, 0), (-1, 0), (math.nan, 0), (1, -1), (1, math.inf)])
def test_a_link_that_cannot_be_is_refused(bits_per_s: float, round_trip_s: float) -> None:
    with pytest.raises(InvalidInputError, match="a link must have a rate above 0"):
        Link(bits_per_s=bits_per_s, round_trip_s=round_trip_s)


# --- what a step changes ----------------------------------------------------------------------------------------------


def test_bits_and_shares_are_those_that_were_measured() -> None:
    rows = json.loads((RESULTS / "codec.json").read_text())["tables"]["sizes: exp/1 compared"]
    checked = [row for row in rows if "bf16" in row["data"] and "step 2" not in row["data"]]
    assert len(checked) >= 6
    for row in checked:
        density = row["changed %"] / 100
        assert bits_per_change(density) == pytest.approx(row["exp/1 bits"], rel=0.01), row["data"]
        if "lr" in row["data"]:
            learning_rate = float(row["data"].split("lr ")[1].split()[0])
            assert density_at(learning_rate) == pytest.approx(density, rel=0.01)


def test_a_delta_is_never_larger_than_an_anchor() -> None:
    change = Change.assumed(10**6, 1.0)
    assert change.delta_bytes <= change.anchor_bytes < change.weight_bytes


@pytest.mark.parametrize(
    ("elements", "density", "dtype", "message"),
    [
        (10, 0.1, "fp32", "there are no measured sizes for fp32"),
        (0, 0.1, "bf16", "elements must be at least 1|from 1"),
        (10, 0.0, "bf16", "above 0 and at most 1, not 0"),
        (10, 1.5, "bf16", "above 0 and at most 1, not 1.5"),
        (10, math.nan, "bf16", "above 0 and at most 1, not nan"),
    ],
)
def test_an_assumption_that_cannot_be_is_refused(elements: int, density: float, dtype: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Change.assumed(elements, density, dtype=dtype)


@pytest.mark.parametrize("learning_rate", [1e-8, 1e-3, 0.0, math.nan])
def test_learning_rates_far_from_those_measured_are_refused(learning_rate: float) -> None:
    with pytest.raises(InvalidInputError, match="steps were measured"):
        density_at(learning_rate)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the checkpoints `old`, `new` and `other`, which has other tensors."""
    write_sharded(tmp_path / "old", state())
    write_sharded(tmp_path / "new", changed(state()), shards=3)
    write_sharded(tmp_path / "other", {"w": np.zeros(3, np.float32)}, shards=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_checkpoints_are_coded_as_a_publisher_codes_them(place: Path) -> None:
    found = Change.measured("old", "new")
    delta = deltasync.diff("old", "new")
    description = deltasync.inspect(delta)
    assert found.delta_bytes == len(delta)
    assert (found.elements, found.weight_bytes) == (description.layout.elements, description.layout.nbytes)
    assert found.changed == description.changed > 0
    manifest = deltasync.publish(place / "feed", place / "new")
    # The shards of an anchor have headers and indexes besides.
    assert 0 < found.anchor_bytes < manifest.nbytes < found.anchor_bytes + 20_000


def test_checkpoints_of_two_models_are_refused(place: Path) -> None:
    with pytest.raises(MismatchError):
        Change.measured("old", "other")


def test_the_rates_are_those_of_the_results() -> None:
    """Every rate of the package was printed by a benchmark. Another run of it gives about the same."""

    def rows(name: str, title: str) -> list[dict[str, Any]]:
        tables = json.loads((RESULTS / f"{name}.json").read_text())["tables"]
        (found,) = [rows for key, rows in tables.items() if key.startswith(title)]
        return list(found)

    def row(name: str, title: str, **wanted: str) -> dict[str, Any]:
        (found,) = [each for each in rows(name, title) if wanted.items() <= each.items()]
        return found

    speed = {each["stage"]: each for each in rows("codec", "speed: GB/s")}
    weight_bytes = 1192.14e6
    held_s = row("publish", "held: bf16", way="deltasync")["held s, best"]
    encode_s = rows("publish", "behind the trainer's back: bf16")[0]["encode s"]
    scatter = {each["way"]: each["ms"] / 1000 for each in rows("replica", "qwen3, into the model")}
    wanted = {
        "doubling": (MEASURED.doubling, speed["detect + encode"]["2 : 1"]),
        "capture": (MEASURED.capture.bytes_per_s, weight_bytes / held_s),
        "encode": (MEASURED.encode.bytes_per_s, weight_bytes / encode_s),
        "decode": (MEASURED.decode.bytes_per_s, 1e9 * speed["decode all, then apply in place"]["2 threads"]),
        "stage": (MEASURED.stage.changes_per_s, 5_930_686 / scatter["stage (beside)"]),
        "pause": (MEASURED.pause.changes_per_s, 5_930_686 / scatter["scatter"]),
        "put": (MEASURED.anchor_encode_bytes_per_s, 1e9 * row("store", "anchor", store="file://", verb="put")["GB/s"]),
        "get": (MEASURED.anchor_decode_bytes_per_s, 1e9 * row("store", "anchor", store="file://", verb="get")["GB/s"]),
    }
    for name, (rate, measured) in wanted.items():
        assert rate == pytest.approx(measured, rel=0.25), f"{name}: take the newest results over into estimate.py"


def test_more_cores_are_assumed_to_gain_what_the_second_did() -> None:
    rates = replace(ROUND, doubling=1.8)
    assert rates.speed(2) == 1.0
    assert rates.speed(1) == pytest.approx(1 / 1.8)
    assert rates.speed(16) == pytest.approx(1.8**3)
