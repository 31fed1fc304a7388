"""The settings of a server, once: the variables that it reads, and the options of `deltasync serve` that set them."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from deltasync.errors import InvalidInputError

PauseMode = Literal["keep", "abort", "wait"]
SyncMode = Literal["pull", "push"]
CachePolicy = Literal["clear", "keep"]
OnRefused = Literal["exit", "serve"]

_OFF = "off"
_ADAPTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


_OPTIONS = {
    "mirror": "keep the mirror in this file, across restarts",
    "pause": "what happens to requests in flight at a switch",
    "cache": "what happens to the KV cache at a switch",
    "on_refused": "what to do if the feed is refused for good",
    "ready_s": "ready while the version was the newest at most S seconds ago",
    "scrub_s": "compare all weights with the mirror about every S seconds",
}
"""The settings with an option of `deltasync serve` that does nothing else, and what its help says."""


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
        given = {name: environment.get(variable(name)) for name in _types()}
        found = {name: _read(name, value) for name, value in given.items() if value}
        if found.keys().isdisjoint({"feed", "adapters"}):
            raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it to the URL of the feed to follow")
        return cls(found.pop("feed", None), **found)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"DELTASYNC_{name.upper()}"


def options() -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of `deltasync serve` that only set a variable, with their arguments for argparse."""
    for name, help in _OPTIONS.items():
        choices = get_args(_types()[name]) if get_origin(_types()[name]) is Literal else None
        metavar = None if choices else "S" if name.endswith("_s") else "FILE"
        yield f"--{name.replace('_', '-')}", {"choices": choices, "metavar": metavar, "help": help}


def _types() -> dict[str, Any]:
    return get_type_hints(Settings)


def _read(name: str, value: str) -> Any:
    """The value of a setting from the text of its variable."""
    kind = _types()[name]
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise _wrong(name, value, f"one of {', '.join(get_args(kind))}")
    elif kind == Path | None:
        return Path(value)
    elif kind == float | None:
        if value == _OFF:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if not 0.0 < seconds < float("inf"):
            raise _wrong(name, value, f"a number of seconds above 0, or {_OFF}")
        return seconds
    elif name == "adapters":
        return parse_adapters(value)
    return value


def parse_adapters(value: str) -> dict[str, str]:
    """The feeds of adapters by their names, from the value of `DELTASYNC_ADAPTERS`."""
    adapters: dict[str, str] = {}
    for pair in value.split():
        name, _, url = pair.partition("=")
        if not _ADAPTER.fullmatch(name) or not url or name in adapters:
            raise _wrong("adapters", value, "NAME=URL pairs, each name once, with a space between two pairs")
        adapters[name] = url
    return adapters


def _wrong(name: str, value: str, wanted: str) -> InvalidInputError:
    return InvalidInputError(f"{variable(name)} is {value!r:.80}", hint=f"set it to {wanted}")
