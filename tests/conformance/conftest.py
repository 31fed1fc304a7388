"""Servers that run once for all tests, and an environment that knows nothing of the accounts of this machine."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import servers
from support.hub import Hub, hub


@pytest.fixture(autouse=True)
def _no_accounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    # No request for an account goes to the network.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="session")
def seaweed_server() -> Iterator[servers.Server]:
    with servers.seaweed() as server:
        yield server


@pytest.fixture(scope="session")
def azurite_server() -> Iterator[servers.Server]:
    with servers.azurite() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[servers.Server]:
    with servers.rclone() as server:
        yield server


@pytest.fixture
def seaweed(seaweed_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """With its environment set."""
    return _entered(seaweed_server, monkeypatch)


@pytest.fixture
def azurite(azurite_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """With its environment set."""
    return _entered(azurite_server, monkeypatch)


@pytest.fixture
def rclone(rclone_server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    """With its environment set."""
    return _entered(rclone_server, monkeypatch)


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with hub() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        # Read when the client was imported: a token that this machine has saved stays out of the tests.
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "no-token"))
        # The client waits at least a second between two tries.
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
        yield running


def _entered(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> servers.Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
