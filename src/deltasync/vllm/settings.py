"""In the API server: its settings, from the environment, and its folder in shared memory."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from deltasync.errors import InvalidInputError
from deltasync.files import locked

PauseMode = Literal["keep", "abort", "wait"]
Way = Literal["pull", "push"]

_PREFIX = "DELTASYNC_"
_OFF = "off"


@dataclass(frozen=True, slots=True)
class Settings:
    """The `DELTASYNC_*` variables.

    `token`: what the control routes require; without one they refuse every request.
    `way`: with `pull` the server follows the feed, with `push` it moves only on `POST /deltasync/advance`.
    `pause`: what happens to the requests in flight at a switch.
    `mirror`: a file for the mirror, which survives restarts; by default the mirror is in shared memory.
    `base`: a local copy of the checkpoint that the feed began with.
    `replica`: the id in heartbeats; random by default.
    `scrub_s`: compare live memory with the mirror about once in this many seconds; None does not.
    """

    feed: str
    token: str | None = None
    way: Way = "pull"
    pause: PauseMode = "keep"
    mirror: Path | None = None
    base: Path | None = None
    replica: str | None = None
    scrub_s: float | None = 3600.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """The settings of this process. InvalidInputError names the variable that is wrong."""
        values = {
            name.removeprefix(_PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(_PREFIX) and value
        }
        if "feed" not in values:
            raise InvalidInputError("DELTASYNC_FEED is not set", hint="set it to the URL of the feed to follow")
        return cls(
            feed=values["feed"],
            token=values.get("token"),
            way=cast(Way, _one_of("way", values.get("way", "pull"), get_args(Way))),
            pause=cast(PauseMode, _one_of("pause", values.get("pause", "keep"), get_args(PauseMode))),
            mirror=Path(values["mirror"]) if "mirror" in values else None,
            base=Path(values["base"]) if "base" in values else None,
            replica=values.get("replica"),
            scrub_s=_seconds("scrub_s", values.get("scrub_s", "3600")),
        )


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


@contextmanager
def memory_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new private folder, which is removed at the end of the block.

    It is in shared memory where the system has that, unless a `parent` is given.
    """
    place = _shared_memory() if parent is None else parent
    # A killed server cannot clean up, and its mirror is as large as the model: a second one would fill the memory.
    prefix = f"deltasync-{os.getuid()}"
    with ExitStack() as held:
        with locked(place / prefix, wait=True):
            _remove_abandoned(place, prefix)
            folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=place))
            held.enter_context(locked(_lock_of(folder)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(place: Path, prefix: str) -> None:
    """Remove the folders of processes that have ended: the system has released their locks."""
    for folder in place.glob(f"{prefix}-*/"):
        with suppress(InvalidInputError), locked(_lock_of(folder)):
            shutil.rmtree(folder, ignore_errors=True)


def _lock_of(folder: Path) -> Path:
    return folder / "used"


def _shared_memory() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
