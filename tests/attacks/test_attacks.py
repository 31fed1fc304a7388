"""Hostile payloads: each is refused with its own error; no crash, no write, bounded memory."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from bombs import BOMBS
from support import processes

import deltasync
from deltasync.errors import FormatError
from deltasync.format import limits

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors"
OLD = VECTORS / "states" / "negative-old.safetensors"
SMALL_MEGABYTES = 200
EXIT_CORRUPT = 3

FILES = {
    attack["name"]: {**attack, "payload": HERE / "files" / f"{attack['name']}.safetensors"}
    for attack in json.loads((HERE / "manifest.json").read_text())
}
BLOCKS = {
    f"block-{v['name']}": {**v, "stage": "apply", "payload": VECTORS / v["payload"]}
    for v in json.loads((VECTORS / "manifest.json").read_text())["negative"]
}
SMALL = {**FILES, **BLOCKS}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and limits of memory")


def run(jobs: list[dict[str, Any]]) -> dict[str, Any]:
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    text = json.dumps(jobs, default=str)
    done = processes.run([sys.executable, HERE / "runner.py"], input=text, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of all small payloads."""
    return run(
        [
            {
                "name": name,
                "payload": attack["payload"],
                "old": OLD,
                "folder": tmp_path_factory.mktemp("out"),
                "megabytes": SMALL_MEGABYTES,
            }
            for name, attack in SMALL.items()
        ]
    )


def require_refused(found: dict[str, Any], stage: str, error: str, rule: str) -> None:
    assert "crashed" not in found, found
    expected = [error, rule]
    assert found["inspect"] == (expected if stage == "inspect" else [])
    assert found["apply"] == expected
    for command in ("inspect", "apply"):
        printed = found[f"command {command}"]
        refused = stage == "inspect" or command == "apply"
        assert printed["code"] == (EXIT_CORRUPT if refused else 0), printed["err"]
        assert (f"[{rule}]" in printed["err"]) == refused
        # The tabs of tables are ours; one in a name is escaped, which test_foreign_text.py checks.
        assert (printed["err"] + printed["out"]).translate({9: "", 10: ""}).isprintable(), "no control characters"
        assert printed["err"].count("\n") <= 1
    assert found["written"] == []
    assert found["old is as it was"]


@pytest.mark.parametrize("name", SMALL)
def test_small_payloads(small: dict[str, Any], name: str) -> None:
    attack = SMALL[name]
    require_refused(small[name], attack["stage"], attack["error"], attack["rule"])


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(tmp_path: Path, name: str) -> None:
    bomb = BOMBS[name]
    (tmp_path / "out").mkdir()
    bomb.write(tmp_path / "payload")
    if bomb.old is not None:
        bomb.old(tmp_path / "old")
    job = {
        "name": name,
        "payload": tmp_path / "payload",
        "old": OLD if bomb.old is None else tmp_path / "old",
        "folder": tmp_path / "out",
        "megabytes": bomb.megabytes,
    }
    found = run([job])[name]
    require_refused(found, bomb.stage, bomb.error, bomb.rule)
    assert found["megabytes"] < bomb.megabytes


NO_FILE = {"anchor.codec", "coo.size"}
"""Rules of single blocks that no payload can break: a rule of the container is broken before."""

TOO_SLOW = {"layout.count"}
"""It takes 2^20 tensors: see `test_too_many_tensors`."""


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSORS_MAX", 1)
    with pytest.raises(FormatError) as caught:
        deltasync.inspect(HERE / "files" / "sha256-wrong.safetensors")
    assert caught.value.rule == "layout.count"


def test_every_rule_of_payloads_is_broken_by_some_file() -> None:
    """The rules are those of docs/format.md, sections 13.1 to 13.5."""
    text = (HERE.parents[1] / "docs" / "format.md").read_text()
    section = text[text.index("### 13.1") : text.index("### 13.6")]
    spelled_out = section[: section.index("| rule |")]
    rules = set(re.findall(r"^\| `([a-z0-9_.]+)` \|", section, re.MULTILINE))
    rules |= set(re.findall(r"`((?:safetensors|index|block)\.[a-z_]+)`", spelled_out))
    broken = {attack["rule"] for attack in SMALL.values()} | {bomb.rule for bomb in BOMBS.values()}
    assert rules == broken | NO_FILE | TOO_SLOW


def test_every_file_is_in_the_table() -> None:
    assert {p.stem for p in (HERE / "files").iterdir()} == FILES.keys()


def test_nothing_was_written_where_names_point() -> None:
    assert not Path("/tmp/deltasync-was-here").exists()
