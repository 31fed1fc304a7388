"""A replica of the demo: follows the feed in one thread, plays games with what is live in another.

Run as `python -m wordle.replica SETTINGS NAME`.
"""

import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import torch
from transformers import PreTrainedModel

from deltasync.errors import InvalidInputError
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.format.manifest import Manifest
from deltasync.replica.events import Advance
from deltasync.replica.follower import Follower
from deltasync.store import open_store
from deltasync.store.retry import RetryingStore
from deltasync.torch.module import ModuleTarget
from wordle.child import Orders, run, tell
from wordle.playing import play
from wordle.policy import policy_of_config
from wordle.settings import GAMES, GROUP, SPOOL, Settings
from wordle.spool import Rollouts, Spool
from wordle.weights import digest_of, load, published_copy
from wordle.wordle import Wordle

_LOOK_S = 0.2
_FIRST_S = 1.0
"""Between two looks for the first version: the trainer warms up, and each look is a listing."""
_PATIENCE_S = 30.0


class Serving:
    """A policy to play with, which takes over what is live between two batches of games.

    `live` holds the published bits, and is what the follower overwrites. The policy computes in float32, which is
    quicker on most CPUs.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.live = published_copy(model)
        self._lock = threading.Lock()
        self.target = ModuleTarget(self.live, hold=self._lock)
        self._loaded: int | None = None

    def refresh(self) -> int | None:
        """Take over what is live, and tell its version. All that is played until the next call is made by it."""
        with self._lock:
            version = self.target.version
            if version is not None and version != self._loaded:
                load(self.model, self.live)
                self._loaded = version
            return version


class Player:
    """Plays batches of games with what is live, and hands them to the trainer."""

    def __init__(self, serving: Serving, spool: Spool, name: str, *, seed: int) -> None:
        self._serving = serving
        self._spool = spool
        self._name = name
        self._wordle = Wordle.bundled()
        self._random = torch.Generator().manual_seed(seed)

    def play(self) -> bool:
        """One batch, each answer of it for a group of games. False if it is not the time for one."""
        # Games that wait for the trainer only get old.
        if self._spool.waiting(self._name) > 0:
            return False
        version = self._serving.refresh()
        if version is None:
            return False
        drawn = torch.randint(len(self._wordle.words), (GAMES // GROUP,), generator=self._random)
        played = play(self._serving.model, self._wordle, np.repeat(drawn.numpy(), GROUP), self._random)
        self._spool.put(Rollouts(self._name, version, played))
        return True


def main(settings: Settings, name: str, orders: Orders) -> None:
    """Follow and play until told otherwise."""
    torch.set_num_threads(1)
    with closing(open_store(settings.store)) as store:
        head = _first(Log(RetryingStore(store, limit_s=_PATIENCE_S)), orders)
        if head is None:
            return
        config = fetch_files(store, head).get("config.json")
        if config is None:
            raise InvalidInputError(f"there is no config.json in {store.url}", hint="let the demo make its own feed")
        serving = Serving(policy_of_config(config))
        # A replica plays other games than the next one, and than itself before it was started again.
        seed = zlib.crc32(f"{settings.seed} {name} {head.version}".encode())
        player = Player(serving, Spool(settings.folder / SPOOL), name, seed=seed)
        mirror = settings.folder / f"{name}.mirror"
        with Follower(store, serving.target, mirror=mirror, replica=name, observer=_tell_move) as follower:
            _serve(follower, serving, player, orders)


def _serve(follower: Follower, serving: Serving, player: Player, orders: Orders) -> None:
    """Follow in a thread and play in this one; at the end, tell the digest of what is live."""
    with ThreadPoolExecutor(1) as threads:
        following = threads.submit(follower.follow)
        try:
            while not following.done() and not orders.stopped.is_set():
                if orders.finish_at is None:
                    if not player.play():
                        orders.stopped.wait(_LOOK_S / 4)
                elif serving.target.version == orders.finish_at:
                    tell("final", version=orders.finish_at, digest=digest_of(serving.live).hex)
                    return
                else:
                    orders.stopped.wait(_LOOK_S)
        finally:
            follower.stop()
        following.result()


def _first(log: Log, orders: Orders) -> Manifest | None:
    """The head, as soon as there is one; None if this process is to end before."""
    while (head := log.head()) is None:
        if orders.stopped.wait(_FIRST_S):
            return None
    return head


def _tell_move(moved: Advance) -> None:
    tell(
        "moved",
        version=moved.version,
        from_version=moved.from_version,
        edges=list(moved.edges),
        nbytes=moved.nbytes,
        pause_s=moved.seconds.pause,
    )


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run(lambda orders: main(given, sys.argv[2], orders)))
