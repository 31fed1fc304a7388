"""The programs of the WAN benchmark: a store, a trainer and a replica, each in the network namespace of its host.

Run as `python -m benchmarks.wan_nodes store|trainer|replica`. Orders are JSON lines on standard input, one at a time;
each is answered by one line. Times are those of the monotonic clock, which all processes of a machine share.
"""

import gc
import json
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bits import Bits
from benchmarks.data.files import read_checkpoint
from benchmarks.wan_ways import OURS, WAYS, Layout, Way, as_torch
from deltasync import BaseRef, Follower
from deltasync.checkpoint import open_checkpoint
from deltasync.feed.fetch import get_whole
from deltasync.parallel import each
from deltasync.replica.events import Advance
from deltasync.store import open_store
from deltasync.torch import ModuleTarget, Publisher
from deltasync.trainer.events import Publication
from deltasync.trainer.publisher import PublisherOptions
from deltasync.trainer.schedule import AnchorPolicy
from tests.support.servers import seaweed

LIVE_WITHIN_S = 600.0

Answer = dict[str, Any]


def way_of(name: str) -> Way:
    """The way of others with this name."""
    return next(way for way in WAYS if way.name == name)


def serve_store() -> None:
    """SeaweedFS until standard input ends; prints its port and what a client must export."""
    with seaweed(address="0.0.0.0") as server:
        environment = dict(server.environment)
        environment.pop("AWS_ENDPOINT_URL")
        answer({"port": int(server.endpoint.rpartition(":")[2]), "bucket": server.bucket, "environment": environment})
        sys.stdin.read()


class Trainer:
    """Has all states of a model in memory, and publishes one after another in a way."""

    def __init__(self, states: Sequence[str]) -> None:
        self._states = [read_checkpoint(Path(path))[1] for path in states]
        self._way: OurTrainer | OtherTrainer | None = None

    def open(self, way: str, url: str, replicas: list[tuple[str, int]]) -> Answer:
        """Begin with the first state."""
        first = self._states[0]
        self._way = OurTrainer(url, first) if way == OURS else OtherTrainer(way_of(way), url, first, replicas)
        return {}

    def step(self, old: int, new: int) -> Answer:
        """Publish a state; answers as soon as the trainer may go on."""
        assert self._way is not None
        begun_s = time.monotonic()
        self._way.publish(self._states[old], self._states[new])
        return {"begun_s": begun_s, "held_s": time.monotonic() - begun_s}

    def finish(self) -> Answer:
        """Wait for the rest of the step."""
        assert self._way is not None
        return self._way.finish()

    def close(self) -> Answer:
        assert self._way is not None
        self._way.close()
        self._way = None
        gc.collect()
        return {}


class OurTrainer:
    """deltasync's publisher. The replicas have the first state, so that no anchor is needed."""

    def __init__(self, url: str, first: dict[str, Bits]) -> None:
        options = PublisherOptions(base=BaseRef("first state"), anchors=AnchorPolicy(bytes_ratio=None))
        self._publisher = Publisher(url, options=options)
        self._publication: Publication = self._publisher.publish(as_torch(first))
        self._publication.wait()

    def publish(self, old: dict[str, Bits], new: dict[str, Bits]) -> None:
        self._publication = self._publisher.publish(as_torch(new))

    def finish(self) -> Answer:
        self._publication.wait()
        event = self._publication.stats
        assert event is not None
        return {
            "payload_bytes": event.payload_bytes,
            "trainer": {"held": event.held_s, "encode": event.encode_s, "put": event.put_s, "commit": event.commit_s},
        }

    def close(self) -> None:
        self._publisher.close()


class OtherTrainer:
    """A way of others: objects in the store, and a message to every replica that they are there."""

    def __init__(self, way: Way, url: str, first: dict[str, Bits], replicas: list[tuple[str, int]]) -> None:
        self._way = way
        self._home = Path(tempfile.mkdtemp(prefix="wan-"))
        self._layout = way.open(first, self._home)
        self._store = open_store(url)
        self._replicas = [socket.create_connection((host, port)).makefile("rw") for host, port in replicas]
        self._pool = ThreadPoolExecutor(1)
        self._sent: Future[None] = Future()
        self._number = 0
        self._nbytes = 0
        self._seconds: dict[str, float] = {}

    def publish(self, old: dict[str, Bits], new: dict[str, Bits]) -> None:
        self._number += 1
        with timed(self._seconds, "capture"):
            captured = self._layout.capture(old, new)
        self._sent = self._pool.submit(self._send, captured)
        if self._way.held != "captured":
            self._sent.result()
        if self._way.held == "live":
            self._await_live()

    def finish(self) -> Answer:
        self._sent.result()
        if self._way.held != "live":
            self._await_live()
        return {"payload_bytes": self._nbytes, "trainer": self._seconds}

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()
        self._pool.shutdown()
        self._store.close()
        shutil.rmtree(self._home)

    def _send(self, captured: object) -> None:
        with timed(self._seconds, "encode"):
            files = self._layout.encode(captured)
        named = {f"{self._number}/{name}": data for name, data in files.items()}
        with timed(self._seconds, "put"):
            list(each(lambda key: self._store.put(key, named[key]), named, waiting=8))
        sizes = {key: len(data) for key, data in named.items()}
        self._nbytes = sum(sizes.values())
        for replica in self._replicas:
            print(json.dumps(sizes), file=replica, flush=True)

    def _await_live(self) -> None:
        for replica in self._replicas:
            if not replica.readline():
                raise OSError("a replica has closed the connection")


class Replica:
    """Has live weights, and takes what a trainer publishes."""

    def __init__(self, first: str, name: str) -> None:
        self._first = Path(first)
        self._name = name
        self._live = {tensor: bits.copy() for tensor, bits in mapped(self._first).items()}
        self._moves: queue.Queue[Answer] = queue.Queue()
        self._opened = ExitStack()

    def open(self, way: str, url: str) -> Answer:
        """Begin with the first state. Ways of others answer with the port at which the trainer must call."""
        for tensor, bits in mapped(self._first).items():
            self._live[tensor][...] = bits
        if way == OURS:
            target = ModuleTarget(as_torch(self._live))
            follower = Follower(url, target, base=self._first, replica=self._name, observer=self._note)
            self._opened.enter_context(follower)
            follower.start()
            follower.wait_live(timeout_s=LIVE_WITHIN_S)
            self._moves.get(timeout=LIVE_WITHIN_S)
            return {}
        receiver = Receiver(way_of(way), url, self._live, self._moves)
        self._opened.callback(receiver.close)
        return {"port": receiver.port}

    def live(self) -> Answer:
        """Wait for the next version to be live."""
        return self._moves.get(timeout=LIVE_WITHIN_S)

    def check(self, expected: str) -> Answer:
        """Compare all live weights, bit by bit, with a state of the trainer."""
        wanted = mapped(Path(expected))
        is_same = wanted.keys() == self._live.keys()
        return {"is_exact": is_same and all(np.array_equal(self._live[name], bits) for name, bits in wanted.items())}

    def close(self) -> Answer:
        self._opened.close()
        gc.collect()
        return {}

    def _note(self, advance: Advance) -> None:
        s = advance.seconds
        phases = {"plan": s.plan, "fetch": s.fetch, "decode": s.decode, "stage": s.stage, "apply": s.commit}
        self._moves.put({"live_s": time.monotonic(), "pause_s": s.pause, "replica": phases})


class Receiver:
    """The replica's half of a way of others, in a thread: fetch, decode and apply what a message names."""

    def __init__(self, way: Way, url: str, live: dict[str, Bits], moves: "queue.Queue[Answer]") -> None:
        self._way = way
        self._live = live
        self._moves = moves
        self._home = Path(tempfile.mkdtemp(prefix="wan-"))
        self._layout: Layout = way.open(live, self._home)
        self._store = open_store(url)
        # Like a follower that polls, it has an open connection before the first step.
        next(self._store.list(), None)
        self._listener = socket.create_server(("", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After the trainer has closed its side."""
        self._thread.join(timeout=LIVE_WITHIN_S)
        self._listener.close()
        self._store.close()
        shutil.rmtree(self._home)

    def _run(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rw") as messages:
            for line in messages:
                self._moves.put(self._take(json.loads(line)))
                print("live", file=messages, flush=True)

    def _take(self, sizes: dict[str, int]) -> Answer:
        seconds: dict[str, float] = {}
        with timed(seconds, "fetch"):
            fetched = each(lambda key: bytes(get_whole(self._store, key, sizes[key])), sizes, waiting=8)
            files = {key.partition("/")[2]: data for key, data in zip(sizes, fetched, strict=True)}
        with timed(seconds, "decode"):
            decoded = self._layout.decode(files, self._live)
        with timed(seconds, "apply"):
            self._layout.apply(decoded, self._live)
        steps = ("fetch", "decode", "apply")
        inside = steps[steps.index(self._way.paused) :]
        return {"live_s": time.monotonic(), "pause_s": sum(seconds[step] for step in inside), "replica": seconds}


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note the seconds of the block under a name."""
    since_s = time.monotonic()
    yield
    seconds[name] = time.monotonic() - since_s


def mapped(path: Path) -> dict[str, Bits]:
    """The weights of a file, without memory of their own."""
    weights = open_checkpoint(path).weights
    return {
        spec.name: bits.reshape(spec.shape) for spec, bits in zip(weights.layout.tensors, weights.arrays, strict=True)
    }


def answer(fields: Answer) -> None:
    """One line to the benchmark."""
    print(json.dumps(fields), flush=True)


def obey(node: Trainer | Replica) -> None:
    """Call the method that each order names, until there are no more. An error, also of a thread, ends the program."""

    def fail(error: threading.ExceptHookArgs) -> None:
        sys.__excepthook__(error.exc_type, error.exc_value or error.exc_type(), error.exc_traceback)
        os._exit(1)

    threading.excepthook = fail
    answer({})
    for line in sys.stdin:
        order = json.loads(line)
        method: Callable[..., Answer] = getattr(node, order.pop("do"))
        answer(method(**order))
    # Nothing is left to save: threads that still run must not hold the exit up.
    os._exit(0)


def main(role: str, *arguments: str) -> None:
    """Run one program."""
    if role == "store":
        serve_store()
    elif role == "trainer":
        obey(Trainer(arguments))
    else:
        obey(Replica(*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
