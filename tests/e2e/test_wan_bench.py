"""`make bench-wan` with small weights: every way from a step to live weights arrives with the trainer's bits.

It needs root on Linux, iproute2 and util-linux, and the packages of others that it measures.
"""

import importlib.util
from pathlib import Path

import pytest
from support.servers import missing

from benchmarks import wan
from benchmarks.wan_ways import ARC_V3, OURS, WAYS

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    for package in ("cwtrain", "fireworks_delta_compression", "zstandard"):
        if importlib.util.find_spec(package) is None:
            missing(f"{package} is not installed: make .venv/e2e.stamp")


def test_every_way_brings_the_bits_of_the_trainer_to_the_replica() -> None:
    section = wan.qwen3(wan.QUICK)
    (rows,) = (rows for title, rows in section.tables.items() if title.startswith("over a link"))
    assert sorted((row["way"], row["link"]) for row in rows) == sorted(
        (way, rate) for way in (OURS, *(way.name for way in WAYS)) for rate in wan.RATES
    )
    assert all(row["exact"] for row in rows)
    sent = {row["way"]: row["MB on the link"] for row in rows if row["link"] == wan.SLOW}
    assert sent["full file"] == max(sent.values())
    assert sent[OURS] == min(sent.values())


def test_several_replicas_and_a_comparison_that_can_fail(tmp_path: Path) -> None:
    states = wan.synthetic_states(wan.TINY, tmp_path)
    with wan.bench(states, replicas=2, gap_s=(0.0, 0.1)) as made:
        for way in (OURS, ARC_V3):
            run = made.run(way, wan.FAST, replicas=2, repeats=2)
            assert [step.is_exact for step in run.steps] == [True, True]
        made.states = states[::-1]
        run = made.run(OURS, wan.FAST, replicas=2, repeats=1)
        assert [step.is_exact for step in run.steps] == [False]
