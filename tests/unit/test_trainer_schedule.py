"""When a version gets an anchor: by policy, on request, and again after a failure."""

import pytest
from support import LONG_S
from support.feeds import HARD, Notes, Outage, begun, publish, publisher, require_steps

from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.trainer.publisher import FeedPublisher
from deltasync.trainer.schedule import AnchorPolicy

pytestmark = pytest.mark.usefixtures("no_pauses")


def late_anchors(store: Store) -> list[int]:
    return Log(store).anchors()


POLICIES: dict[str, tuple[AnchorPolicy, list[int]]] = {
    "never": (AnchorPolicy(bytes_ratio=None), []),
    "by count": (AnchorPolicy(bytes_ratio=None, versions=3), [3, 6]),
    "always": (AnchorPolicy(bytes_ratio=None, versions=1), [1, 2, 3, 4, 5, 6, 7]),
    "by a ratio that every delta passes": (AnchorPolicy(bytes_ratio=1e-6), [1, 2, 3, 4, 5, 6, 7]),
    "by a ratio that nothing passes": (AnchorPolicy(bytes_ratio=1e6), []),
}


@pytest.mark.parametrize(("policy", "expected"), POLICIES.values(), ids=POLICIES.keys())
def test_anchors_come_when_they_are_due(policy: AnchorPolicy, expected: list[int]) -> None:
    notes = Notes()
    store, to = begun(anchors=policy, observer=notes)
    for number in range(1, 8):
        publish(to, number).wait(LONG_S)
        await_anchor(to)
    to.close()
    assert late_anchors(store) == expected
    assert [event.version for event in notes if event.kind == "anchor"] == [0, *expected]
    require_steps(store, {number: number for number in range(8)})


def await_anchor(to: FeedPublisher) -> None:
    """Without this the next version may come while the anchor of the last one is written, and goes without."""
    assert to._pipeline is not None
    to._pipeline._anchor_pool.submit(lambda: None).result(LONG_S)


def test_by_ratio_deltas_weigh_as_much_as_the_anchor() -> None:
    store, to = begun(anchors=AnchorPolicy(bytes_ratio=1.0))
    log = Log(store)
    number = 0
    while not late_anchors(store):
        number += 1
        publish(to, number).wait(LONG_S)
        await_anchor(to)
        assert number < 200
    to.close()
    anchor = log.read(0).nbytes
    sizes = [log.read(version).nbytes for version in range(1, number + 1)]
    assert sum(sizes) >= anchor > sum(sizes[:-1])


@pytest.mark.parametrize("version", [0, 1, 3])
def test_an_anchor_on_request(version: int) -> None:
    store = MemoryStore()
    to = publisher(store)
    for number in range(5):
        publish(to, number, anchor=number == version).wait(LONG_S)
    to.close()
    # Version 0 is an anchor itself.
    assert late_anchors(store) == ([version] if version else [])
    require_steps(store, {number: number for number in range(5)})


@pytest.mark.parametrize("versions", [None, 2], ids=["on request", "by count"])
def test_an_anchor_that_failed_comes_with_the_next_version(versions: int | None) -> None:
    outage = Outage(HARD, lambda operation: operation.key.startswith(keys.ANCHORS))
    store, to = begun(outage, anchors=AnchorPolicy(bytes_ratio=None, versions=versions))
    for number in (1, 2):
        publish(to, number, anchor=versions is None and number == 2).wait(LONG_S)
        await_anchor(to)
    outage.is_over = True
    assert late_anchors(store) == []
    for number in (3, 4, 5):
        publish(to, number).wait(LONG_S)
        await_anchor(to)
    to.close()
    # By count the next but one after it is due again.
    assert late_anchors(store) == ([3] if versions is None else [3, 5])
    require_steps(store, dict(enumerate(range(6))))
