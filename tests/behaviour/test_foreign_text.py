"""Text of a feed never reaches a terminal or a log raw: escape codes and forged lines are planted in every field."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.feeds import Feed
from support.helpers import mutated, resealed, sha256

from deltasync.cli import main as cli
from deltasync.errors import CorruptError, DeltasyncError, StoreError, printable
from deltasync.format import keys
from deltasync.format.companions import KIND, write_files
from deltasync.format.layout import DTYPES, TensorSpec
from deltasync.format.safetensors import header_bytes
from deltasync.format.sealed import FORMAT, FloorRecord, Heartbeat, LeaseRecord, sealed
from deltasync.store.local import LocalStore

EVIL = "evil\x1b[2J\x1b]0;title\x07\r\nFORGED line\x9b31m\tFORGED cell\u202e\x00\x7f\u2028end"
"""Escape codes, line ends of every kind, a bell, a tab, a text that runs from right to left."""

COMMANDS = [
    ("log", "feed"),
    ("log", "feed", "--all"),
    ("show", "feed", "0"),
    ("show", "feed", "1"),
    ("status", "feed"),
    ("verify", "feed"),
    ("verify", "feed", "--deep"),
    ("prune", "feed", "--keep-anchors", "1", "--keep-versions", "1"),
    ("prune", "feed", "--keep-anchors", "1", "--keep-versions", "1", "--yes"),
    ("restore", "feed", "-o", "out"),
    ("restore", "feed", "-o", "out2", "--dry-run"),
    ("restore", "feed", "-o", "out0", "--version", "0"),
    ("follow", "feed", "--target", "live", "--once"),
    ("publish", "feed", "nowhere"),
]


def require_printable(where: str, text: str) -> None:
    for line in text.split("\n"):
        # Plain tables have tabs between their cells.
        for cell in line.split("\t"):
            assert cell.isprintable(), f"{where}: {line!r}"
            assert not cell.strip().startswith("FORGED"), f"{where}: {line!r}"


def run_all(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    """The output of every command on `feed` in this folder, and on each of its payloads."""
    payloads = sorted(str(path) for path in Path("feed/payloads").glob("*.safetensors"))
    shown = ""
    for command in [*COMMANDS, *(("inspect", path) for path in payloads), *(("inspect", p, "--all") for p in payloads)]:
        with caplog.at_level(logging.DEBUG, logger="deltasync"):
            cli.main(command)
        out, err = capsys.readouterr()
        require_printable(f"{command}: stdout", out)
        require_printable(f"{command}: stderr", err)
        shown += out + err
    for record in caplog.records:
        if record.name.startswith("deltasync"):
            assert record.getMessage().isprintable(), record.getMessage()
            assert record.exc_info is None, "a traceback in a log has several lines"
            shown += record.getMessage()
    return shown


def manifest(**fields: Any) -> Callable[[Feed], None]:
    """Other fields in the manifest of the newest version."""

    def plant(feed: Feed) -> None:
        key = keys.version_key(len(feed.states) - 1)
        feed.store.put(key, resealed(feed.store.get(key), fields))

    return plant


def record(key: str, data: bytes) -> Callable[[Feed], None]:
    return lambda feed: feed.store.put(key, data)


def heartbeat(**fields: Any) -> Callable[[Feed], None]:
    data = Heartbeat("a", 1, 0, {"engine": EVIL, "digest": EVIL, "fetch_s": EVIL, EVIL: EVIL}).to_bytes()
    return record(keys.replica_key("a"), resealed(data, fields))


def payload(change: Callable[[Any], object]) -> Callable[[Feed], None]:
    """Another payload of the newest version, as an attacker would write it."""

    def plant(feed: Feed) -> None:
        head = feed.log.read(len(feed.states) - 1)
        data = mutated(feed.store.get(feed.payload_keys(head)[0]), change)
        feed.store.put(keys.payload_key(sha256(data)), data)
        manifest(payloads=[{"sha256": sha256(data), "bytes": len(data)}])(feed)

    return plant


def files(paths: list[str]) -> Callable[[Feed], None]:
    def plant(feed: Feed) -> None:
        specs = [TensorSpec(path, DTYPES["U8"], (0,)) for path in paths]
        data = header_bytes(specs, {"format": FORMAT, "kind": KIND})
        feed.store.put(keys.payload_key(sha256(data)), data)
        manifest(files={"sha256": sha256(data), "bytes": len(data)})(feed)

    return plant


def base(feed: Feed) -> None:
    """Version 0 as a base with a name that no folder has."""
    fields = {"kind": "base", "base": {"checkpoint": EVIL, "revision": EVIL}, "payloads": []}
    feed.store.put(keys.version_key(0), resealed(feed.store.get(keys.version_key(0)), fields))


PLANTED: dict[str, Callable[[Feed], object]] = {
    "writer": manifest(writer=EVIL),
    "extra": manifest(extra={EVIL: EVIL, "a": EVIL}),
    "unknown field": manifest(**{EVIL: EVIL}),
    "must_understand": manifest(must_understand=[EVIL]),
    "format": manifest(format=EVIL),
    "kind": manifest(kind=EVIL),
    "step": manifest(step=EVIL),
    "digest": manifest(digest=EVIL),
    "layout_sha256": manifest(layout_sha256=EVIL),
    "payload sha256": manifest(payloads=[{"sha256": EVIL, "bytes": 1}]),
    "base of another kind": manifest(base={"checkpoint": EVIL, "revision": EVIL}),
    "base of another form": manifest(base={EVIL: EVIL}),
    "base": base,
    "not JSON": record(keys.version_key(1), EVIL.encode()),
    "a number": record(keys.version_key(1), b'{"a": 1.5e1\x1b}'),
    "a key twice": record(keys.version_key(1), json.dumps({"a": 1}).encode()[:-1] + b', "\\u001b": 1, "\\u001b": 2}'),
    "late anchor": record(keys.anchor_key(1), sealed({"format": EVIL})),
    "skip": record(keys.skip_key(0, 2), sealed({"format": FORMAT, "kind": EVIL})),
    "feed record": record(keys.FEED, sealed({"format": FORMAT, "feed": EVIL, "created_unix_s": EVIL})),
    "floor": record(keys.FLOOR, resealed(FloorRecord(0).to_bytes(), {"version": EVIL})),
    "lease": record(keys.LEASE, LeaseRecord(EVIL, 2**60).to_bytes()),
    "facts": heartbeat(),
    "replica": heartbeat(replica=EVIL),
    "heartbeat version": heartbeat(version=EVIL),
    "heartbeat format": heartbeat(format=EVIL),
    "payload format": payload(lambda p: p.metadata.update(format=EVIL)),
    "payload kind": payload(lambda p: p.metadata.update(kind=EVIL)),
    "payload version": payload(lambda p: p.metadata.update(version=EVIL)),
    "payload digest": payload(lambda p: p.metadata.update(digest=EVIL)),
    "payload layout": payload(lambda p: p.metadata.update(layout_sha256=EVIL)),
    "codec": payload(lambda p: p.index["blocks"][0].update(codec=EVIL)),
    "block sha256": payload(lambda p: p.index["blocks"][0].update(sha256=EVIL)),
    "tensor name": payload(lambda p: p.index["layout"][0].__setitem__(0, EVIL)),
    "tensor type": payload(lambda p: p.index["layout"][0].__setitem__(1, EVIL)),
    "index is not zlib": payload(lambda p: setattr(p, "index_bytes", EVIL.encode())),
    "path of a file": files([EVIL]),
    "path of a program": files(["x.py", "y" * 100 + ".bin", "z.pt", "w.pkl"]),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_planted_text_is_shown_escaped(
    plant: Callable[[Feed], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    feed = Feed.of(2, LocalStore("feed"))
    plant(feed)
    run_all(capsys, caplog)


def test_tensor_names_are_shown_escaped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    feed = Feed(LocalStore("feed"))
    feed.anchor({EVIL: np.arange(300, dtype=np.float32), "[red]b[/red]": np.arange(9, dtype=np.float32)})
    feed.delta()
    shown = run_all(capsys, caplog)
    assert printable(EVIL)[:8] in shown
    assert "[red]b" in shown, "markup is text"


@pytest.mark.parametrize("text", ["", "plain", "naïve 漢字", EVIL, "a\tb", "\ud800"])
def test_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()
    assert printable(shown) == shown


@pytest.mark.parametrize(
    "error",
    [
        CorruptError(EVIL, hint=EVIL, rule="a.b", key=EVIL),
        StoreError(EVIL, transient=False, hint=EVIL),
        DeltasyncError("x").at(EVIL),
    ],
)
def test_errors_are_printable(error: DeltasyncError) -> None:
    assert str(error).isprintable()
    assert error.message.isprintable()
    assert all(str(argument).isprintable() for argument in error.args)


def test_an_unexpected_error_is_printable(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError(EVIL)

    assert cli.guarded(fail) == 1
    require_printable("stderr", capsys.readouterr().err)


def test_the_feed_that_nothing_is_planted_in(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The commands work: otherwise the tests above would look at nothing."""
    monkeypatch.chdir(tmp_path)
    feed = Feed.of(2, LocalStore("feed"))
    ref = feed.upload.put(write_files({"config.json": b"{}"}))
    manifest(files=ref.to_json(), writer="somebody", extra={"reward": "0.7"})(feed)
    shown = run_all(capsys, caplog)
    for text in ("somebody", "reward", "0.7", "2 versions", "version 1 is live", "embed"):
        assert text in shown
