"""A replica of the demo: follows the feed in a thread, and plays games with the live version.

Run as `python -m wordle.replica SETTINGS NAME`, by the demo.
"""

import shutil
import sys
import tempfile
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from demo.child import Orders, run_child, send, send_move
from demo.published import digest_of, published_copy
from demo.settings import WORDLE, Settings
from transformers import PreTrainedModel

from deltasync import Follower, InvalidInputError, NotFoundError, Store, StoreError, open_store, restore
from deltasync.torch import ModuleTarget
from wordle.game import Wordle
from wordle.rollouts import GAMES, GROUP, Rollouts, Spool
from wordle.training import play, policy_of_config

_POLL_S = 0.2
_FIRST_POLL_S = 1.0
"""Pause between two polls for the first version: the trainer is warming up, and each poll is a listing."""
_PATIENCE_S = 30.0
"""How long a failing store is retried before there is a first version."""


class LivePolicy:
    """A policy to play with, which is updated between two batches of games.

    `live` has the published bits and is what the follower overwrites. The policy itself computes in float32; every
    bfloat16 is a float32, so that nothing is lost.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.live = published_copy(model)
        self._lock = threading.Lock()
        self.target = ModuleTarget(self.live, hold=self._lock)
        self._loaded: int | None = None

    def refresh(self) -> int | None:
        """Load the live version into the policy and return its number. It plays until the next call."""
        with self._lock:
            version = self.target.version
            if version is not None and version != self._loaded:
                self.model.load_state_dict(self.live.state_dict())
                self._loaded = version
            return version


class Player:
    """Plays batches of games with the live version, and hands them to the trainer."""

    def __init__(self, policy: LivePolicy, spool: Spool, name: str, *, seed: int) -> None:
        self._policy = policy
        self._spool = spool
        self._name = name
        self._wordle = Wordle.bundled()
        self._random = torch.Generator().manual_seed(seed)

    def play(self) -> bool:
        """Play one batch, with a group of games for each answer. Return False if it is too early for one."""
        # Games that wait for the trainer only get older.
        if self._spool.waiting(self._name) > 0:
            return False
        version = self._policy.refresh()
        if version is None:
            return False
        drawn = torch.randint(len(self._wordle.words), (GAMES // GROUP,), generator=self._random)
        played = play(self._policy.model, self._wordle, np.repeat(drawn.numpy(), GROUP), self._random)
        self._spool.put(Rollouts(self._name, version, played))
        return True


def main(settings: Settings, name: str, orders: Orders) -> None:
    """Follow and play until ordered otherwise."""
    torch.set_num_threads(1)
    mirror = settings.mirror(WORDLE, name)
    config = mirror.with_suffix(".config.json")
    with open_store(settings.feed(WORDLE)) as store:
        # A replica that is started again has the shape of the model on its disk, beside its mirror.
        if not config.is_file() and not _save_config(store, config, orders):
            return
        policy = LivePolicy(policy_of_config(config.read_bytes()))
        # A replica plays other games than its neighbour, and than itself before a restart.
        seed = zlib.crc32(f"{settings.seed} {name} {time.time_ns()}".encode())
        player = Player(policy, Spool.of(settings), name, seed=seed)
        with Follower(store, policy.target, mirror=mirror, replica=name, observer=send_move) as follower:
            send("following")
            follower.start()
            _serve(follower, policy, player, orders)


def _serve(follower: Follower, policy: LivePolicy, player: Player, orders: Orders) -> None:
    """Play until the last version is live, then report the digest of the live weights."""
    while not orders.stopped.is_set():
        if follower.error is not None and not follower.status().is_following:
            raise follower.error
        if orders.finish_at is None:
            if not player.play():
                orders.stopped.wait(_POLL_S / 4)
        elif policy.target.version == orders.finish_at:
            send("final", version=orders.finish_at, digest=digest_of(policy.live))
            return
        else:
            orders.stopped.wait(_POLL_S)


def _save_config(store: Store, path: Path, orders: Orders) -> bool:
    """Save the config.json of the newest version, as soon as there is one; False if this process was stopped before."""
    deadline_s = time.monotonic() + _PATIENCE_S
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "first"
        while True:
            try:
                restore(store, checkpoint)
                break
            except NotFoundError:
                deadline_s = time.monotonic() + _PATIENCE_S
            except StoreError as error:
                if not error.transient or time.monotonic() > deadline_s:
                    raise
            if orders.stopped.wait(_FIRST_POLL_S):
                return False
        config = checkpoint / "config.json"
        if not config.is_file():
            raise InvalidInputError(
                f"the feed in {store.url} has no config.json", hint="let the demo make its own feed"
            )
        shutil.copyfile(config, path)
        return True


if __name__ == "__main__":
    given = Settings.from_json(sys.argv[1])
    sys.exit(run_child(lambda orders: main(given, sys.argv[2], orders)))
