"""A replica's sign of life in the feed: retention keeps its way, and a trainer can wait for it."""

import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping

from deltasync.errors import DeltasyncError
from deltasync.format.keys import replica_key
from deltasync.format.records import Heartbeat
from deltasync.log.log import Log

_log = logging.getLogger(__name__)

BEAT_S = 30.0
"""Between two heartbeats of a replica whose version stays: well below the 15 minutes after which it counts as gone."""


class Heart:
    """Writes heartbeats when they are due. No failure of theirs reaches the caller: serving goes on without them."""

    def __init__(
        self, log: Log, replica: str, *, beat_s: float = BEAT_S, clock: Callable[[], float] = time.time
    ) -> None:
        self._log = log
        self._replica = replica
        self._key = replica_key(replica)
        self._beat_s = beat_s
        self._clock = clock
        self._last: tuple[int | None, float] | None = None
        self._is_failing = False
        self._has_left = False
        self._lock = threading.Lock()

    def beat(self, version: int | None, facts: Callable[[], Mapping[str, str]]) -> None:
        """Write a heartbeat if the last one is old or has another version."""
        with self._lock:
            now = self._clock()
            last = self._last
            is_fresh = last is not None and last[0] == version and 0 <= now - last[1] < self._beat_s
            if is_fresh or self._has_left:
                return
            # A store that fails is not asked again before the next is due.
            self._last = version, now
            try:
                self._log.beat(Heartbeat(self._replica, version, int(now), facts()))
            except DeltasyncError as error:
                if not self._is_failing:
                    _log.warning("cannot write the heartbeat of %s, going on without: %s", self._replica, error)
                self._is_failing = True
            else:
                self._is_failing = False

    def leave(self) -> None:
        """The replica ends for good: nothing needs to be kept for it, and nobody waits for it."""
        with self._lock:
            self._has_left = True
            if self._last is None:
                return
            try:
                self._log.store.delete(self._key)
            except DeltasyncError as error:
                told = "cannot delete the heartbeat of %s, it counts as alive for a while: %s"
                _log.warning(told, self._replica, error)


def new_replica_id() -> str:
    """Host, process and something random, in the form that keys allow."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:60].lstrip("-")
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}".lstrip("-")
