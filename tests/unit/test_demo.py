"""The demo in examples/demo: events and what follows from them, the screen, the report, the projection, settings."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from demo.board import Board
from demo.charts import chart, smooth, ticks
from demo.projection import bytes_text, project, seconds_text
from demo.report import ActOutcome, Outcome, facts, facts_text, projection_lines, report_html, to_json
from demo.run import main, prepare, require_equal
from demo.screen import Lines, Terminal, columns, game_text, progress_text, recovery_text, row_cells, total_text
from demo.settings import REAL, WORDLE, Settings
from rich.console import Console

from deltasync import InvalidInputError, MismatchError, Verification
from deltasync.torch import Publisher

DIGEST = "0" * 31 + "1"
OTHER_DIGEST = "0" * 31 + "2"
SETTINGS = Settings("feeds", "out", real_steps=2, steps=3)

Events = list[tuple[str, dict[str, Any]]]


def published(step: int | None, version: int, **fields: Any) -> dict[str, Any]:
    event = {"kind": "delta", "changed": 100, "elements": 1000, "payload_bytes": 80, "held_s": 0.002}
    return {"event": "published", "step": step, "version": version, **event, **fields}


def stepped(step: int, **fields: Any) -> dict[str, Any]:
    return {"event": "stepped", "step": step, "reward": 0.1 * step, "step_s": 1.0, **fields}


def played(step: int) -> dict[str, Any]:
    return stepped(step, solved=0.2, age=1, wait_s=0.5)


def moved(version: int, **fields: Any) -> dict[str, Any]:
    return {"event": "moved", "version": version, "edges": ["delta"], "nbytes": 80, "pause_s": 0.001, **fields}


def add(board: Board, events: Events, *, now_s: float) -> None:
    for name, fields in events:
        board.add(name, fields, now_s=now_s)


def wordle_board() -> Board:
    """Three steps, one of them without a version of its own; a replica that was killed; one that is behind."""
    board = Board(SETTINGS.acts[1])
    events: Events = [
        ("trainer", {"event": "warmed", "step": 80, "steps": 80, "loss": 1.0}),
        ("trainer", {"event": "ready", "weights": 1000, "full_bytes": 2000, "reward": 0.1, "solved": 0.2}),
        ("trainer", published(0, 0, kind="anchor", changed=None, payload_bytes=1500)),
        ("replica-1", {"event": "following"}),
        ("replica-1", moved(0)),
        ("replica-2", moved(0)),
        ("trainer", published(1, 1)),
        ("trainer", published(1, 1, kind="anchor", payload_bytes=1300)),
        ("trainer", played(1)),
        ("replica-1", moved(1, pause_s=0.004)),
        ("trainer", played(2)),
    ]
    add(board, events, now_s=10.0)
    board.kill("replica-2", now_s=20.0)
    events = [
        ("trainer", published(3, 2)),
        ("trainer", published(3, 2, kind="anchor", payload_bytes=1400)),
        ("trainer", played(3)),
    ]
    add(board, events, now_s=21.0)
    board.add("replica-2", {"event": "following"}, now_s=23.0)
    board.add("replica-2", moved(2, edges=["delta", "delta"], nbytes=160), now_s=23.5)
    game = {
        "answer": "crane",
        "before": [["eerie", "..y.g"], ["zzzzz", "xxxxx"]],
        "after": [["crane", "ggggg"]],
        "is_better": True,
    }
    trained = {"event": "trained", "version": 2, "digest": DIGEST, "reward": 0.5, "solved": 0.6, "game": game}
    board.add("trainer", trained, now_s=30.0)
    for name in board.act.replicas:
        board.add(name, {"event": "final", "version": 2, "digest": DIGEST}, now_s=31.0)
    return board


def real_board() -> Board:
    """Two steps in which 0.5 % of the weights change, with 8 bits for each."""
    board = Board(SETTINGS.acts[0])
    events: Events = [
        ("trainer", {"event": "ready", "weights": 10**6, "full_bytes": 2 * 10**6}),
        ("trainer", published(0, 0, kind="anchor", changed=None, payload_bytes=1_400_000)),
        ("replica-1", moved(0)),
        ("replica-1", {"event": "answered", "version": 0, "text": "Blue,\nin the sky."}),
    ]
    for step in (1, 2):
        events += [
            ("trainer", published(step, step, changed=5000, elements=10**6, payload_bytes=5000)),
            ("trainer", stepped(step)),
            ("replica-1", moved(step)),
        ]
    events += [
        ("trainer", {"event": "trained", "version": 2, "digest": DIGEST}),
        ("replica-1", {"event": "final", "version": 2, "digest": DIGEST}),
    ]
    add(board, events, now_s=10.0)
    return board


def outcome() -> Outcome:
    clean = Verification(2, True, (0, 1, 2), (), (), (), (), 0, 0)
    return Outcome(SETTINGS, (ActOutcome(real_board(), clean), ActOutcome(wordle_board(), clean)), 40.0)


# --- settings and events ----------------------------------------------------------------------------------------------


def test_acts() -> None:
    real, wordle = Settings("s3://bucket/demo/", "out").acts
    assert (real.name, real.feed, real.replicas) == (REAL, "s3://bucket/demo/smollm2", ("replica-1",))
    assert (wordle.name, wordle.feed, wordle.replicas) == (
        WORDLE,
        "s3://bucket/demo/wordle",
        ("replica-1", "replica-2"),
    )
    assert [act.name for act in replace(SETTINGS, real_steps=0).acts] == [WORDLE]
    assert [act.name for act in replace(SETTINGS, steps=0).acts] == [REAL]
    assert Settings.from_json(SETTINGS.to_json()) == SETTINGS


def test_board() -> None:
    board = wordle_board()
    assert [row.version for row in board.rows] == [0, 1, None, 2]
    assert [row.lags for row in board.rows[1:]] == [
        {"replica-1": 1, "replica-2": 1},
        {"replica-1": 0, "replica-2": 1},
        {"replica-1": 1, "replica-2": None},  # dead
    ]
    assert board.rows[1].pauses_s == {"replica-1": 0.004}
    assert (board.sent_bytes, board.delta_bytes, board.copies_bytes) == (1500 + 80 + 80 + 1300 + 1400, 160, 3 * 2000)
    assert (board.density, board.bits) == (0.1, 6.4)


def test_recovery_has_start_up_and_catch_up() -> None:
    board = wordle_board()
    found = board.recovery
    assert found is not None
    assert (found.replica, found.at_step, found.had, found.back, found.back_at_step) == ("replica-2", 2, 0, 2, 3)
    assert (found.start_up_s, found.catch_up_s) == (3.0, 0.5)
    assert [row.events for row in board.rows] == [[], [], ["kill -9 replica-2"], ["replica-2 is back"]]
    assert recovery_text(board).splitlines() == [
        "replica-2: kill -9 at step 2, version 0; back with 2",
        "start-up 3.0 s, catch-up 0.50 s (2 deltas, 160 B)",
    ]


def test_time_left() -> None:
    board = Board(replace(SETTINGS, steps=10).acts[1])
    assert board.left_s is None
    add(board, [("trainer", {"event": "ready", "weights": 10, "full_bytes": 20, "reward": 0, "solved": 0})], now_s=0)
    add(board, [("trainer", played(step)) for step in (1, 2, 3, 4)], now_s=0)
    assert board.left_s == pytest.approx(6 * 1.5)
    assert progress_text(board) == "10 weights, step 4 of 10, about 9 s left"


# --- the screen -------------------------------------------------------------------------------------------------------


def test_totals_name_the_deltas_and_everything() -> None:
    assert total_text(real_board()).splitlines() == [
        "2 steps: sent 10.0 kB instead of 4.00 MB, 400 times less",
        "with all anchors: sent 1.41 MB instead of 6.00 MB, 4.3 times less",
    ]


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Lines().show(wordle_board())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Act two: a small policy learns Wordle, and one replica is killed"
    assert lines[2] == (
        "step 1, reward 0.100, changed 10.00%, sent 80 B, ratio 25.0, held 2.0 ms, pause 4.0 ms, behind 1 1"
    )
    assert lines[3].startswith("step 2, reward 0.200, changed -, sent -,")
    assert lines[4].startswith("step 3, reward 0.300")
    assert lines[4].endswith("behind 1 -")
    assert lines[5].startswith("replica-2: kill -9 at step 2")


def test_every_line_fits_80_columns() -> None:
    console = Console(width=80, force_terminal=True, record=True)
    for board in (real_board(), wordle_board()):
        # Numbers as wide as they get.
        for row in board.rows[1:]:
            row.step, row.held_s, row.nbytes = row.step + 100, 1.2345, 123_400_000
        terminal = Terminal()
        terminal.show(board)
        console.print(terminal._live.renderable)
        for row in board.rows:
            assert len(row_cells(board, row)) == len(columns())
    shown = console.export_text()
    assert "kill -9 replica-2" in shown
    assert "…" not in shown
    texts = [shown, *(facts_text(act) for act in outcome().acts), "\n".join(projection_lines(outcome()))]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 80


def test_game() -> None:
    board = wordle_board()
    assert game_text(board, color=False).plain.splitlines() == [
        "one Wordle (lost before and won after), the answer is crane",
        "before          after",
        "E.E.RyI.Eg      CgRgAgNgEg      ",
        "ZxZxZxZxZx                      ",
    ]
    assert " C  R  A  N  E " in game_text(board, color=True).plain
    assert game_text(real_board(), color=True).plain == ""


# --- the report -------------------------------------------------------------------------------------------------------


def test_facts() -> None:
    real, wordle = (dict(facts(act)) for act in outcome().acts)
    assert real["changed"] == "0.50% of 1,000,000 weights in a step, 8.0 bits each (medians)"
    assert real["replica"] == "generated 1 answers meanwhile"
    assert not real.keys() & {"before", "after", "killed", "age"}
    assert wordle["before"].startswith("mean reward 0.100, 20% of the games solved, after a warm-up")
    assert wordle["after"].startswith("mean reward 0.500")
    assert wordle["verify --deep"] == "clean, 3 versions decoded"


def test_json() -> None:
    found = to_json(outcome())
    assert found["acts"]["wordle"]["recovery"]["catch_up_s"] == 0.5
    assert found["acts"]["smollm2"]["density"] == 0.005
    assert [each["model"] for each in found["projection"]] == ["8B", "70B", "405B"]


def test_report_loads_nothing_else() -> None:
    html = report_html(outcome())
    assert html.count('<svg class="chart"') == 12
    assert html.count("<svg") == html.count("</svg>")
    assert not re.search(r"(src|href)=|https?://|url\(|@import|<script", html)
    assert DIGEST in html
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="viewport"' in html
    assert "400 times less" in html
    assert "kill -9 replica-2" in html


def test_report_of_one_act() -> None:
    whole = outcome()
    html = report_html(replace(whole, acts=whole.acts[1:]))
    assert "Projection" not in html
    assert projection_lines(replace(whole, acts=whole.acts[1:])) == []


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (0, 72, [0, 20, 40, 60, 80]),
        (0, 0.35, [0, 0.1, 0.2, 0.3, 0.4]),
        (0, 2420, [0, 500, 1000, 1500, 2000, 2500]),
        (-0.3, 0.9, [-0.5, 0, 0.5, 1]),
        (0, 0, [0, 0.2]),
        (3, 3, [3, 4]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, wanted: list[float]) -> None:
    found = ticks(low, high)
    assert found == pytest.approx(wanted)
    assert found[0] <= low
    assert found[-1] >= high


def test_chart() -> None:
    svg = chart({"a<b": [(0, 0), (10, 4)]}, x_title="step", y_title="kB")
    points = re.search(r'points="([^"]*)"', svg)
    assert points is not None
    assert points[1] == "64.0,204.0 624.0,30.0"
    assert ">step</text>" in svg
    assert ">kB</text>" in svg
    assert "legend" not in svg
    assert "a&lt;b" in chart({"a<b": [(0, 0), (1, 1)], "c": [(0, 1), (1, 1)]}, x_title="", y_title="")
    assert chart({"none": [(1, None)]}, x_title="", y_title="") == "<p>Nothing was measured.</p>"


def test_chart_has_gaps_and_marks() -> None:
    points = [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, None), (5, 1.0), (6, 1.0)]
    svg = chart({"lag": points}, x_title="step", y_title="versions", marks={1.0: "kill -9"}, band=(1.0, 3.0))
    assert (svg.count("<polyline"), svg.count("<circle")) == (2, 1)
    assert "kill -9" in svg
    assert 'class="band"' in svg


def test_smooth() -> None:
    assert smooth([(i, float(i == 4)) for i in range(9)], over=9)[4] == (4, pytest.approx(1 / 9))


# --- the projection ---------------------------------------------------------------------------------------------------


def test_projection() -> None:
    small, _, large = project(density=0.005, bits=8.0)
    assert (small.model, small.copy_bytes, small.copy_s) == ("8B", 16e9, 128.0)
    assert (small.step_bytes, small.step_s) == (pytest.approx(40e6), pytest.approx(0.32))
    assert large.step_s == pytest.approx(16.2)


@pytest.mark.parametrize(
    ("nbytes", "wanted"),
    [
        (80, "80 B"),
        (5000, "5.00 kB"),
        (999_600, "1.00 MB"),
        (12_345_678, "12.3 MB"),
        (179e6, "179 MB"),
        (810e9, "810 GB"),
    ],
)
def test_bytes_text(nbytes: float, wanted: str) -> None:
    assert bytes_text(nbytes) == wanted


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [(0.22, "0.22 s"), (9.96, "10 s"), (59.7, "1 min 0 s"), (1120, "18 min 40 s"), (6480, "1 h 48 min")],
)
def test_seconds_text(seconds: float, wanted: str) -> None:
    assert seconds_text(seconds) == wanted


# --- errors -----------------------------------------------------------------------------------------------------------


def test_different_digests_are_an_error() -> None:
    board = wordle_board()
    require_equal(board)
    board.digests["replica-2"] = OTHER_DIGEST
    with pytest.raises(MismatchError, match=r"replica-2 has the digest 0+2, the trainer has 0+1"):
        require_equal(board)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"model": "nowhere"}, "nowhere has no config.json"),
        ({"store": "memory://run"}, "is in the memory of one process"),
        ({"store": "ftp://host/feed"}, "ftp:// is not a kind of store"),
        ({"out": "used"}, "used already exists"),
        ({"out": "used/file"}, "used/file already exists"),
        ({"store": "old"}, "there is already a feed in old/wordle"),
        ({"steps": 0}, "both acts have 0 steps"),
    ],
)
def test_wrong_settings_are_refused_before_any_process_starts(
    fields: dict[str, Any], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    if fields.get("store") == "old":
        with Publisher("old/wordle") as publisher:
            publisher.publish({"weight": torch.zeros(4)})
    with pytest.raises(InvalidInputError, match=re.escape(wanted)) as refused:
        prepare(replace(Settings("feeds", "new", real_steps=0), **fields))
    assert refused.value.hint
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments", [("--lr", "0"), ("--lr", "nan"), ("--steps", "-1"), ("--replicas", "x"), ("--seed", "-1")]
)
def test_wrong_usage(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[1] in capsys.readouterr().err
