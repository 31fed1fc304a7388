"""What the commands print in a terminal of 80 and of 120 columns, in a pipe, with --plain and with --json."""

import fcntl
import hashlib
import json
import os
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support import LONG_S, processes
from support.commands import Out
from support.helpers import changed, state, write_sharded

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.main import build_parser
from deltasync.cli.output import (
    Column,
    Output,
    duration_text,
    fitted_widths,
    ranges_text,
    ratio_text,
    shortened,
    size_text,
    text_width,
    time_text,
)
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.sealed import FloorRecord, Heartbeat
from deltasync.store.local import LocalStore

FIRST, HEAD = 1_234_560, 1_234_584
ELEMENTS = 405_853_388_800
CHANGED = 4_012_345_678
NAMES = [f"model.layers.{i}.block_sparse_moe.experts.{i}.down_proj.weight_scale_inv" for i in range(4)]
ANSI = re.compile(r"\x1b\[[0-9;]*m")

COMMANDS: dict[str, tuple[int, list[str]]] = {
    "publish": (0, ["small", "c1", "--anchor"]),
    "log": (0, ["big"]),
    "show": (0, ["big", "-q"]),
    "verify": (3, ["big"]),
    "restore": (0, ["small", "-o", "out"]),
    "prune": (0, ["pruned", "--keep-anchors", "1", "--keep-versions", "1"]),
    "compact": (0, ["pruned", "--levels", "2"]),
    "relay": (0, ["small", "copy"]),
    "pin": (0, ["small", "0", "--name", "best", "--note", "why"]),
    "unpin": (0, ["pruned", "newest"]),
    "pins": (0, ["small"]),
    "import": (0, ["run", "imported", "--base", "c0"]),
    "export": (0, ["small", "folders"]),
    "follow": (0, ["small", "--target", "live", "--once"]),
    "status": (3, ["big"]),
    "watch": (0, ["big", "--once"]),
    "report": (0, ["small", "-o", "report.html"]),
    "diff": (0, ["c0", "c1", "-o", "new.delta"]),
    "apply": (0, ["c0", "delta", "-o", "applied"]),
    "inspect": (0, ["delta", "--old", "c0"]),
    "plan": (0, ["c0", "c1", "--link", "1gbit"]),
    "digest": (0, ["c0"]),
    "doctor": (0, ["small", "--probe-mb", "1"]),
}
"""The exit code and the arguments of every command that prints a result."""

WHOLE: dict[str, list[str]] = {
    "log": [str(HEAD), "12.35 GB", "651.85 GB", "0.989 %", "1,234,585 versions", str(FIRST + 8)],
    "show": [str(HEAD), "4,012,345,678 of 405,853,388,800 elements", "800.00 GB", "651.85 GB", "1234573"],
    "status": [str(HEAD), str(HEAD - 6), "DIFFERENT", str(FIRST + 8)],
}
"""Numbers and words that must be whole, however narrow the terminal is."""


def digest(version: int) -> StateDigest:
    return StateDigest(version * 7919 + 1, version + 5)


def refs(name: str, count: int, nbytes: int) -> tuple[PayloadRef, ...]:
    return tuple(PayloadRef(hashlib.sha256(f"{name} {i}".encode()).hexdigest(), nbytes) for i in range(count))


def make_big_feed(path: str) -> None:
    """The newest versions of a long run with a very large model, without their payloads."""
    store = LocalStore(path)
    for version in range(FIRST, HEAD + 1):
        manifest = Manifest(
            kind="delta",
            version=version,
            layout_sha256="ab" * 32,
            digest=digest(version),
            elements=ELEMENTS,
            writer="0123456789abcdef",
            created_unix_s=1_790_000_000 + 7 * version,
            changed=CHANGED,
            parent=version - 1,
            parent_digest=digest(version - 1),
            step=98_765_432 + version,
            payloads=refs(f"delta {version}", 1, 12_345_678_901),
            extra={"reward": "0.71"},
        )
        store.put(keys.version_key(version), manifest.to_bytes())
        if version == FIRST + 12:
            payloads = refs("anchor", 66, 9_876_543_210)
            anchor = replace(manifest, kind="anchor", changed=None, parent=None, parent_digest=None, payloads=payloads)
            store.put(keys.anchor_key(version), anchor.to_bytes())
    store.put(keys.FLOOR, FloorRecord(FIRST + 8).to_bytes())
    for i in range(5):
        version = HEAD - 3 * i
        facts = {
            "engine": "vllm 0.32.1+cu130",
            "digest": digest(version if i != 2 else 1).hex,
            "proved_version": str(version),
            "proved_unix_s": "1790000000",
            **{f"{phase}_s": "123.4567" for phase in ("plan", "fetch", "decode", "stage", "commit", "pause")},
        }
        replica = f"rollout-worker-pool-eu-west-4b-{i}-gpu-node-{1000 + i}-77182-a1b2c{i}"
        Log(store).beat(Heartbeat(replica, version, 1, facts))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """`big`, a feed with large numbers; `small` and `pruned`, real ones; checkpoints `c0` and `c1`, their `delta`."""
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    make_big_feed("big")
    tensors = state() | {name: np.arange(500, dtype=np.uint16) for name in NAMES}
    write_sharded(tmp_path / "c0", tensors)
    write_sharded(tmp_path / "c1", changed(tensors))
    deltasync.publish("small", "c0")
    deltasync.publish("pruned", "c0")
    deltasync.publish("pruned", "c1", anchor=True)
    deltasync.pin("pruned", 1, name="newest")
    (tmp_path / "delta").write_bytes(deltasync.diff("c0", "c1"))
    (tmp_path / "run").mkdir()
    capsys.readouterr()
    return tmp_path


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, Callable[[], str]]]:
    """A pseudo-terminal: the end that a program writes to, and a function that closes it and returns what it got."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    received: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                received.append(data)
        except OSError:
            # Linux reports the end of a terminal this way.
            return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()

    def finish() -> str:
        os.close(theirs)
        reader.join(LONG_S)
        return b"".join(received).decode().replace("\r\n", "\n")

    try:
        yield theirs, finish
    finally:
        os.close(ours)


def shown(columns: int, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command in this process whose stdout is a terminal."""
    with terminal(columns) as (theirs, finish), pytest.MonkeyPatch.context() as patch:
        with os.fdopen(os.dup(theirs), "w") as stdout:
            patch.setattr(sys, "stdout", stdout)
            patch.setattr(sys, "__stdout__", stdout)
            code = cli.main(arguments)
        return code, finish()


def test_every_command_is_in_the_table() -> None:
    (subparsers,) = [action for action in build_parser()._actions if isinstance(action.choices, dict)]
    assert set(subparsers.choices or ()) - {"serve", "ui", "completion"} == COMMANDS.keys()


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_terminal_is_wide_enough(place: Path, capsys: Out, command: str, columns: int) -> None:
    expected, arguments = COMMANDS[command]
    code, text = shown(columns, command, *arguments)
    assert code == expected, capsys.readouterr().err
    lines = ANSI.sub("", text).splitlines()
    assert lines
    # A key or a path in a sentence is never cut: it can be copied, and has a line of its own.
    assert [line for line in lines if text_width(line) > columns and " " in line.strip()] == []
    joined = " ".join(" ".join(lines).split())
    assert [part for part in WHOLE.get(command, ()) if part not in joined] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_pipe_gets_plain_text(place: Path, capsys: Out, command: str) -> None:
    expected, arguments = COMMANDS[command]
    assert cli.main([command, *arguments]) == expected
    out = capsys.readouterr().out
    assert out
    assert out.isascii()
    assert "\x1b" not in out
    assert all(part in out for part in ([str(12_345_678_901), str(9_876_543_210 * 66)] if command == "log" else []))


@pytest.mark.parametrize("command", ["log", "show", "status", "prune"])
def test_plain_in_a_terminal_is_as_in_a_pipe(place: Path, capsys: Out, command: str) -> None:
    _, arguments = COMMANDS[command]
    cli.main([command, *arguments])
    piped = capsys.readouterr().out
    found = shown(80, command, *arguments, "--plain")[1]
    # The age of a heartbeat grows.
    assert re.sub(r"\t[0-9]+\tlive", "", found) == re.sub(r"\t[0-9]+\tlive", "", piped)


def test_plain_tables_can_be_cut_by_tabs(place: Path, capsys: Out) -> None:
    assert cli.main(["log", "big"]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("# 20 of 1,234,585 versions; ")
    names = header.split("\t")
    cells = [dict(zip(names, row.split("\t"), strict=True)) for row in rows]
    assert [cell["version"] for cell in cells] == [str(v) for v in range(HEAD - 19, HEAD + 1)]
    assert {cell["bytes"] for cell in cells} == {"12345678901"}
    assert {cell["changed"] for cell in cells} == {"4012345678"}
    assert {float(cell["share"]) for cell in cells} == {round(100 * CHANGED / ELEMENTS, 6)}


@pytest.mark.parametrize("command", COMMANDS)
def test_json_everywhere(place: Path, capsys: Out, command: str) -> None:
    expected, arguments = COMMANDS[command]
    code, text = shown(80, command, *arguments, "--json")
    assert code == expected
    assert isinstance(json.loads(text), dict)
    assert "\x1b" not in text
    err = capsys.readouterr().err
    for line in err.splitlines():
        assert json.loads(line).keys() <= {"error", "log"}
    assert ('{"error"' in err) == (code != 0)


def test_a_process_in_a_terminal(place: Path) -> None:
    """The same through the real program, with progress on the same terminal."""
    with terminal(80) as (theirs, finish):
        command = [sys.executable, "-m", "deltasync", "log", "big"]
        done = processes.run(command, stdout=theirs, stderr=theirs)
        text = finish()
    assert done.returncode == 0
    assert "\x1b[1mversion" in text, "the header is bold"
    assert "\x1b[2m" in text, "pruned versions are dimmed"
    assert "(step, changed, digest, writer: in a wider terminal, with --plain or --json)" in text.replace("\n", " ")
    assert max(text_width(line) for line in ANSI.sub("", text).splitlines()) <= 80


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours(place: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert "\x1b" not in shown(80, "status", "big")[1]


def test_columns_are_left_out_by_rank_and_numbers_never_cut() -> None:
    columns = [Column("name", is_name=True), Column("a"), Column("b", rank=1), Column("c", rank=2)]
    cells = [["x" * 60, "1234567890", "1234567890", "1234567890"]]
    assert fitted_widths(columns, cells, 200) == {0: 60, 1: 10, 2: 10, 3: 10}
    assert fitted_widths(columns, cells, 80) == {0: 44, 1: 10, 2: 10, 3: 10}
    assert fitted_widths(columns, cells, 60) == {0: 24, 1: 10, 2: 10, 3: 10}
    assert fitted_widths(columns, cells, 59) == {0: 35, 1: 10, 2: 10}
    assert fitted_widths(columns, cells, 40) == {0: 28, 1: 10}
    assert fitted_widths(columns, cells, 20) == {0: 8, 1: 10}
    assert fitted_widths(columns, cells, 10) == {0: 8, 1: 10}, "a number is never cut, even if the line is too long"


@pytest.mark.parametrize(
    ("text", "columns", "expected"),
    [
        ("abcdefghij", 10, "abcdefghij"),
        ("abcdefghijk", 10, "abcdef..jk"),
        ("漢字漢字漢字", 8, "漢字..字"),
        ("abc", 2, "."),
        ("abc", 0, ""),
    ],
)
def test_shortened(text: str, columns: int, expected: str) -> None:
    assert shortened(text, columns) == expected
    assert text_width(shortened(text, columns)) <= columns


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, "0 ms"),
        (0.00042, "0.42 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (2.345, "2.35 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (192, "3 min 12 s"),
        (3600, "1 h"),
        (18_600, "5 h 10 min"),
        (187_200, "2 d 4 h"),
        (float("inf"), "-"),
    ],
)
def test_duration_text(seconds: float, expected: str) -> None:
    assert duration_text(seconds) == expected


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [
        (0, 5, "-"),
        (5, 0, "-"),
        (2, 3, "1.5 times smaller"),
        (1, 218, "218 times smaller"),
        (1, 4321, "4,321 times smaller"),
    ],
)
def test_ratio_text(part: int, whole: int, expected: str) -> None:
    assert ratio_text(part, whole) == expected


def test_alarming_rows_are_red_on_a_terminal(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = Output.of(is_json=False, is_plain=False, is_quiet=False)
    out.table("t", (Column("a"),), [("good",), ("bad",)], alarming=[1])
    good, bad = (text for text in capsys.readouterr().out.splitlines() if "good" in text or "bad" in text)
    assert "\x1b[31m" in bad
    assert "\x1b[31m" not in good


@pytest.mark.parametrize(
    ("versions", "expected"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7, 9, 10], "0, 2-3, 7, 9-10")]
)
def test_ranges_text(versions: list[int], expected: str) -> None:
    assert ranges_text(versions) == expected


@pytest.mark.parametrize(
    ("unix_s", "expected"),
    [(0, "1970-01-01 00:00:00"), (1_700_000_000, "2023-11-14 22:13:20"), (2**63 - 1, str(2**63 - 1))],
)
def test_time_text(unix_s: int, expected: str) -> None:
    assert time_text(unix_s) == expected


def test_bars_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    with Output.of(is_json=False, is_plain=False, is_quiet=False).bars() as progress:
        assert progress is None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Output.of(is_json=False, is_plain=False, is_quiet=True).bars() as progress:
        assert progress is None
    with Output.of(is_json=False, is_plain=False, is_quiet=False).bars() as progress:
        assert progress is not None
        progress("encode", 1, 2)
        progress("encode", 2, 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_234_567, "1.23 MB"), (5 * 10**15, "5000.00 TB")],
)
def test_size_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text
