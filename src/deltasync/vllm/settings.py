"""The settings of a server, from its environment, and its folder in shared memory."""

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


@dataclass(frozen=True, slots=True)
class Settings:
    """`DELTASYNC_*` variables.

    `token`: what control routes ask for; without one they answer nobody. `way`: `pull` follows by itself, `push` moves
    only when told. `pause`: what becomes of requests in flight at a switch. `mirror`: a file for the mirror, which
    survives restarts; without one it lies in shared memory while the server runs. `scrub_s`: live memory is compared
    with the mirror in about this time, over and over; None does not.
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
        """InvalidInputError that names the variable that is wrong."""
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
            mirror=_path(values.get("mirror")),
            base=_path(values.get("base")),
            replica=values.get("replica"),
            scrub_s=_seconds("scrub_s", values.get("scrub_s", "3600")),
        )


_PREFIX = "DELTASYNC_"
_OFF = "off"


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise _wrong(name, value, f"one of {', '.join(allowed)}")
    return value


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value)


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
    """A new folder that nobody else may look into; it is gone at the end of the block.

    It is in shared memory where there is such a thing, unless a `parent` is given.
    """
    place = _shared() if parent is None else parent
    # A killed server cannot clean up, and its mirror is as large as the model: a second one would fill the memory.
    prefix = f"deltasync-{os.getuid()}"
    with ExitStack() as held:
        with locked(place / prefix, wait=True):
            _sweep(place, prefix)
            folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=place))
            held.enter_context(locked(_user(folder)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _sweep(place: Path, prefix: str) -> None:
    """Remove folders whose process is gone: a lock is given back by the system."""
    for found in place.glob(f"{prefix}-*/"):
        with suppress(InvalidInputError), locked(_user(found)):
            shutil.rmtree(found, ignore_errors=True)


def _user(folder: Path) -> Path:
    return folder / "used"


def _shared() -> Path:
    shared = Path("/dev/shm")
    return shared if shared.is_dir() else Path(tempfile.gettempdir())
