"""Each role works with the rights that docs/operations.md gives it, and is refused everything else.

The policies are made from the table of that page, and a real S3 server enforces them.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import LONG_S, processes
from support.feeds import publish, publisher
from support.helpers import changed, state, write_sharded
from support.replicas import wait_until
from support.servers import Server, role_environment, seaweed

from deltasync.cli import main as cli
from deltasync.errors import StoreError
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.store import open_store
from deltasync.trainer.schedule import AnchorPolicy
from deltasync.upkeep.prune import Retention

pytestmark = pytest.mark.e2e

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
BUCKET = "feeds"
PLACES = (
    keys.FEED, keys.FLOOR, keys.COPY, keys.VERSIONS, keys.ANCHORS, keys.SKIPS, keys.PAYLOADS, keys.REPLICAS, keys.PINS,
    keys.PROBES,
)  # fmt: skip
SOURCE, COPY = "source", "copy"


@dataclass(frozen=True, slots=True)
class Rights:
    """Keys and prefixes of a feed that a role may put and delete. It may read all."""

    put: tuple[str, ...]
    delete: tuple[str, ...]

    def statements(self, prefix: str) -> list[dict[str, Any]]:
        """As the page has them for a replica."""
        arn = f"arn:aws:s3:::{BUCKET}"

        def allow(action: str, places: tuple[str, ...]) -> dict[str, Any]:
            resources = [f"{arn}/{prefix}/{place}{'*' if place.endswith('/') else ''}" for place in places]
            return {
                "Effect": "Allow",
                "Action": f"s3:{action}",
                "Resource": resources[0] if len(resources) == 1 else resources,
            }

        listing = {"Effect": "Allow", "Action": "s3:ListBucket", "Resource": arn}
        found = [
            {**listing, "Condition": {"StringLike": {"s3:prefix": [f"{prefix}/*"]}}},
            {"Effect": "Allow", "Action": "s3:GetObject", "Resource": f"{arn}/{prefix}/*"},
        ]
        if self.put:
            found.append(allow("PutObject", self.put))
        if self.delete:
            found.append(allow("DeleteObject", self.delete))
        return found


def table() -> dict[str, Rights]:
    """The rows of the page by the words that their role begins with."""
    text = PAGE[PAGE.index("| role | read, list |") :]
    found = {}
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        role, reads, puts, deletes = (cell.strip() for cell in line.strip("|").split("|"))
        assert reads == "all"
        found[role] = Rights(tuple(re.findall(r"`([^`]+)`", puts)), tuple(re.findall(r"`([^`]+)`", deletes)))
        assert set(found[role].put + found[role].delete) <= set(PLACES), role
    return found


ROLES = table()
NAMES = {
    "replica": "replica",
    "reader": next(role for role in ROLES if role.startswith("replica without heartbeats")),
    "publisher": "publisher",
    "retaining": "publisher with `retention`",
    "pruner": "pruner",
    "compactor": "compactor",
    "relay-source": next(role for role in ROLES if role.startswith("relay, at the source")),
    "relay-copy": "relay, at the destination",
    "operator": "operator who pins",
}


def policy(*statements: dict[str, Any]) -> dict[str, Any]:
    return {"Version": "2012-10-17", "Statement": list(statements)}


def policies() -> dict[str, Any]:
    """One for each role; a relay has those of its two ends."""
    made = {name: policy(*ROLES[role].statements(SOURCE)) for name, role in NAMES.items() if "relay" not in name}
    ends = (("relay-source", SOURCE), ("relay-copy", COPY))
    made["relay"] = policy(*(each for name, prefix in ends for each in ROLES[NAMES[name]].statements(prefix)))
    return made


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with seaweed(BUCKET, policies()) as server:
        yield server


class Site:
    """Two feeds in the store, not created yet, and commands that run with the account of a role."""

    def __init__(self, server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.copy = server.url(SOURCE), server.url(COPY)
        self._server = server
        self._patch = monkeypatch
        self._folder = folder
        # Of an earlier test on this server, in whatever order they run.
        self.be(None)
        for url in (self.source, self.copy):
            with open_store(url) as store:
                for item in list(store.list()):
                    store.delete(item.key)

    def be(self, role: str | None) -> None:
        """Use the account of a role from now on; None for the account that may do all."""
        given = self._server.environment if role is None else role_environment(self._server, role)
        for name, value in given.items():
            self._patch.setenv(name, value)

    def run(self, role: str, *argv: str) -> None:
        self.be(role)
        assert cli.main(argv) == 0, f"{role}: {argv}"

    def refused(self, role: str, url: str, rights: Rights) -> None:
        """Everything outside the rights is refused, and what is inside is not."""
        self.be(role)
        with open_store(url) as store:
            for place in PLACES:
                key = f"{place}stray" if place.endswith("/") else place
                for verb, allowed in (("put", rights.put), ("delete", rights.delete)):
                    if place in allowed:
                        continue
                    with pytest.raises(StoreError) as caught:
                        store.put(key, b"stray") if verb == "put" else store.delete(key)
                    assert not caught.value.transient, f"{role} may {verb} {key}"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    tensors, folders = state(), []
    for number in range(10):
        folders.append(tmp_path_factory.mktemp("checkpoints") / f"c{number}")
        write_sharded(folders[-1], tensors)
        tensors = changed(tensors, seed=number)
    return folders


def test_the_policy_of_the_page_is_that_of_a_replica() -> None:
    shown = json.loads(PAGE[PAGE.index("```json") + 7 : PAGE.index("```\n", PAGE.index("```json") + 7)])
    assert shown == json.loads(json.dumps(policy(*ROLES["replica"].statements("PREFIX"))).replace(BUCKET, "BUCKET"))


def test_every_role_with_its_own_rights(
    s3: Server, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(s3, tmp_path, monkeypatch)
    for number, folder in enumerate(checkpoints):
        site.run("publisher", "publish", site.source, str(folder), *(["--anchor"] if number == 7 else []))
    site.run("reader", "verify", site.source, "--deep")
    site.run("reader", "log", site.source)
    site.run("reader", "status", site.source)
    site.run("reader", "restore", site.source, "-o", str(tmp_path / "restored"))
    site.run("compactor", "compact", site.source)
    site.run("relay", "relay", site.source, site.copy, "--heartbeats", "--skips")
    site.run("operator", "pin", site.source, "9", "--name", "best")
    site.run("operator", "unpin", site.source, "best")
    site.run("operator", "pin", site.source, "2", "--name", "early")
    site.be(None)
    with open_store(site.source) as store:
        # That of the relay would keep what it needs.
        for item in list(store.list(keys.REPLICAS)):
            store.delete(item.key)
    site.run("pruner", "prune", site.source, "--keep-anchors", "1", "--keep-versions", "1", "--yes")

    site.be("replica")
    command = ["follow", site.source, "--target", "live", "--mirror", "mirror", "--replica", "here", "--json"]
    argv = [sys.executable, "-m", "deltasync", *command]
    with processes.running(argv, cwd=tmp_path, stdout=subprocess.PIPE, env=dict(os.environ)) as process:
        assert json.loads(process.stdout.readline())["version"] == 9
        with open_store(site.source) as store:
            wait_until(lambda: [beat.replica for beat in Log(store).heartbeats()] == ["here"])
            process.send_signal(signal.SIGTERM)
            assert process.wait(LONG_S) == 0
            assert Log(store).heartbeats() == [], "it has deleted its heartbeat"

    site.be("retaining")
    with open_store(site.source) as store:
        trainer = publisher(
            store,
            anchors=AnchorPolicy(bytes_ratio=None, versions=2),
            retention=Retention(anchors=1, versions=1, every_s=0.2),
            wait=True,
        )
        for number in range(6):
            publish(trainer, number).wait(LONG_S)
        wait_until(lambda: Log(store).floor() > 9)
        trainer.close()
    for url in (site.source, site.copy):
        site.be(None)
        assert cli.main(["verify", url, "--deep"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_what_a_role_is_refused(s3: Server, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(s3, tmp_path, monkeypatch)
    role, url = (
        ("relay", site.copy if name == "relay-copy" else site.source) if "relay" in name else (name, site.source)
    )
    site.refused(role, url, ROLES[NAMES[name]])


def test_a_replica_without_the_right_to_write_heartbeats_still_follows(
    s3: Server, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(s3, tmp_path, monkeypatch)
    site.run("publisher", "publish", site.source, str(checkpoints[0]))
    site.run("reader", "follow", site.source, "--target", str(tmp_path / "live"), "--once")
    assert (tmp_path / "live").exists()
