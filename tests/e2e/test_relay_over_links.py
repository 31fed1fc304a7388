"""A relay to a real S3 server over a link with a rate: order, kills, bytes, and a link that is ten times too slow."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import LONG_S, join, processes, repeats
from support.servers import Server, seaweed

from deltasync import AnchorPolicy, PublisherOptions, open_store, verify
from deltasync.feed.log import Log
from deltasync.format import keys
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.weights import Weights
from deltasync.store.protocol import Store
from deltasync.trainer.capture import WeightsSource
from deltasync.trainer.publisher import FeedPublisher

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.long]

ELEMENTS = 1 << 20
HOT = 1 << 17
"""Elements that change repeatedly, as they do in training: each step changes about half of them."""

REQUEST_BYTES = 2500
"""What a request has beside its content, generously: signed headers."""

_CHUNK_BYTES = 2048

NEVER = AnchorPolicy(bytes_ratio=None, versions=None)


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with seaweed() as server:
        yield server


@pytest.fixture(autouse=True)
def environment(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)


class SlowLink:
    """Passes connections on to an endpoint. Bytes to the server pass at `bytes_per_s`, those back at once.

    `sent_bytes` counts what has passed to the server, headers of requests included.
    """

    def __init__(self, endpoint: str, bytes_per_s: float | None = None) -> None:
        address = urllib.parse.urlsplit(endpoint)
        self._server = (address.hostname or "", address.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.bytes_per_s = bytes_per_s
        self.sent_bytes = 0
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When the link has passed on everything that was given to it so far."""
        self._stopped = threading.Event()

    def run(self) -> None:
        """Accept connections until `stop`."""
        while not self._stopped.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=LONG_S)
            except OSError:
                client.close()
                continue
            for source, sink, is_slow in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass, args=(source, sink, is_slow), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _pass(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK_BYTES if is_slow else 1 << 16):
                if is_slow:
                    self._wait(len(data))
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        source.close()

    def _wait(self, nbytes: int) -> None:
        with self._lock:
            self.sent_bytes += nbytes
            now_s = time.monotonic()
            rate = self.bytes_per_s
            self._free_s = max(self._free_s, now_s) + (0.0 if rate is None else nbytes / rate)
            wait_s = self._free_s - now_s
        self._stopped.wait(wait_s)


@contextmanager
def slow_link(endpoint: str, bytes_per_s: float | None = None) -> Iterator[SlowLink]:
    """A link to an endpoint for as long as the block runs."""
    link = SlowLink(endpoint, bytes_per_s)
    thread = threading.Thread(target=link.run, daemon=True)
    thread.start()
    try:
        yield link
    finally:
        link.stop()
        join(thread)


class Training:
    """Publishes steps of weights that are known by their number."""

    def __init__(self, store: Store) -> None:
        self.publisher = FeedPublisher(store, PublisherOptions(anchors=NEVER, wait=True))
        self._rng = np.random.default_rng(0)
        layout = Layout((TensorSpec("layers.0.weight", DTYPES["BF16"], (ELEMENTS // 1024, 1024)),))
        bits = self._rng.integers(0x3C00, 0x3F80, ELEMENTS).astype(np.uint16)
        self._hot = np.sort(self._rng.choice(ELEMENTS, HOT, replace=False))
        self._weights = Weights(layout, (bits,))

    def step(self) -> int:
        """The version of the next step."""
        bits = self._weights.arrays[0].copy()
        bits[self._hot] ^= self._rng.integers(0, 2, HOT).astype(np.uint16)
        self._weights = Weights(self._weights.layout, (bits,))
        return self.publisher.publish(WeightsSource(self._weights)).wait(LONG_S).version


class Command:
    """A command as a process, with another endpoint if asked for. Its lines of JSON are collected."""

    def __init__(self, folder: Path, *argv: str, link: SlowLink | None = None) -> None:
        self._output = folder / "relayed.jsonl"
        self._argv = [sys.executable, "-m", "deltasync", *argv, "--json"]
        self._environment = {**os.environ, "DELTASYNC_THREADS": "1"}
        if link is not None:
            self._environment["AWS_ENDPOINT_URL"] = link.endpoint
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._output.open("ab") as output:
            self.process = processes.start(self._argv, env=self._environment, stdout=output)

    def end(self, number: int) -> int:
        assert self.process is not None
        assert self.process.poll() is None, "it has ended by itself"
        self.process.send_signal(number)
        return self.process.wait(LONG_S)

    @property
    def lines(self) -> list[dict[str, Any]]:
        # The last line of a process that was killed may be cut.
        return [json.loads(line) for line in self._output.read_text().splitlines() if line.endswith("}")]


@contextmanager
def started(command: Command) -> Iterator[Command]:
    command.start()
    try:
        yield command
    finally:
        assert command.process is not None
        processes.kill(command.process)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} takes too long"
        time.sleep(0.2)


def head_of(store: Store) -> int:
    head = Log(store).head()
    return -1 if head is None else head.version


def stored_bytes(store: Store, *prefixes: str) -> int:
    return sum(item.nbytes for prefix in prefixes for item in store.list(prefix))


def require_equal(source: Store, copy: Store) -> None:
    """Both are clean when everything is decoded, have the same newest version, and what both restore has one digest."""
    ours, theirs = verify(source, deep=True), verify(copy, deep=True)
    assert ours.is_clean, ours.damages
    assert theirs.is_clean, theirs.damages
    assert ours.restorable[-1] == theirs.restorable[-1]
    assert set(theirs.restorable) <= set(ours.restorable)
    for item in source.list(keys.VERSIONS):
        assert copy.get(item.key) == source.get(item.key)


@pytest.mark.parametrize("seed", range(repeats(1, soak=3)))
def test_every_version_over_a_link_with_kills(s3: Server, seed: int, tmp_path: Path) -> None:
    """Killed at any moment, it goes on: in order, without sending a payload twice that was there."""
    rng = random.Random(seed)
    urls = [s3.url(f"kills-{seed}-{name}") for name in ("source", "copy")]
    with open_store(urls[0]) as source, open_store(urls[1]) as copy:
        training = Training(source)
        for _ in range(16):
            last = training.step()
        training.publisher.close()
        wanted = stored_bytes(source, keys.PAYLOADS)
        largest = max(item.nbytes for item in source.list(keys.PAYLOADS))
        # All of it takes about ten seconds.
        with slow_link(s3.endpoint, wanted / 10) as link:
            command = Command(tmp_path, "relay", *urls, "--follow", "--every", link=link)
            kills, head = 0, -1
            while kills < 8 and head < last:
                with started(command):
                    time.sleep(rng.uniform(1.5, 4.0))
                    command.end(signal.SIGKILL)
                kills += 1
                assert head_of(copy) >= head, "the copy never goes back"
                head = head_of(copy)
                if head >= 0:
                    checked = verify(copy)
                    assert checked.is_clean, (checked.damages, checked.lost)
                    # The link may still pass on what was sent before the kill, so that the head moves meanwhile.
                    assert checked.restorable == tuple(range(len(checked.restorable))), "nothing is left out"
                    assert head < len(checked.restorable) <= head_of(copy) + 1, "in order"
            with started(command):
                wait_until(lambda: head_of(copy) == last, "the rest of the copy")
                assert command.end(signal.SIGTERM) == 0
            sent = link.sent_bytes
        require_equal(source, copy)
        copied = stored_bytes(copy, keys.PAYLOADS)
        assert copied == wanted
        manifests = stored_bytes(copy, keys.VERSIONS, keys.ANCHORS)
        requests = 60 * (kills + 1) + 8 * (last + 1)
        # A kill may cost the payload that was on its way.
        assert wanted + manifests < sent < wanted + manifests + (kills + 1) * largest + requests * REQUEST_BYTES
        versions = [line["version"] for line in command.lines if "version" in line]
        assert versions == sorted(versions)
        print(
            f"seed {seed}: {last + 1} versions, {kills} kills; {wanted:,} bytes of payloads and {manifests:,} of "
            f"manifests at the source, {sent:,} sent over the link, requests included"
        )


def test_a_link_that_is_ten_times_too_slow(s3: Server, tmp_path: Path) -> None:
    """With a compactor at the source the copy gets skips, stays near the head, and takes a part of the bytes."""
    urls = [s3.url(f"slow-{name}") for name in ("source", "copy")]
    steps, pause_s = repeats(60, soak=400), 0.25
    with open_store(urls[0]) as source, open_store(urls[1]) as copy, slow_link(s3.endpoint) as link:
        training = Training(source)
        training.step()
        training.step()
        (tmp_path / "compactor").mkdir()
        relay = Command(tmp_path, "relay", *urls, "--follow", link=link)
        compactor = Command(tmp_path / "compactor", "compact", urls[0], "--follow")
        with started(relay), started(compactor):
            wait_until(lambda: head_of(copy) == 1, "the first anchor, over a fast link")
            began_bytes, began_s = link.sent_bytes, time.monotonic()
            step_bytes = Log(source).read(1).nbytes
            lags = []
            for number in range(1, steps + 1):
                last = training.step()
                time.sleep(pause_s)
                # Of the bytes that the steps so far would need, at the pace that they have on this machine.
                pace_s = (time.monotonic() - began_s) / number
                link.bytes_per_s = step_bytes / pace_s / 10
                lags.append(last - head_of(copy))
            training.publisher.close()
            wait_until(lambda: head_of(copy) == last, "the newest version")
            sent = link.sent_bytes - began_bytes
            assert relay.end(signal.SIGTERM) == compactor.end(signal.SIGTERM) == 0
        require_equal(source, copy)
        deltas = sum(m.nbytes for m in Log(source).read_many(range(2, last + 1)))
        edges = [line for line in relay.lines if line.get("version", 0) > 1]
        assert [line["version"] for line in edges] == sorted({line["version"] for line in edges})
        assert "skip" in {line["kind"] for line in edges}
        left_out = sum(line["left_out"] for line in edges)
        assert left_out > steps / 2
        assert sent < deltas / 2, "it takes less than half of the bytes of all deltas"
        print(
            f"{steps} versions, one every {pace_s:.2f} s, over a link of {link.bytes_per_s:,.0f} bytes a second: "
            f"{deltas:,} bytes of deltas, {sent:,} sent; {len(edges)} edges, {left_out} versions left out; "
            f"lag at most {max(lags)} versions, {lags[-1]} when training ended"
        )
