"""Every store of ours keeps every promise of the protocol."""

import secrets
from pathlib import Path

import pytest
from support import servers

from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.testing.conformance import StoreConformance


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "not" / "yet" / "there")


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return open_store("memory://")


@pytest.mark.e2e
class TestSeaweed(StoreConformance):
    @pytest.fixture
    def store(self, seaweed: servers.Server) -> Store:
        return open_store(seaweed.url(f"run.1/{secrets.token_hex(8)}"))


@pytest.mark.e2e
class TestSeaweedWholeBucket(StoreConformance):
    """Without a prefix, in a bucket of its own."""

    @pytest.fixture
    def store(self, seaweed: servers.Server) -> Store:
        store = open_store(f"s3://{seaweed.bucket}")
        for info in store.list():
            store.delete(info.key)
        return store


@pytest.mark.e2e
class TestAzurite(StoreConformance):
    @pytest.fixture
    def store(self, azurite: servers.Server) -> Store:
        return open_store(azurite.url(f"run.1/{secrets.token_hex(8)}"))
