"""The metrics of a follower as Prometheus reads them, and why it is not ready."""

from dataclasses import fields, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.feeds import Feed
from support.replicas import TorchTarget, follower

from deltasync.format import keys
from deltasync.observe import exposition
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


LISTENED = Status("r", 3, 5, 2, 3, None, False, True, None, None)


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
