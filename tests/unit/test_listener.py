"""A listener on an address: slow connections hold up nobody."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from support import LONG_S
from support.replicas import ask, wait_until

from deltasync import listener
from deltasync.listener import parse_address
from deltasync.observe import listening
from deltasync.replica.events import Status

LISTENED = Status("r", 3, 5, 2, 3, None, False, True, None, None)


def test_slow_connections_do_not_hold_up_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They send nothing, or a byte at a time, and need no token for that."""
    monkeypatch.setattr(listener, "_CONNECTION_S", 10 * LONG_S)
    monkeypatch.setattr(listener._Handler, "timeout", 10 * LONG_S)
    with ExitStack() as held:
        url = held.enter_context(listening(lambda: LISTENED, "127.0.0.1", 0, token="t"))
        address = url.removeprefix("http://")
        host, _, port = address.partition(":")
        before = threading.active_count()
        slow = []
        for number in range(4 * listener._CONNECTIONS_MAX):
            slow.append(held.enter_context(socket.create_connection((host, int(port)), timeout=LONG_S)))
            if number % 2:
                slow[-1].send(b"G")
            if number % 16 == 0:
                assert ask(address, "GET", "/status", "t")[0] == 200
        assert ask(address, "GET", "/status", "t")[0] == 200
        wait_until(lambda: threading.active_count() <= before + listener._CONNECTIONS_MAX)
        assert slow[0].recv(1) == b"", "the oldest ones are closed"


def test_a_connection_is_closed_in_time_however_busy_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_CONNECTION_S", 0.5)
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=LONG_S) as slow:
            since = time.monotonic()
            while time.monotonic() - since < LONG_S:
                try:
                    slow.send(b"G")
                except OSError:
                    break
                time.sleep(0.05)
            assert time.monotonic() - since < LONG_S


@pytest.mark.parametrize(
    ("text", "address"), [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:0", ("::1", 0)), ("name:8000", ("name", 8000))]
)
def test_an_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "80", "host", "host:", "host:x", "host:99999", "::1:80", "a@host:80", "host:80/x"]
)
def test_text_that_is_not_an_address(text: str) -> None:
    with pytest.raises(ValueError):
        parse_address(text)
