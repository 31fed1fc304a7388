"""The probe finds stores that ignore create-if-absent, and does not suspect those that only lost an answer."""

import secrets
from collections.abc import Container, Iterator
from pathlib import Path

import pytest
from support import servers
from support.servers import Proxy, proxied

from deltasync.errors import StoreError
from deltasync.store import open_store
from deltasync.store.fencing import PATIENCE_S, probe_fencing
from deltasync.store.local import LocalStore
from deltasync.store.memory import MemoryStore
from deltasync.store.patient import PatientStore
from deltasync.store.protocol import Capabilities, Data, Store


def probe(store: Store) -> bool:
    """As a writer asks, which gives a store some time."""
    return probe_fencing(PatientStore(store, PATIENCE_S))


class Ignoring(MemoryStore):
    """Takes the condition and overwrites."""

    def create(self, key: str, data: Data) -> bool:
        self.put(key, data)
        return True


class Lying(MemoryStore):
    """Keeps the first object, and answers both as if they had won."""

    def create(self, key: str, data: Data) -> bool:
        super().create(key, data)
        return True


class Lazy(MemoryStore):
    """Says that it refuses, and overwrites."""

    def create(self, key: str, data: Data) -> bool:
        won = super().create(key, data)
        self.put(key, data)
        return won


class Modest(MemoryStore):
    """Claims nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(create_if_absent=False)


class Losing(MemoryStore):
    """Does what it is asked, and then loses the answers in `lost`, by their number."""

    def __init__(self, lost: Container[int], *, to: str) -> None:
        super().__init__()
        self.lost, self.to, self.count = lost, to, -1

    def create(self, key: str, data: Data) -> bool:
        self.count += 1
        won = super().create(key, data)
        if self.count not in self.lost:
            return won
        if self.to == "itself":
            return super().create(key, data)
        raise StoreError("no answer", transient=self.to == "time")


def test_good_stores(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path)):
        assert probe(store) is True
        assert list(store.list()) == []


@pytest.mark.parametrize("store", [Ignoring(), Lying(), Lazy(), Modest()], ids=lambda store: type(store).__name__)
def test_bad_stores(store: MemoryStore) -> None:
    assert probe(store) is False
    assert list(store.list()) == []


@pytest.mark.parametrize("to", ["time", "itself"])
@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}, {0, 2}, {1, 2}])
def test_lost_answers_do_not_make_a_good_store_look_bad(lost: set[int], to: str) -> None:
    store = Losing(lost, to=to)
    assert probe(store) is True
    assert list(store.list()) == []


@pytest.mark.parametrize(("lost", "to"), [({0}, "error"), ({1}, "error"), (range(10**9), "time")])
def test_without_an_answer_there_is_no_verdict(lost: Container[int], to: str) -> None:
    store = Losing(lost, to=to)
    with pytest.raises(StoreError, match="no answer"):
        probe(store)
    assert list(store.list()) == []


@pytest.mark.e2e
def test_seaweed_fences(seaweed: servers.Server) -> None:
    store = open_store(seaweed.url(secrets.token_hex(8)))
    assert probe(store) is True
    assert list(store.list()) == []


@pytest.mark.e2e
def test_azurite_fences(azurite: servers.Server) -> None:
    assert probe(open_store(azurite.url(secrets.token_hex(8)))) is True


@pytest.mark.e2e
def test_rclone_does_not_fence(rclone: servers.Server) -> None:
    store = open_store(rclone.url(secrets.token_hex(8)))
    assert store.capabilities.create_if_absent
    assert probe(store) is False
    assert list(store.list()) == []


@pytest.fixture
def proxy(seaweed: servers.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with proxied(seaweed) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.mark.e2e
@pytest.mark.parametrize("lose", [["503"], ["", "503"], ["503", "", "503"], ["cut"], ["", "cut"]])
def test_seaweed_fences_behind_a_bad_line(seaweed: servers.Server, proxy: Proxy, lose: list[str]) -> None:
    proxy.lose = list(lose)
    assert probe(open_store(seaweed.url(secrets.token_hex(8)))) is True
    assert proxy.lose == []
