"""In the API server: its settings, from the environment."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast, get_args

from deltasync.errors import InvalidInputError

PauseMode = Literal["keep", "abort", "wait"]
SyncMode = Literal["pull", "push"]
CachePolicy = Literal["clear", "keep"]
OnRefused = Literal["exit", "serve"]

_PREFIX = "DELTASYNC_"
_OFF = "off"
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class Settings:
    """The `DELTASYNC_*` variables.

    `feed`: the feed of the weights; None if the server follows only adapters.
    `adapters`: feeds of LoRA adapters, by the name that requests use.
    `token`: what the control routes require; without one they refuse every request.
    `way`: with `pull` the server follows the feed, with `push` it moves only on `POST /deltasync/advance`.
    `pause`: what happens to the requests in flight at a switch.
    `mirror`: a file for the mirror, which survives restarts; by default the mirror is in shared memory.
    `base`: a local copy of the checkpoint that the feed began with.
    `replica`: the id in heartbeats; random by default.
    `scrub_s`: compare live memory with the mirror about once in this many seconds; None does not.
    `cache`: with `clear`, no KV outlives a switch; with `keep`, requests in flight go on with theirs.
    `on_refused`: what a server does that follows a feed and refuses it for good.
    `ready_s`: a server that follows is ready while its version was the newest at most this many seconds ago; None sets
    no bound.
    """

    feed: str | None
    token: str | None = field(default=None, repr=False)
    way: SyncMode = "pull"
    pause: PauseMode = "keep"
    mirror: Path | None = None
    base: Path | None = None
    replica: str | None = None
    scrub_s: float | None = 3600.0
    cache: CachePolicy = "clear"
    on_refused: OnRefused = "exit"
    ready_s: float | None = 300.0
    adapters: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """The settings of this process. InvalidInputError names the variable that is wrong."""
        values = {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(_PREFIX) and value
        }
        if values.keys().isdisjoint({"feed", "adapters"}):
            raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it to the URL of the feed to follow")
        return cls(
            feed=values.get("feed"),
            token=values.get("token"),
            way=cast(SyncMode, _one_of("way", values.get("way", "pull"), get_args(SyncMode))),
            pause=cast(PauseMode, _one_of("pause", values.get("pause", "keep"), get_args(PauseMode))),
            mirror=Path(values["mirror"]) if "mirror" in values else None,
            base=Path(values["base"]) if "base" in values else None,
            replica=values.get("replica"),
            scrub_s=_seconds("scrub_s", values.get("scrub_s", "3600")),
            cache=cast(CachePolicy, _one_of("cache", values.get("cache", "clear"), get_args(CachePolicy))),
            on_refused=cast(OnRefused, _one_of("on_refused", values.get("on_refused", "exit"), get_args(OnRefused))),
            ready_s=_seconds("ready_s", values.get("ready_s", "300")),
            adapters=parse_adapters(values.get("adapters", "")),
        )


def parse_adapters(value: str) -> dict[str, str]:
    """The feeds of adapters by their names, from the value of `DELTASYNC_ADAPTERS`."""
    adapters: dict[str, str] = {}
    for pair in value.split():
        name, _, url = pair.partition("=")
        if not _ADAPTER.fullmatch(name) or not url or name in adapters:
            raise _wrong("adapters", value, "NAME=URL pairs, each name once, with a space between two pairs")
        adapters[name] = url
    return adapters


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _wrong(name, value, f"one of {', '.join(allowed)}")
    return value


def _seconds(name: str, value: str) -> float | None:
    if value == _OFF:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise _wrong(name, value, f"a number of seconds above 0, or {_OFF}")
    return seconds


def _wrong(name: str, value: str, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{_PREFIX}{name.upper()} is {value!r:.80}", hint=f"set it to {wanted}")
