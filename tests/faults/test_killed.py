"""kill -9 of a publisher at random points: nothing that was committed is lost, and the next one goes on."""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from known import head_of, nth, require_clean, require_exact
from running import publishing
from support import repeats, servers

from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.store import open_store

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

KILLS = repeats(15, soak=100)


@pytest.fixture(params=["file", "seaweed"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "file":
        yield (tmp_path / "feed").as_uri()
        return
    with servers.seaweed() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server.url("killed")


def test_killed_again_and_again(url: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    store = open_store(url)
    head, traces, left, pace_s = -1, 0, 0, 0.05
    with publishing(url, tmp_path / "output") as publisher:
        for _ in range(KILLS):
            pid = publisher.start()
            publisher.await_version(head + 1)
            began_s = time.monotonic()
            if rng.random() < 0.3:
                publisher.await_version(head + 2)
                pace_s = time.monotonic() - began_s
            # Any point of a publication, however fast the machine is at the moment.
            time.sleep(rng.uniform(0.0, 1.2) * pace_s)
            publisher.kill(pid)
            found = require_clean(store)
            assert found.restorable == tuple(range(head_of(store) + 1))
            assert head_of(store) >= publisher.committed() > head, "a committed version is gone"
            before, left = left, sum(1 for _ in store.list(keys.PROBES))
            traces += head_of(store) > publisher.committed() or found.orphans > 0 or left > before
            head = head_of(store)
    assert traces > 0, "no kill ever met a publication under way"
    require_exact(store, {version: nth(version) for version in range(head + 1)})
    assert [Log(store).read(version).step for version in range(head + 1)] == list(range(head + 1))
