"""Metrics as Prometheus reads them, and the listener that serves them beside the status."""

import http.client
import json
import socket
import sys
from dataclasses import fields

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.feeds import Feed
from support.replicas import TorchTarget, follower

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Counts, Seconds, Status
from deltasync.replica.metrics import FollowerCollector, exposition, listening, parse_address, register

Samples = dict[tuple[str, str], float]


def samples(text: bytes) -> Samples:
    """Values by name and phase."""
    families = text_string_to_metric_families(text.decode())
    return {(s.name, s.labels.get("phase", "")): s.value for family in families for s in family.samples}


def test_the_metrics_of_a_follower() -> None:
    feed = Feed.of(3)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        metrics = exposition(replica.status)
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
    status = Status("r", 3, 5, 2, 3, None, False, True, None, "StoreError: away", counts)
    found = samples(exposition(lambda: status)())
    totals = [value for (name, _), value in found.items() if name.endswith("_total")]
    assert sorted(totals) == [10 + i for i in range(len(fields(Counts)))]
    assert found["deltasync_repaired_elements_total", ""] == counts.repaired
    assert found["deltasync_failing", ""] == found["deltasync_following", ""] == 1
    assert found["deltasync_lag", ""] == 2


def test_damage_is_counted() -> None:
    feed = Feed.of(2)
    target = TorchTarget(feed.states[0].layout)
    with follower(feed.store, target) as replica:
        replica.advance()
        target.state["embed"].view(-1)[3] += 1
        replica.scrub()
        found = samples(exposition(replica.status)())
    assert found["deltasync_damaged_elements_total", ""] == found["deltasync_repaired_elements_total", ""] == 1


def test_the_registry_of_the_process() -> None:
    status = Status("r", 3, 5, 2, 3, None, False, True, None, None)
    forget = register(lambda: status)
    try:
        assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") == 3
    finally:
        forget()
    assert prometheus_client.REGISTRY.get_sample_value("deltasync_version") is None


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    status = Status("r", None, None, None, None, None, False, False, None, None)
    with pytest.raises(InvalidInputError, match="prometheus-client") as caught:
        exposition(lambda: status)
    assert caught.value.hint == "pip install 'deltasync[metrics]'"
    with pytest.raises(ImportError):
        register(lambda: status)
    assert FollowerCollector(lambda: status)


LISTENED = Status("r", 3, 5, 2, 3, None, False, True, None, None)


def ask(address: str, method: str, path: str, token: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request(method, path, headers={} if token is None else {"Authorization": f"Bearer {token}"})
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
    metrics = exposition(lambda: LISTENED)
    with listening(lambda: LISTENED, host, 0, token="t", metrics=metrics) as url:
        address = url.removeprefix("http://")
        code, content = ask(address, "GET", "/status", "t")
        assert (code, json.loads(content)["version"]) == (200, 3)
        assert ask(address, "GET", "/status")[0] == ask(address, "GET", "/status", "other")[0] == 401
        assert ask(address, "POST", "/status")[0] == 401
        assert ask(address, "POST", "/status", "t")[0] == ask(address, "GET", "/", "t")[0] == 404
        assert samples(ask(address, "GET", "/metrics")[1])["deltasync_version", ""] == 3
    with pytest.raises(OSError):
        ask(address, "GET", "/status", "t")


def test_a_listener_without_a_token_and_without_metrics() -> None:
    with listening(lambda: LISTENED, "127.0.0.1", 0) as url:
        address = url.removeprefix("http://")
        assert ask(address, "GET", "/status")[0] == 200
        assert ask(address, "GET", "/metrics")[0] == 404


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
