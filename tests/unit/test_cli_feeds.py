"""`publish`, `log`, `show`, `restore` and `verify`, and their exit codes."""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S
from support.commands import Out, read_json, run, text, write_checkpoints
from support.feeds import publish, publisher
from support.helpers import state, write_sharded

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.feeds import base_ref
from deltasync.cli.output import size_text
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import BaseRef
from deltasync.format.sealed import Heartbeat
from deltasync.store.local import LocalStore
from deltasync.upkeep.survey import ORPHAN_S

MANIFEST_FIELDS = {
    "format", "kind", "version", "parent", "step", "layout_sha256", "parent_digest", "digest", "elements", "changed",
    "payloads", "files", "writer", "created_unix_s", "base", "extra", "payload_bytes",
}  # fmt: skip
EDGE_FIELDS = {"key", "start", "end", "bytes"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c5, one step apart, and `feed` with the first five, an anchor at 3."""
    monkeypatch.chdir(tmp_path)
    write_checkpoints(tmp_path, 6)
    for i in range(5):
        assert run("publish", "feed", f"c{i}", "--step", str(10 * i), *(["--anchor"] if i == 3 else [])) == 0
    capsys.readouterr()
    return tmp_path


# --- publish ----------------------------------------------------------------------------------------------------------


def test_publish(place: Path, capsys: Out) -> None:
    assert run("publish", "feed", "c5", "--step", "50", "--parent", "c4", "--threads", "1") == 0
    out = text(capsys)
    assert re.match(r"version 5: delta of [0-9.]+ kB in [0-9.]+ m?s \(all weights are .*, [0-9.]+ times smaller\)", out)
    assert f"digest\t{deltasync.digest('c5')}\n" in out
    assert re.search(r"changed\t[0-9,]+ of [0-9,]+ elements \([0-9.]+ %\), [0-9.]+ bits each", out)
    assert "anchor" not in out
    assert run("publish", "feed", "c5", "--json") == 0
    found = read_json(capsys)
    assert found.keys() == MANIFEST_FIELDS | {"full_bytes", "anchor_bytes", "seconds"}
    assert (found["version"], found["kind"], found["step"], found["changed"]) == (6, "delta", None, 0)
    assert (found["payload_bytes"], found["anchor_bytes"]) == (0, None)
    assert found["full_bytes"] == sum(array.nbytes for array in state().values())
    assert found["seconds"] >= 0


def test_publish_prints_what_an_anchor_added(place: Path, capsys: Out) -> None:
    assert run("publish", "feed", "c5", "--anchor") == 0
    anchor = Log(LocalStore(place / "feed")).anchor(5)
    assert anchor is not None
    assert f"anchor\t{size_text(anchor.nbytes)} added, for replicas that join late\n" in text(capsys)
    assert run("publish", "feed", "c4", "--anchor", "--json") == 0
    anchor = Log(LocalStore(place / "feed")).anchor(6)
    assert anchor is not None
    assert read_json(capsys)["anchor_bytes"] == anchor.nbytes


def test_publish_the_first_version(place: Path, capsys: Out) -> None:
    assert run("publish", "new", "c0") == 0
    out = text(capsys)
    assert out.startswith("version 0: anchor of ")
    assert f"new feed\t{(place / 'new').as_uri()}\n" in out
    assert run("publish", "typo", "c0", "--must-exist") == 1
    assert not (place / "typo").exists()
    assert "there is no version" in capsys.readouterr().err
    assert run("publish", "based", "c0", "--base", "c0") == 0
    assert text(capsys).startswith("version 0: base of 0 B in ")
    assert run("publish", "based", "c1") == 0


@pytest.mark.parametrize(
    ("given", "name", "revision"),
    [
        ("org/model", "org/model", None),
        ("org/model@main", "org/model", "main"),
        ("org/model@refs/pr/1", "org/model", "refs/pr/1"),
        ("/data/me@host/base", "/data/me@host/base", None),
        ("./a@b", "./a@b", None),
        ("../a@b", "../a@b", None),
    ],
)
def test_base_ref(given: str, name: str, revision: str | None) -> None:
    assert base_ref(given) == BaseRef(name, revision)


# --- log and show -----------------------------------------------------------------------------------------------------


def test_log(place: Path, capsys: Out) -> None:
    assert run("log", "feed") == 0
    lines = text(capsys).splitlines()
    stored = [path.stat().st_size for path in (place / "feed/payloads").iterdir()]
    size = f"{size_text(sum(stored))} in {len(stored)} payloads, anchors included"
    assert lines[0] == f"# 5 of 5 versions; {size}"
    names = lines[1].split("\t")
    rows = [dict(zip(names, line.split("\t"), strict=True)) for line in lines[2:]]
    assert [row["version"] for row in rows] == ["0", "1", "2", "3", "4"]
    anchor = Log(LocalStore(place / "feed")).anchor(3)
    assert anchor is not None
    assert [row["anchor"] for row in rows] == ["-", "-", "-", str(anchor.nbytes), "-"]
    assert (rows[3]["kind"], rows[3]["step"], rows[3]["digest"]) == ("delta", "30", deltasync.digest("c3").hex[:12])


def test_log_json(place: Path, capsys: Out) -> None:
    assert run("log", "feed", "--json") == 0
    found = read_json(capsys)
    assert found.keys() == {"head", "floor", "stored_bytes", "stored_payloads", "versions", "skips", "pins"}
    assert (found["head"], found["floor"], found["skips"]) == (4, 0, [])
    assert [v["version"] for v in found["versions"]] == [0, 1, 2, 3, 4]
    assert [v["has_anchor"] for v in found["versions"]] == [False, False, False, True, False]
    assert all(v.keys() == MANIFEST_FIELDS | {"has_anchor", "anchor_bytes", "pruned"} for v in found["versions"])
    assert not any(v["pruned"] for v in found["versions"])
    assert [v["digest"] for v in found["versions"]] == [deltasync.digest(f"c{i}").hex for i in range(5)]


def test_log_of_many(place: Path, capsys: Out) -> None:
    for _ in range(18):
        run("publish", "feed", "c4", "--parent", "c4")
    capsys.readouterr()
    assert run("log", "feed") == 0
    assert "20 of 23 versions" in text(capsys)
    assert run("log", "feed", "--all") == 0
    assert "23 of 23 versions" in text(capsys)
    for argv, first in ((["log", "feed", "--json"], 3), (["log", "feed", "--all", "--json"], 0)):
        assert run(*argv) == 0
        assert [v["version"] for v in read_json(capsys)["versions"]] == list(range(first, 23))


def test_log_lists_skips_and_the_floor(place: Path, capsys: Out) -> None:
    assert run("prune", "feed", "--keep-anchors", "1", "--keep-versions", "1", "--yes") == 0
    (place / "feed" / "skips").mkdir()
    (place / "feed" / keys.skip_key(3, 5)).write_bytes(b"only listed")
    capsys.readouterr()
    assert run("log", "feed") == 0
    out = text(capsys)
    assert "pruned before version 3" in out
    assert [line.split("\t")[:2] for line in out.splitlines()[2:7]] == [
        ["0", "anchor, pruned"], ["1", "delta, pruned"], ["2", "delta, pruned"], ["3", "delta"], ["4", "delta"]
    ]  # fmt: skip
    assert "skip from version 3 to 5" in out
    assert run("log", "feed", "--json") == 0
    found = read_json(capsys)
    assert (found["floor"], found["skips"]) == (3, [[3, 5]])
    assert [v["pruned"] for v in found["versions"]] == [True, True, True, False, False]


def test_show(place: Path, capsys: Out) -> None:
    assert run("show", "feed", "4") == 0
    out = text(capsys)
    for expected in (
        "4 (delta)",
        deltasync.digest("c4").hex,
        deltasync.digest("c3").hex,
        keys.anchor_key(3),
        keys.version_key(4),
        "a restore fetches",
    ):
        assert expected in out
    assert run("show", "feed") == 0
    assert text(capsys) == out, "the newest version is the default"
    assert run("show", "feed", "3") == 0
    assert "1 shard, " in text(capsys)


def test_show_json(place: Path, capsys: Out) -> None:
    assert run("show", "feed", "3", "--json") == 0
    found = read_json(capsys)
    assert found.keys() == {"manifest", "anchor", "restore"}
    assert found["manifest"].keys() == found["anchor"].keys() == MANIFEST_FIELDS
    assert found["restore"].keys() == {"bytes", "edges"}
    assert [e.keys() for e in found["restore"]["edges"]] == [EDGE_FIELDS]
    assert found["restore"]["edges"][0]["key"] == keys.anchor_key(3)
    assert found["restore"]["bytes"] == found["anchor"]["payload_bytes"]
    assert run("show", "feed", "1", "--json") == 0
    found = read_json(capsys)
    assert found["anchor"] is None
    assert [(e["start"], e["end"]) for e in found["restore"]["edges"]] == [(None, 0), (0, 1)]


def test_show_names_a_base(place: Path, capsys: Out) -> None:
    run("publish", "based", "c0", "--base", "org/model@abc")
    capsys.readouterr()
    assert run("show", "based", "0") == 0
    assert "org/model @ abc" in text(capsys)


FACTS = {"plan_s": "0.1", "fetch_s": "2", "decode_s": "0.5", "stage_s": "0.3", "commit_s": "0.1", "pause_s": "0.05"}


def trained(url: str) -> int:
    """A feed whose version 1 comes from a trainer; when its capture began, in milliseconds."""
    to = publisher(LocalStore(url))
    for number in range(2):
        publish(to, number).wait(LONG_S)
    to.close()
    timeline = Log(LocalStore(url)).read(1).timeline
    assert timeline is not None
    return timeline.captured_unix_ms


def test_show_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.chdir(tmp_path)
    began_unix_ms = trained("feed")
    log = Log(LocalStore("feed"))
    moved = {"moved_version": "1", "moved_unix_ms": str(began_unix_ms + 4000)}
    log.beat(Heartbeat("there", 1, 2**40, {**FACTS, **moved}))
    log.beat(Heartbeat("elsewhere", 0, 2**40, {**FACTS, **moved, "moved_version": "0"}))
    log.beat(Heartbeat("of-an-earlier-release", 1, 2**40, FACTS))
    log.beat(Heartbeat("liar", 1, 2**40, {**moved, "moved_unix_ms": "soon", "fetch_s": "nan"}))
    assert run("show", "feed", "1", "--timeline", "--json") == 0
    found = read_json(capsys)["timeline"]
    assert (found["version"], found["has_capture"], found["began_unix_ms"]) == (1, True, began_unix_ms)
    assert found["steps"][0].keys() == {"where", "step", "began_s", "took_s"}
    steps = {(row["where"], row["step"]): (row["began_s"], row["took_s"]) for row in found["steps"]}
    own = [name for where, name in steps if where == "trainer"]
    assert own == ["capture", "queue", "encode", "put", "committed"]
    assert steps["trainer", "committed"][0] == pytest.approx(sum(steps["trainer", name][1] for name in own[:-1]))
    assert [name for where, name in steps if where == "there"] == [
        "plan", "fetch", "decode", "stage", "commit", "pause", "live"
    ]  # fmt: skip
    assert {where for where, _ in steps} == {"trainer", "there"}
    assert steps["there", "plan"][0] == pytest.approx(1.0)
    assert steps["there", "fetch"] == pytest.approx((1.1, 2.0))
    assert steps["there", "pause"] == pytest.approx((3.95, 0.05))
    assert steps["there", "live"] == (4.0, None)
    assert run("show", "feed", "--timeline") == 0
    out = text(capsys)
    assert "version 1 since its capture" in out
    assert "there\tlive\t4.0" in out
    assert "elsewhere" not in out


def test_show_timeline_of_what_a_command_has_published(place: Path, capsys: Out) -> None:
    assert run("show", "feed", "4", "--timeline") == 0
    out = text(capsys)
    assert "since its commit (no capture was recorded" in out
    assert "trainer\tcommitted\t0.0" in out


# --- restore ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [None, 0, 2, 4])
def test_restore(place: Path, capsys: Out, version: int | None) -> None:
    option = [] if version is None else ["--version", str(version)]
    assert run("restore", "feed", "-o", "out", *option) == 0
    at = 4 if version is None else version
    digest = deltasync.digest(f"c{at}")
    assert text(capsys) == f"{digest}  out (version {at})\n"
    assert deltasync.digest("out") == digest
    assert (place / "out" / "config.json").read_bytes() == (place / f"c{at}" / "config.json").read_bytes()


def test_restore_json(place: Path, capsys: Out) -> None:
    assert run("restore", "feed", "-o", "out", "--json", "--threads", "1") == 0
    assert read_json(capsys) == {"version": 4, "step": 40, "digest": deltasync.digest("c4").hex}


def test_restore_dry_run(place: Path, capsys: Out) -> None:
    assert run("restore", "feed", "-o", "out", "--dry-run", "--version", "2") == 0
    out = text(capsys)
    assert "version 2: " in out
    assert "to fetch" in out
    assert all(keys.version_key(v) in out for v in range(3))
    assert run("restore", "feed", "-o", "out", "--dry-run", "--json") == 0
    found = read_json(capsys)
    assert found.keys() == {"version", "digest", "edges"}
    assert [e["key"] for e in found["edges"]] == [keys.anchor_key(3), keys.version_key(4)]
    assert not (place / "out").exists()


def test_restore_from_a_base(place: Path, capsys: Out) -> None:
    run("publish", "based", "c0", "--base", "nowhere/c0")
    assert run("publish", "based", "c1", "--parent", "c0") == 0
    capsys.readouterr()
    assert run("restore", "based", "-o", "out", "--base", "c0") == 0
    assert deltasync.digest("out") == deltasync.digest("c1")
    capsys.readouterr()
    assert run("restore", "based", "-o", "out2", "--base", "c1") == 3
    assert "base.digest" in capsys.readouterr().err


# --- verify -----------------------------------------------------------------------------------------------------------


def payload_path(place: Path, version: int) -> Path:
    ref = Log(LocalStore(place / "feed")).read(version).payloads[0]
    return place / "feed" / keys.payload_key(ref.sha256)


@pytest.mark.parametrize(("option", "words"), [([], "in place"), (["--deep"], "decoded and proved")])
def test_verify(place: Path, capsys: Out, option: list[str], words: str) -> None:
    assert run("verify", "feed", *option) == 0
    assert text(capsys) == f"5 versions {words}: 0-4\n"
    assert run("verify", "feed", "--json", *option) == 0
    found = read_json(capsys)
    assert found == {
        "clean": True,
        "deep": bool(option),
        "head": 4,
        "restorable": [0, 1, 2, 3, 4],
        "lost": [],
        "pruned": [],
        "damages": [],
        "takes": [],
        "unchecked": [],
        "orphans": 0,
        "orphan_bytes": 0,
        "young_orphans": 0,
    }


def test_verify_damage(place: Path, capsys: Out) -> None:
    path = payload_path(place, 1)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert run("verify", "feed") == 0
    capsys.readouterr()
    assert run("verify", "feed", "--deep") == 3
    out, err = capsys.readouterr()
    assert f"damaged {keys.version_key(1)}: " in out
    assert "[payload.sha256]" in out
    assert "it costs versions 1-2" in out
    assert "lost: versions 1-2" in out
    assert "3 versions decoded and proved: 0, 3-4" in out
    assert err.startswith("error: feed: 1 damage, 2 versions lost")
    assert run("verify", "feed", "--deep", "--json") == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["clean"], found["lost"], found["restorable"]) == (False, [1, 2], [0, 3, 4])
    assert found["damages"][0].keys() == {"key", "kind", "rule", "message"}
    assert found["takes"] == [{"versions": [[1, 2]], "keys": [keys.version_key(1)]}]


def test_verify_reports_orphans_bases_and_pruned_versions(place: Path, capsys: Out) -> None:
    run("prune", "feed", "--keep-anchors", "1", "--keep-versions", "1", "--yes")
    Upload(LocalStore(place / "feed")).put(b"12345")
    capsys.readouterr()
    assert run("verify", "feed") == 0
    out = text(capsys)
    assert "pruned: versions 0-2" in out
    assert "not named by any manifest: 1 payload (5 B); `prune` removes 0 of them, and leaves 1 that" in out
    assert run("prune", "feed", *KEEP_ONE) == 0
    assert "1 orphan (5 B) younger than a day: not deleted" in text(capsys)
    assert run("prune", "feed", *KEEP_ONE, "--json") == 0
    assert read_json(capsys)["young_orphans"] == 1
    (old,) = [path for path in (place / "feed/payloads").iterdir() if path.stat().st_size == 5]
    os.utime(old, (time.time() - 2 * ORPHAN_S,) * 2)
    assert run("verify", "feed") == 0
    assert "`prune` removes 1 of them, and leaves 0 that" in text(capsys)
    assert run("prune", "feed", *KEEP_ONE, "--yes") == 0
    assert not old.exists()
    capsys.readouterr()
    run("publish", "based", "c0", "--base", "nowhere/at/all")
    capsys.readouterr()
    assert run("verify", "based", "--deep", "--base", "no-copy") == 0
    assert "not checked: the base of version 0" in text(capsys)


KEEP_ONE = ["--keep-anchors", "1", "--keep-versions", "1"]


# --- exit codes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["log"],
        ["show"],
        ["show", "feed", "-1"],
        ["show", "feed", "1", "2"],
        ["show", "feed", "a b"],
        ["restore", "feed"],
        ["restore", "feed", "-o", "out", "--version", "1.5"],
        ["prune", "feed"],
        ["prune", "feed", "--keep-anchors", "1"],
        ["prune", "feed", "--keep-anchors", "0", "--keep-versions", "1"],
        ["prune", "feed", "--keep-anchors", "1", "--keep-versions", "0"],
        ["publish", "feed"],
        ["publish", "feed", "c0", "--step", "-3"],
        ["verify", "feed", "--threads", "0"],
    ],
)
def test_wrong_usage_is_2(argv: list[str], capsys: Out) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


READS = (["log"], ["show", "0"], ["verify"], ["restore", "-o", "out"], ["prune", *KEEP_ONE], ["publish", "c0"])


@pytest.mark.parametrize("command", READS, ids=[c[0] for c in READS])
@pytest.mark.parametrize("url", ["ftp://host/x", "s4://bucket", "", "file://host/x", "hf://models/x"])
def test_an_unknown_kind_of_store(place: Path, capsys: Out, command: list[str], url: str) -> None:
    assert run(command[0], url, *command[1:]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    if "://" in url:
        assert url.split("://")[0] in err


@pytest.mark.parametrize("command", [["log"], ["show", "0"], ["restore", "-o", "out"]], ids=["log", "show", "restore"])
def test_an_empty_feed(place: Path, capsys: Out, command: list[str]) -> None:
    assert run(command[0], "nothing", *command[1:]) == 1
    assert "nothing" in capsys.readouterr().err
    assert not (place / "nothing").exists(), "reading makes no folder"
    assert not (place / "out").exists()


def test_nothing_to_verify_or_prune(place: Path, capsys: Out) -> None:
    assert run("verify", "nothing") == 1, "a mistyped URL must not look clean"
    assert capsys.readouterr().out == "no version can be restored\n"
    assert run("prune", "nothing", *KEEP_ONE, "--yes") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no version in " in err
    assert not (place / "nothing").exists()


@pytest.mark.parametrize("command", [["show", "feed", "9"], ["restore", "feed", "-o", "out", "--version", "9"]])
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_an_unknown_version(place: Path, capsys: Out, command: list[str], option: list[str]) -> None:
    assert run(*command, *option) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "version 9 is not in file://" in err
    assert "deltasync log" in err


def other_tensors(place: Path) -> list[str]:
    write_sharded(place / "other", {"x": np.zeros(3, np.float32)})
    return ["publish", "feed", "other"]


def wrong_parent(place: Path) -> list[str]:
    return ["publish", "feed", "c5", "--parent", "c2"]


def late_base(place: Path) -> list[str]:
    return ["publish", "feed", "c5", "--base", "org/model"]


def no_checkpoint(place: Path) -> list[str]:
    return ["publish", "feed", "nowhere"]


def damaged_head(place: Path) -> list[str]:
    (place / "feed" / keys.version_key(4)).write_bytes(b"{")
    return ["restore", "feed", "-o", "out"]


def damaged_way(place: Path) -> list[str]:
    payload_path(place, 1).write_bytes(b"")
    return ["restore", "feed", "-o", "out", "--version", "2"]


def pruned(place: Path) -> list[str]:
    run("prune", "feed", *KEEP_ONE, "--yes")
    return ["restore", "feed", "-o", "out", "--version", "1"]


def taken_output(place: Path) -> list[str]:
    return ["restore", "feed", "-o", "c0"]


def damaged_prune(place: Path) -> list[str]:
    (place / "feed" / keys.version_key(1)).write_bytes(b"")
    return ["prune", "feed", *KEEP_ONE, "--yes"]


def from_the_future(place: Path) -> list[str]:
    path = place / "feed" / keys.version_key(2)
    path.write_bytes(path.read_bytes().replace(b"deltasync/1", b"deltasync/9"))
    return ["show", "feed", "2"]


BAD: list[tuple[Callable[[Path], list[str]], int, list[str]]] = [
    (other_tensors, 3, ["--anchor"]),
    (wrong_parent, 3, ["c2", "publish.parent"]),
    (late_base, 1, ["version 4"]),
    (no_checkpoint, 1, ["nowhere"]),
    (damaged_head, 3, [keys.version_key(4), "manifest.json"]),
    (damaged_way, 3, ["payloads/", "payload.size"]),
    (pruned, 1, ["version 1 was pruned", "from 3 on"]),
    (taken_output, 1, ["c0"]),
    (damaged_prune, 3, [keys.version_key(1), "prune.damaged"]),
    (from_the_future, 3, ["deltasync/9"]),
]


@pytest.mark.parametrize(("prepare", "code", "words"), BAD, ids=[b[0].__name__ for b in BAD])
def test_errors(place: Path, capsys: Out, prepare: Callable[[Path], list[str]], code: int, words: list[str]) -> None:
    """The exit code, one line that names the thing, and nothing written."""
    argv = prepare(place)
    capsys.readouterr()
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words), err
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
    assert not (place / "out").exists()


def test_a_conflict_is_4(place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another publisher commits between our look at the head and our commit."""
    real = LocalStore.create
    theirs = [None]

    def overtaken(self: LocalStore, key: str, data: Any) -> bool:
        if key == keys.version_key(5) and theirs:
            theirs.pop()
            assert run("publish", "feed", "c4") == 0
        return real(self, key, data)

    monkeypatch.setattr(LocalStore, "create", overtaken)
    assert run("publish", "feed", "c5", "--json") == 4
    out, err = capsys.readouterr()
    assert out.startswith("version 5: delta of 0 B"), "theirs"
    assert keys.version_key(5) in err
    assert "stop one of the two" in err
    assert run("publish", "feed", "c5") == 0


def test_a_url_with_a_scheme_is_the_same_feed(place: Path, capsys: Out) -> None:
    assert run("log", (place / "feed").as_uri(), "--json") == 0
    assert read_json(capsys)["head"] == 4


def test_a_line_of_verify_stays_short(place: Path, capsys: Out) -> None:
    """Each of many unreadable manifests costs all that are lost: full lists would take the square of their number."""
    for i in range(200):
        (place / "feed" / keys.version_key(10**12 * (i + 1))).write_bytes(b"junk")
    assert run("verify", "feed") == 3
    out, _ = capsys.readouterr()
    assert "152 more ranges, 200000000000000" in out
    assert max(map(len, out.splitlines())) < 2000
