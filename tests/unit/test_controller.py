"""The controller of a server that is told: against the real routes, without vLLM."""

import json
import threading
from collections.abc import Iterator

import pytest
from control_servers import TOKEN, Controlled, ControlServer, control_server
from feeds import Feed
from replicas import LONG_S, Moves, TorchTarget, follower

from deltasync.errors import (
    DeltasyncError,
    EngineError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from deltasync.format import keys
from deltasync.serve.controller import Controller, Server
from deltasync.store.memory import MemoryStore


@pytest.fixture
def feed() -> Feed:
    return Feed.of(3)


@pytest.fixture
def target(feed: Feed) -> TorchTarget:
    return TorchTarget(feed.states[0].layout)


@pytest.fixture
def server(feed: Feed, target: TorchTarget) -> Iterator[ControlServer]:
    with follower(feed.store, beat_s=0.0, replica="led") as led, control_server(Controlled(led, target)) as running:
        yield running


def controller(feed: Feed, server: ControlServer, *, token: str | None = TOKEN, **options: object) -> Controller:
    return Controller(feed.store, Server(server.url, token=token), **options)  # type: ignore[arg-type]


def asked(server: ControlServer) -> list[int | None]:
    """The versions that the server was told since the last time."""
    found = [body["to"] for path, body in server.requests if path == "/deltasync/advance"]
    server.requests.clear()
    return found


def test_a_move_at_a_time(feed: Feed, target: TorchTarget, server: ControlServer) -> None:
    leading, moves = controller(feed, server), Moves()
    told = controller(feed, server, observer=moves)
    moved = leading.advance()
    assert moved is not None
    assert (moved.version, moved.from_version, moved.changed) == (2, None, None)
    assert moved.edges == ("anchor", "delta", "delta")
    assert moved.nbytes > 0
    assert moved.seconds.decode > 0
    assert target.holds(feed.states[2])
    assert leading.advance() is None
    feed.delta()
    feed.delta()
    after = told.advance()
    assert after is not None
    assert (after.version, after.from_version) == (4, 2)
    assert moves == [after]
    assert target.holds(feed.states[4])
    assert told.status() == {"server": server.url, "version": 4, "head": 4, "is_following": False, "error": None}


def test_following(feed: Feed, target: TorchTarget, server: ControlServer) -> None:
    moves = Moves()
    leading = controller(feed, server, observer=moves)
    thread = threading.Thread(target=leading.follow)
    thread.start()
    try:
        moves.await_version(2)
        server.faults += [(503, b"{}"), (200, b"<html>"), (500, b"oops")]
        feed.delta()
        leading.nudge()
        moves.await_version(3)
        assert leading.status()["is_following"]
    finally:
        leading.stop()
        thread.join(LONG_S)
    assert not thread.is_alive()
    assert target.holds(feed.states[3])
    assert leading.status()["error"] is None


def test_a_server_that_was_restarted_is_brought_back(feed: Feed, server: ControlServer) -> None:
    leading = controller(feed, server)
    assert leading.advance() is not None
    fresh = TorchTarget(feed.states[0].layout)
    with follower(feed.store) as again:
        server.controlled = Controlled(again, fresh)
        assert leading.advance() is not None
    assert fresh.holds(feed.states[2])


def test_a_pin_is_kept_and_a_pause_respected(feed: Feed, target: TorchTarget, server: ControlServer) -> None:
    assert server.controlled is not None
    led, leading = server.controlled.follower, controller(feed, server)
    led.pin(1)
    leading.advance()
    assert asked(server) == [1]
    assert target.holds(feed.states[1])
    led.pin(None)
    led.pause()
    assert leading.advance() is None
    assert asked(server) == []
    led.resume()
    leading.advance()
    assert asked(server) == [2]


def test_a_server_at_the_head_is_told_again_for_its_heartbeat(feed: Feed, server: ControlServer) -> None:
    now_s = [100.0]
    leading = controller(feed, server, beat_s=30.0, clock=lambda: now_s[0])
    leading.advance()
    leading.advance()
    assert asked(server) == [2]
    feed.store.delete(keys.replica_key("led"))
    now_s[0] += 31.0
    assert leading.advance() is None
    assert asked(server) == [2]
    assert [beat.replica for beat in feed.log.heartbeats()] == ["led"]


def _error(kind: str, **fields: str) -> bytes:
    return json.dumps({"error": {"kind": kind, "message": "it says why", **fields}}).encode()


@pytest.mark.parametrize(
    ("status", "content", "kind", "told"),
    [
        (401, b"{}", InvalidInputError, "refuses the token"),
        (404, b'{"detail": "Not Found"}', InvalidInputError, "no routes of deltasync"),
        (404, _error("not_found"), NotFoundError, "it says why (404)"),
        (409, _error("mismatch", rule="layout.equal"), MismatchError, "[layout.equal]"),
        (502, _error("store"), StoreError, "it says why (502)"),
        (503, _error("engine", hint="restart it"), EngineError, "(restart it)"),
        (400, _error("invalid_input"), EngineError, "it says why (400)"),
        (500, b"Internal Server Error", EngineError, "(500)"),
        (307, b"", EngineError, "(307)"),
        (200, b"<html>", EngineError, "not as deltasync does"),
        (200, b"[1]", EngineError, "not as deltasync does"),
    ],
)
def test_what_a_server_refuses(
    feed: Feed, server: ControlServer, status: int, content: bytes, kind: type[DeltasyncError], told: str
) -> None:
    server.faults.append((status, content))
    with pytest.raises(kind) as caught:
        controller(feed, server).advance()
    assert type(caught.value) is kind
    assert told in str(caught.value)
    assert server.url in str(caught.value)
    assert caught.value.hint is not None
    assert TOKEN not in str(caught.value)


def test_a_move_that_cannot_be_read(server: ControlServer) -> None:
    server.faults.append((200, b'{"version": 2, "moved": {"version": 2}}'))
    with pytest.raises(EngineError, match="not as deltasync does"):
        Server(server.url, token=TOKEN).advance(2)


@pytest.mark.parametrize(("token", "told"), [(None, "asks for a token"), ("wrong", "refuses the token")])
def test_the_token(feed: Feed, target: TorchTarget, server: ControlServer, token: str | None, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        controller(feed, server, token=token).follow()
    assert target.version is None


def test_a_server_that_follows_by_itself(feed: Feed, server: ControlServer) -> None:
    assert server.controlled is not None
    server.controlled.way = "pull"
    with pytest.raises(InvalidInputError, match="follows by itself"):
        controller(feed, server).follow()


def test_a_server_that_is_not_up_yet_is_waited_for(feed: Feed, target: TorchTarget, server: ControlServer) -> None:
    moves = Moves()
    up, server.controlled = server.controlled, None
    leading = controller(feed, server, observer=moves)
    thread = threading.Thread(target=leading.follow)
    thread.start()
    try:
        while leading.status()["error"] is None:
            thread.join(0.01)
            assert thread.is_alive()
        server.controlled = up
        moves.await_version(2)
    finally:
        leading.stop()
        thread.join(LONG_S)


def test_nobody_there(feed: Feed, server: ControlServer) -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:1 cannot be reached: .*refused"):
        Controller(feed.store, Server("http://127.0.0.1:1", token=None)).advance()
    with pytest.raises(NotFoundError, match="there is no version"):
        Controller(MemoryStore(), Server(server.url, token=TOKEN)).advance()


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://me:pw@host", "http://h/?a=1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidInputError, match="not the URL of a server"):
        Server(url, token=None)


@pytest.mark.parametrize("token", ["a\nb", "schlüssel"])
def test_tokens_that_http_cannot_carry(token: str) -> None:
    with pytest.raises(InvalidInputError, match="cannot carry") as caught:
        Server("http://host", token=token)
    assert token not in str(caught.value)


def test_a_server_under_a_path(feed: Feed, server: ControlServer) -> None:
    with pytest.raises(InvalidInputError, match="no routes"):
        Controller(feed.store, Server(f"{server.url}/behind/", token=TOKEN)).advance()
    assert server.requests == [("/behind/deltasync/status", None)]
