"""The little HTTP server beside a follower."""

import http.client
import json
import socket
from typing import Any

import pytest
from feeds import Feed
from replicas import LONG_S, Moves, TorchTarget, follower, following

from deltasync.errors import InvalidInputError
from deltasync.following import loop
from deltasync.serve.listening import Listener, listening, parse_address
from deltasync.serve.metrics import Exposition


def ask(url: str, method: str, path: str, *, token: str | None = None, body: bytes | None = None) -> tuple[int, Any]:
    """Status, and the content: JSON if it is that."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LONG_S)
    try:
        headers = {} if token is None else {"Authorization": token}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        is_json = answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content
    finally:
        connection.close()


def test_a_nudge_wakes_a_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    # It never looks by itself while the test runs.
    monkeypatch.setattr(loop, "_POLL_FIRST_S", 10 * LONG_S)
    monkeypatch.setattr(loop, "_POLL_MOST_S", 10 * LONG_S)
    feed, moves = Feed.of(2), Moves()
    target = TorchTarget(feed.states[0].layout)
    replica = follower(feed.store, observer=moves)
    listener = Listener(replica.nudge, lambda: {"version": replica.status().version}, Exposition(replica.status))
    with replica, following(replica, target), listening(listener, "127.0.0.1", 0) as url:
        moves.await_version(1)
        feed.delta()
        assert ask(url, "POST", "/nudge", body=b"x" * 1000) == (202, {})
        moves.await_version(2)
        assert ask(url, "GET", "/status?a=1") == (200, {"version": 2})
        status, text = ask(url, "GET", "/metrics")
        assert status == 200
        assert b"\ndeltasync_version 2.0\n" in text


@pytest.mark.parametrize(
    ("method", "path", "token", "has_metrics", "status"),
    [
        ("POST", "/nudge", "Bearer right", True, 202),
        ("POST", "/nudge", "Bearer wrong", True, 401),
        ("POST", "/nudge", "right", True, 401),
        ("POST", "/nudge", "Bearer schlüssel", True, 401),
        ("POST", "/nudge", None, True, 401),
        ("GET", "/nudge", "Bearer right", True, 404),
        ("GET", "/nudge", None, True, 401),
        ("GET", "/status", "Bearer right", True, 200),
        ("GET", "/status", None, True, 401),
        ("GET", "/anything", None, True, 401),
        ("GET", "/anything", "Bearer right", True, 404),
        ("GET", "/metrics", None, True, 200),
        ("GET", "/metrics", None, False, 401),
        ("GET", "/metrics", "Bearer right", False, 404),
        ("DELETE", "/status", "Bearer right", True, 501),
    ],
)
def test_who_may_ask_what(method: str, path: str, token: str | None, has_metrics: bool, status: int) -> None:
    nudges: list[int] = []
    with follower(Feed.of(1).store) as replica:
        metrics = Exposition(replica.status) if has_metrics else None
        listener = Listener(lambda: nudges.append(1), dict, metrics, "right")
        with listening(listener, "127.0.0.1", 0) as url:
            found, content = ask(url, method, path, token=token)
    assert found == status
    assert nudges == [1] * (status == 202)
    if status == 401:
        assert content == {"error": {"kind": "unauthorized"}}


def test_a_caller_without_a_request_holds_up_nobody() -> None:
    with listening(Listener(lambda: None, dict), "127.0.0.1", 0) as url:
        host, port = parse_address(url.removeprefix("http://"))
        with socket.create_connection((host, port), LONG_S):
            assert ask(url, "GET", "/status") == (200, {})


def test_a_port_that_is_taken() -> None:
    listener = Listener(lambda: None, dict)
    with listening(listener, "127.0.0.1", 0) as url:
        port = parse_address(url.removeprefix("http://"))[1]
        with (
            pytest.raises(InvalidInputError, match=f"cannot listen on 127.0.0.1 port {port}: ") as caught,
            listening(listener, "127.0.0.1", port),
        ):
            pass
    assert caught.value.hint is not None


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    with listening(Listener(lambda: None, dict), "::1", 0) as url:
        assert url.startswith("http://[::1]:")
        assert ask(url, "GET", "/status") == (200, {})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("localhost:80", ("localhost", 80)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:8080", ("::1", 8080)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        *((wrong, None) for wrong in ("", "8080", ":8080", "host", "host:", "host:x", "host:65536", "host:-1")),
        *((wrong, None) for wrong in ("me@host:80", "host:80/path", "host:80?a", "http://host:80", "::1:80")),
    ],
)
def test_addresses(text: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert parse_address(text) == found
        return
    with pytest.raises(ValueError):
        parse_address(text)
