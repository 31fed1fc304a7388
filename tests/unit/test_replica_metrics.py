"""Metrics as Prometheus reads them, and the listener that serves them beside the status."""

import http.client
import json
import socket
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import LONG_S
from support.feeds import Feed
from support.replicas import TorchTarget, follower, wait_until

from deltasync import listener
from deltasync.errors import InvalidInputError
from deltasync.format import keys
from deltasync.listener import parse_address
from deltasync.observe import exposition, listening, registered
from deltasync.replica.events import Counts, Seconds, Status, follower_metrics, no_version
from deltasync.replica.folder import HookStatus
from deltasync.testing.faulty import Fault, FaultyStore

Samples = dict[tuple[str, str], float]


def samples(text: bytes) -> Samples:
    """Values by name and phase."""
    families = text_string_to_metric_families(text.decode())
    return {(s.name, s.labels.get("phase", "")): s.value for family in families for s in family.samples}


def test_the_metrics_of_a_follower() -> None:
    feed = Feed.of(3)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        metrics = exposition(follower_metrics(replica.status))
        before = samples(metrics())
        first = replica.advance(to=1)
        second = replica.advance()
        feed.delta()
        replica.scrub()
        found = samples(metrics())
    assert first is not None
    assert second is not None
    assert ("deltasync_version", "") not in before
    assert before["deltasync_moves_total", ""] == 0
    assert found["deltasync_version", ""] == found["deltasync_head", ""] == 2
    assert found["deltasync_lag", ""] == 0
    assert found["deltasync_failing", ""] == found["deltasync_following", ""] == 0
    assert found["deltasync_moves_total", ""] == 2
    assert found["deltasync_fetched_bytes_total", ""] == first.nbytes + second.nbytes > 0
    assert found["deltasync_scrubbed_elements_total", ""] == feed.states[0].layout.elements
    for field in fields(Seconds):
        assert found["deltasync_last_move_seconds", field.name] == getattr(second.seconds, field.name)


def test_every_count_has_a_metric() -> None:
    counts = Counts(**{field.name: 10 + i for i, field in enumerate(fields(Counts))})
    status = Status("r", 3, 5, 2, 3, None, False, True, None, "StoreError: away", counts, stale_s=4.5)
    found = samples(exposition(follower_metrics(lambda: status))())
    totals = [value for (name, phase), value in found.items() if name.endswith("_total") and not phase]
    assert sorted(totals) == [10 + i for i in range(len(fields(Counts)))]
    assert found["deltasync_repaired_elements_total", ""] == counts.repaired
    assert found["deltasync_failing", ""] == found["deltasync_following", ""] == 1
    assert found["deltasync_lag", ""] == 2
    assert found["deltasync_stale_seconds", ""] == 4.5


def test_damage_is_counted() -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        replica.advance()
        target.state["embed"].view(-1)[3] += 1
        replica.scrub()
        found = samples(exposition(follower_metrics(replica.status))())
    assert found["deltasync_damaged_elements_total", ""] == found["deltasync_repaired_elements_total", ""] == 1


def test_retries_are_counted(no_pauses: None) -> None:
    store = FaultyStore(Feed.of(3).store)
    with follower(store, TorchTarget(Feed.of(1).states[0].layout)) as replica:
        replica.advance(to=1)
        assert replica.status().counts.retries == 0
        failing = iter([Fault("refuse"), Fault("refuse")])
        store._plan = lambda operation: next(failing, None) if operation.key.startswith(keys.PAYLOADS) else None
        replica.advance()
        assert samples(exposition(follower_metrics(replica.status))())["deltasync_retries_total", ""] == 2


def test_the_registry_of_the_process() -> None:
    status = Status("r", 3, 5, 2, 3, None, False, True, None, None)
    forget = registered(follower_metrics(lambda: status))
    try:
        assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") == 3
    finally:
        forget()
    assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") is None


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status = Status("r", None, None, None, None, None, False, False, None, None)
    with pytest.raises(InvalidInputError, match="prometheus-client") as caught:
        exposition(follower_metrics(lambda: status))
    assert caught.value.hint == "pip install 'deltasync[metrics]'"
    with pytest.raises(ImportError):
        registered(follower_metrics(lambda: status))
    assert follower_metrics(lambda: status)


LISTENED = Status("r", 3, 5, 2, 3, None, False, True, None, None)


def ask(
    address: str, method: str, path: str, token: str | None = None, *, host: str | None = None
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=LONG_S)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        connection.request(method, path, headers=headers if host is None else {**headers, "Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_routes_of_a_listener(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this host has no IPv6")
    metrics = exposition(follower_metrics(lambda: LISTENED))
    with listening(lambda: LISTENED, host, 0, token="t", metrics=metrics) as url:
        address = url.removeprefix("http://")
        code, content = ask(address, "GET", "/status", "t")
        assert (code, json.loads(content)["version"]) == (200, 3)
        assert ask(address, "GET", "/status")[0] == ask(address, "GET", "/status", "other")[0] == 401
        assert ask(address, "POST", "/status")[0] == 401
        assert ask(address, "POST", "/status", "t")[0] == ask(address, "GET", "/", "t")[0] == 404
        assert samples(ask(address, "GET", "/metrics")[1])["deltasync_version", ""] == 3
        assert ask(address, "GET", "/healthz")[0] == ask(address, "GET", "/readyz")[0] == 200
        assert ask(address, "POST", "/healthz", "t")[0] == ask(address, "POST", "/readyz", "t")[0] == 404
    with pytest.raises(OSError):
        ask(address, "GET", "/status", "t")


def test_a_listener_without_a_token_and_without_metrics() -> None:
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://")
        assert ask(address, "GET", "/status")[0] == 200
        code, content = ask(address, "GET", "/metrics")
        assert (code, b"deltasync[metrics]" in content) == (404, True)


def test_the_status_is_not_for_pages_of_other_hosts() -> None:
    """A page can have its own name lead to 127.0.0.1: a browser then lets it read the answers. It has no token."""
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://")
        assert ask(address, "GET", "/status", host="page.example")[0] == 403
        assert ask(address, "GET", "/status", host="localhost:9090")[0] == 200
        assert ask(address, "GET", "/healthz", host="page.example")[0] == 200
    with listening(lambda: LISTENED, "127.0.0.1", 0, token="t") as url:
        assert ask(url.removeprefix("http://"), "GET", "/status", "t", host="page.example")[0] == 200


def test_a_listener_says_whether_it_is_ready() -> None:
    """Why it is not ready may name the store: only those with the token learn it."""
    reasons: list[str | None] = ["s3://secret is away"]
    with listening(
        lambda: LISTENED, "127.0.0.1", 0, token="t", why_not_ready=lambda: reasons[-1], details=lambda: {"exec": 5}
    ) as url:
        address = url.removeprefix("http://")
        code, content = ask(address, "GET", "/readyz")
        assert (code, json.loads(content)) == (503, {"ready": False, "version": 3})
        found = json.loads(ask(address, "GET", "/status", "t")[1])
        assert (found["not_ready"], found["exec"], found["version"]) == ("s3://secret is away", 5, 3)
        assert ask(address, "GET", "/healthz")[0] == 200, "the process is well: a restart would not help"
        reasons.append(None)
        code, content = ask(address, "GET", "/readyz")
        assert (code, json.loads(content)) == (200, {"ready": True, "version": 3})


@pytest.mark.parametrize(
    ("fields", "ready_s", "reason"),
    [
        ({}, None, None),
        ({"version": None}, None, "no version is live yet"),
        ({"version": None, "error": "StoreError: away"}, None, "no version is live: StoreError: away"),
        ({"error": "StoreError: away"}, None, None),
        ({"stale_s": 5.0}, 10, None),
        ({"stale_s": 15.0}, 10, "version 3 was not known to be the newest for 15 s"),
        ({"stale_s": 15.0, "error": "E"}, 10, "version 3 was not known to be the newest for 15 s: E"),
        ({"stale_s": None}, 10, "version 3 was not known to be the newest"),
    ],
)
def test_why_it_is_not_ready(fields: dict[str, Any], ready_s: float | None, reason: str | None) -> None:
    assert no_version(lambda: replace(LISTENED, **fields), ready_s=ready_s) == reason


def test_the_metrics_of_a_command() -> None:
    hook = HookStatus()
    found = samples(exposition(follower_metrics(lambda: LISTENED, lambda: hook))())
    assert ("deltasync_exec_version", "") not in found
    assert found["deltasync_exec_failing", ""] == found["deltasync_exec_failures_total", ""] == 0
    hook = HookStatus(2, 3, 1, "failed", failures=4)
    found = samples(exposition(follower_metrics(lambda: LISTENED, lambda: hook))())
    assert found["deltasync_exec_version", ""] == 2
    assert (found["deltasync_exec_failing", ""], found["deltasync_exec_failures_total", ""]) == (1, 4)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(InvalidInputError, match="there is no token") as caught, listening(lambda: LISTENED, host, 0):
        pass
    assert "DELTASYNC_TOKEN" in (caught.value.hint or "")


def test_an_address_that_others_can_reach_with_a_token() -> None:
    with listening(lambda: LISTENED, "0.0.0.0", 0, token="t") as url:
        address = f"127.0.0.1:{url.rpartition(':')[2]}"
        assert ask(address, "GET", "/status")[0] == 401
        assert ask(address, "GET", "/status", "t")[0] == 200


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
