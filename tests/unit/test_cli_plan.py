"""`plan`: what it prints, and what cannot be planned."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from support.commands import Out, run
from support.helpers import changed, state, write_sharded

import deltasync
from deltasync.cli.main import parse
from deltasync.cli.parser import UsageError
from deltasync.estimate import (
    Change,
    Deployment,
    Link,
    estimate,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with the checkpoints `old`, `new` and `other`, which has other tensors."""
    write_sharded(tmp_path / "old", state())
    write_sharded(tmp_path / "new", changed(state()), shards=3)
    write_sharded(tmp_path / "other", {"w": np.zeros(3, np.float32)}, shards=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


MODEL = ("plan", "--params", "8e9", "--changed", "1%", "--link", "1gbit")


def test_plan_as_json(capsys: Out) -> None:
    assert run(*MODEL, "--replicas", "16", "--ranks", "8", "--links", "2", "--sites", "4", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    change = Change.assumed(8 * 10**9, 0.01)
    link = Link(bits_per_s=1e9, round_trip_s=0.05)
    wanted = estimate(
        change,
        Deployment(ranks=8, uplink=link, uplinks=2, replicas=16, downlink=link, sites=4, egress_usd_per_gb=0.09),
    )
    assert found["change"] == {**asdict(change), "density": 0.01}
    assert found["phases_s"] == wanted.phases
    assert found["step_to_live_s"] == pytest.approx(sum(found["phases_s"].values()))
    assert found["traffic"]["egress_usd_per_hour"] == wanted.traffic.egress_usd_per_hour
    assert found["full_copy"]["step_to_live_s"] == wanted.copy_step_to_live_s
    assert found["deployment"]["sites"] == 4


def test_plan_as_plain_text(capsys: Out) -> None:
    assert run(*MODEL, "--replicas", "16", "--plain") == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines}
    assert rows["estimate"] == ["deltasync", "full copies"]
    assert float(rows["from step to live"][0]) < float(rows["from step to live"][1])
    assert rows["trainer held"][1] == "-"
    assert int(rows["fetched in an hour"][1]) == 60 * 16 * 16 * 10**9


@pytest.mark.parametrize(
    "options",
    [
        ("--params", "100T", "--link", "0.001kbit", "--replicas", str(10**18), "--sites", "1"),
        ("--params", "1", "--link", "1000000tbit", "--rtt-ms", "0", "--egress-usd-per-gb", "1e9"),
        ("--every-s", "1e308", "--rtt-ms", "1e9", "--cores", str(10**18)),
        ("--every-s", "1e-320", "--egress-usd-per-gb", "0", "--cores", "1"),
    ],
)
def test_the_most_extreme_numbers_give_finite_ones(capsys: Out, options: tuple[str, ...]) -> None:
    """Other programs cannot read an infinity in JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert run(*MODEL, *options, "--json") == 0
    json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert run(*MODEL, *options) == 0
    assert not re.search(r"\b(inf|nan)\b", capsys.readouterr().out)


def test_plan_of_two_checkpoints(place: Path, capsys: Out) -> None:
    assert run("plan", "old", "new", "--link", "100mbit", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["change"]["delta_bytes"] == len(deltasync.diff("old", "new"))
    assert found["deployment"]["uplink"]["bits_per_s"] == 1e8


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("plan", "old", "--link", "1gbit"), "old is one checkpoint"),
        (("plan", "old", "new", "--params", "8e9", "--link", "1gbit"), "--params is measured"),
        (("plan", "old", "old", "--link", "1gbit"), "have the same weights"),
        (("plan", "--link", "1gbit"), "`plan` takes two checkpoints, or --params"),
        (("plan", "--params", "8e9", "--link", "1gbit"), "`plan` takes two checkpoints, or --params"),
        ((*MODEL, "--lr", "1e-6"), "`plan` takes two checkpoints, or --params with one of"),
        (("plan", "--params", "8B", "--lr", "1e-6", "--dtype", "fp8", "--link", "1gbit"), "--lr is known for bf16"),
        (("plan", "--params", "8B", "--lr", "1", "--link", "1gbit"), "steps were measured at learning rates"),
        ((*MODEL, "--links", "2"), "--links 2 is more than --ranks 1"),
        ((*MODEL, "--sites", "2"), "--sites 2 is more than --replicas 1"),
        ((*MODEL, "--replicas", "3", "--sites", "4"), "--sites 4 is more than --replicas 3"),
        (("plan", "old", "missing", "--link", "1gbit"), "missing does not exist"),
    ],
)
def test_what_cannot_be_planned(place: Path, capsys: Out, argv: tuple[str, ...], message: str) -> None:
    assert run(*argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--changed", "1", "'1' is not a share, such as 1% or 0.01"),
        ("--changed", "0%", "is not a share"),
        ("--changed", "101%", "is not a share"),
        ("--changed", "nan", "is not a share"),
        ("--params", "eight", "is not a number of weights"),
        ("--params", "1..2B", "is not a number of weights"),
        ("--params", "1e40", "is not a number of weights"),
        ("--link", "1GB", "is not the rate of a link, such as 100mbit or 1gbit"),
        ("--link", "0gbit", "is not the rate of a link"),
        ("--link", "..gbit", "is not the rate of a link"),
        ("--link", "0." + 320 * "0" + "1kbit", "is not the rate of a link"),
        ("--link", 299 * "9" + "gbit", "is not the rate of a link"),
        ("--lr", "0", "is not a learning rate above 0"),
        ("--rtt-ms", "-1", "is not a time in ms from 0 to a billion"),
        ("--rtt-ms", "1e308", "is not a time in ms from 0 to a billion"),
        ("--egress-usd-per-gb", "inf", "is not a price from 0 to a billion"),
        ("--egress-usd-per-gb", "1e308", "is not a price from 0 to a billion"),
        ("--ranks", "0", "is not a whole number from 1 on"),
        ("--replicas", 400 * "9", "is not a whole number from 1 on"),
        ("--replicas", "1_0", "is not a whole number from 1 on"),
        ("--threads", "1025", "'1025' is not a whole number from 1 to 1,024"),
    ],
)
def test_values_that_are_refused(option: str, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([*MODEL, f"{option}={text}"], environment={})
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("params", "7b", 7_000_000_000),
        ("params", "1.5T", 1_500_000_000_000),
        ("params", "1e6", 1_000_000),
        ("changed", "0.5%", 0.005),
        ("changed", "100%", 1.0),
        ("changed", "0.25", 0.25),
        ("link", "100Mbit/s", 1e8),
        ("link", "2.5Gbps", None),
        ("link", "400gbitps", 4e11),
    ],
)
def test_values_with_units(option: str, text: str, value: float | None) -> None:
    argv = [*MODEL, f"--{option}={text}"]
    if value is None:
        with pytest.raises(UsageError):
            parse(argv, environment={})
    else:
        assert getattr(parse(argv, environment={}), option) == pytest.approx(value)
