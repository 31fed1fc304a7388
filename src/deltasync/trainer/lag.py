"""How far the replicas of a feed are behind, by their heartbeats, and waiting for them. Needs no torch."""

import time
from collections.abc import Callable

from deltasync.errors import StoreError
from deltasync.format.records import Heartbeat
from deltasync.log.log import Log
from deltasync.prune import LIVE_S

_POLL_FIRST_S = 0.1
_POLL_MOST_S = 2.0

_LOOK = "look at the replicas; one that is dead is no longer waited for after `live_s`"
_START = "start a replica that follows this feed, such as `deltasync serve`, and look at what it says"


def serving(log: Log, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> list[tuple[int, Heartbeat]]:
    """Versions and heartbeats of the live replicas that serve one, the slowest first.

    Live: the heartbeat is younger than `live_s`. A replica without a version makes no rollouts: it is not waited for.
    """
    oldest_unix_s = clock() - live_s
    found = [(b.version, b) for b in log.heartbeats() if b.version is not None and b.unix_s > oldest_unix_s]
    return sorted(found, key=lambda pair: (pair[0], pair[1].replica))


def slowest(log: Log, *, live_s: float = LIVE_S, clock: Callable[[], float] = time.time) -> Heartbeat | None:
    """The live replica that serves the oldest version; None if no live one serves any."""
    found = serving(log, live_s=live_s, clock=clock)
    return found[0][1] if found else None


def wait_for_replicas(
    log: Log,
    version: int,
    *,
    replicas: int,
    timeout_s: float,
    live_s: float = LIVE_S,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Until every live replica serves `version` or a later one, and at least `replicas` of them are there.

    Replicas that fall silent for `live_s` are no longer waited for. While the store fails for a moment, it is asked
    again. StoreError, naming who is behind, after `timeout_s`.
    """
    started, pause_s = clock(), _POLL_FIRST_S
    while True:
        told, hint = None, _LOOK
        try:
            found = serving(log, live_s=live_s, clock=clock)
            told, hint = _missing(found, version, replicas), _LOOK if len(found) >= replicas else _START
        except StoreError as error:
            if not error.transient:
                raise
            told = f"the heartbeats cannot be read: {error.message}"
        if told is None:
            return
        waited_s = clock() - started
        if waited_s >= timeout_s:
            raise StoreError(
                f"version {version} was not confirmed by the replicas in {timeout_s:g} s: {told}",
                transient=True,
                hint=hint,
            )
        sleep(min(pause_s, timeout_s - waited_s))
        pause_s = min(2 * pause_s, _POLL_MOST_S)


def _missing(found: list[tuple[int, Heartbeat]], version: int, replicas: int) -> str | None:
    """What is still missing, in words; None if nothing is."""
    if len(found) < replicas:
        return f"{len(found)} live replicas serve a version, at least {replicas} are required"
    behind = [f"{beat.replica!r:.80} serves version {served}" for served, beat in found if served < version]
    more = f" and {len(behind) - 3} others" if len(behind) > 3 else ""
    return ", ".join(behind[:3]) + more if behind else None
