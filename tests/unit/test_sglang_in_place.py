"""Writing in place, from the target's side: what the server is asked, and when it loads the whole folder instead."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_run import FROM_DISK, IN_PLACE, Run, served, starting

from deltasync.cli import main as cli
from deltasync.errors import EngineError, InvalidInputError
from deltasync.sglang import loader
from deltasync.sglang.in_place import Answer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with starting(tmp_path) as begin:
        yield begin


@pytest.mark.parametrize("size", [1, 2])
def test_versions_are_written_in_place_in_every_worker(start: Callable[..., Run], size: int) -> None:
    run = start([served(rank=rank, size=size) for rank in range(size)])
    assert run.advance() == FROM_DISK
    run.require_bits()
    pointers = [p.data_ptr() for model in run.server.workers for p in model.parameters()]  # type: ignore[attr-defined]
    for version in range(1, 4):
        run.step(version)
        assert run.advance() == IN_PLACE
        run.require_bits()
        assert (run.target.version, run.server.weight_version) == (version, str(version))
        assert run.server.is_cache_flushed
    run.step(4)
    run.step(5)
    assert run.advance() == IN_PLACE, "several versions at once"
    run.require_bits()
    assert pointers == [p.data_ptr() for m in run.server.workers for p in m.parameters()]  # type: ignore[attr-defined]


def forgetful(run: Run) -> None:
    """The worker was started again, and the label was put back by hand."""
    loader._live.clear()


def elsewhere(run: Run) -> None:
    """SGLang has moved a parameter."""
    model = run.server.workers[0]
    model.norm.weight.data = model.norm.weight.data.clone()  # type: ignore[attr-defined]


def left_open(run: Run) -> None:
    """Another process died in the middle of a session."""
    assert run.server._session(is_open=True)[0] == 200


def updated(run: Run) -> None:
    """Something else has updated the weights of the server."""
    run.server.weight_version = "other"
    run.server.workers[0].norm.weight.data.zero_()  # type: ignore[attr-defined]


def started_otherwise(run: Run) -> None:
    """The server was started again, with more workers."""
    run.server.workers = [served(rank=rank, size=2) for rank in range(2)]
    run.server.restart()


@pytest.mark.parametrize("happens", [updated, started_otherwise])
def test_a_server_that_has_other_weights_loads_the_folder(
    start: Callable[..., Run], happens: Callable[[Run], None]
) -> None:
    run = start()
    run.advance()
    happens(run)
    run.step(1)
    assert run.advance() == FROM_DISK
    run.require_bits()
    run.step(2)
    assert run.advance() == IN_PLACE
    run.require_bits()


@pytest.mark.parametrize("happens", [forgetful, elsewhere])
def test_a_worker_that_cannot_write_loads_the_folder(
    start: Callable[..., Run], caplog: pytest.LogCaptureFixture, happens: Callable[[Run], None]
) -> None:
    run = start()
    run.advance()
    happens(run)
    run.step(1)
    assert run.advance() == [*IN_PLACE[:-2], *FROM_DISK[1:]]
    assert "it loads the whole folder now" in caplog.text
    run.require_bits()
    run.step(2)
    assert run.advance() == IN_PLACE
    run.require_bits()


def test_a_session_that_was_left_open_is_closed(start: Callable[..., Run]) -> None:
    run = start()
    run.advance()
    left_open(run)
    run.step(1)
    run.advance()
    run.require_bits()


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"custom_weight_loader": None}, "--custom-weight-loader deltasync.sglang.loader.load"),
        ({"custom_weight_loader": ["other.load"]}, "other.load"),
        ({"dp_size": 2}, "dp_size 2"),
        ({"speculative_algorithm": "EAGLE"}, "draft model"),
        ({"pp_size": None}, "how many workers"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_before_anything_is_asked(
    start: Callable[..., Run], tmp_path: Path, facts: dict[str, Any], message: str
) -> None:
    run = start()
    run.server.facts.update(facts)
    with pytest.raises(InvalidInputError) as error:
        run.follower.advance()
    assert message in str(error.value)
    assert run.server.calls == []
    assert not (tmp_path / "live").exists()


def test_a_worker_that_cannot_answer_is_reported(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Answer, path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    run = start()
    with monkeypatch.context() as patch:
        patch.setattr(Answer, "write", fail)
        with pytest.raises(EngineError, match="did not answer"):
            run.follower.advance()
    assert "Permission denied" in caplog.text
    assert run.server.paused is None
    assert run.advance() == FROM_DISK
    run.require_bits()


def test_the_command_writes_in_place(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start()
    command = ["follow", run.feed, "--target", str(tmp_path / "there"), "--once", "--sglang", run.server.url]
    assert cli.main([*command, "--only-changes"]) == 0
    assert [route for route, _ in run.server.calls] == FROM_DISK
    run.require_bits()
    assert cli.main([*command[:-2], "--only-changes"]) == 1
