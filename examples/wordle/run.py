"""A run of the demo from its begin to its end: starts the processes, kills one, compares the digests, verifies."""

import importlib.util
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from deltasync.errors import EngineError, InvalidInputError, MismatchError
from deltasync.feed.log import Log
from deltasync.feed.verify import Verification, verify
from deltasync.store import open_store
from wordle.board import Board
from wordle.processes import Processes, Told
from wordle.settings import LOGS, SPOOL, Settings

TRAINER = "trainer"
_NEEDED = ("torch", "transformers")
_LOOK_S = 0.2
_COMES_S = 180.0
"""How long a replica may take to begin, and to come to the last version."""

Show = Callable[[Board], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run that went well to its end."""

    settings: Settings
    board: Board
    verification: Verification
    seconds: float


def prepare(settings: Settings) -> None:
    """Make the folder of the run. InvalidInputError, before any process is started, for what cannot work."""
    for name in _NEEDED:
        if importlib.util.find_spec(name) is None:
            raise InvalidInputError(f"{name} is not installed here", hint="pip install 'deltasync[transformers]'")
    if settings.model is not None and not (Path(settings.model) / "config.json").is_file():
        raise InvalidInputError(
            f"{settings.model} has no config.json", hint="give the folder of a transformers checkpoint"
        )
    if settings.store.lower().startswith("memory:"):
        raise InvalidInputError(
            f"{settings.store} is in the memory of one process", hint="choose a store that processes share: a folder"
        )
    folder = settings.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"{folder} is there already", hint="choose another folder with --out, or remove it")
    with closing(open_store(settings.store)) as store:
        if Log(store).head() is not None:
            raise InvalidInputError(
                f"there is a feed in {settings.store} already", hint="choose another place with --store"
            )
    for name in (SPOOL, LOGS):
        (folder / name).mkdir(parents=True)


def run(settings: Settings, show: Show) -> Outcome:
    """The whole run. When this returns or raises, no process of it is left."""
    since = time.monotonic()
    director = Director(settings, Processes(settings), show)
    board = director.run()
    require_equal(board)
    with closing(open_store(settings.store)) as store:
        found = verify(store, deep=True)
    return Outcome(settings, board, found, time.monotonic() - since)


class Director:
    """Leads the processes through a run. `comes_s`: how long a replica is waited for."""

    def __init__(self, settings: Settings, processes: Processes, show: Show, *, comes_s: float = _COMES_S) -> None:
        self._settings = settings
        self._processes = processes
        self._show = show
        self._comes_s = comes_s
        self._due_s: dict[str, float] = {}
        self.board = Board(settings.replica_names, settings.steps)

    def run(self) -> Board:
        """Until every process has told its last digest."""
        try:
            self._processes.start(TRAINER, TRAINER)
            for name in self._settings.replica_names:
                self._processes.start("replica", name, name)
            while len(self.board.digests) < 1 + self._settings.replicas:
                told = self._processes.next(_LOOK_S)
                if told is not None:
                    self._take(told)
                    self._show(self.board)
                self._require_in_time()
            return self.board
        finally:
            self._processes.close()

    def _take(self, told: Told) -> None:
        if told.fields is None:
            if told.name not in self.board.digests:
                raise EngineError(f"{told.name} ended too early", hint=self._where(told.name))
            return
        self.board.take(told.name, told.fields, now_s=time.monotonic())
        event = told.fields["event"]
        if event == "ready":
            self._expect(*self._settings.replica_names)
        elif (event == "moved" and self.board.after is None) or event == "final":
            self._due_s.pop(told.name, None)
        elif event == "stepped" and self.board.done == (self._settings.steps + 1) // 2:
            self._kill_one()
        elif event == "trained":
            for name in self._settings.replica_names:
                self._processes.order(name, told.fields["version"])
            self._expect(*self._settings.replica_names)

    def _kill_one(self) -> None:
        """The last replica, in the middle of whatever it does. It is started again at once, and left to itself."""
        name = self._settings.replica_names[-1]
        self._processes.kill(name)
        self.board.kill(name, now_s=time.monotonic())
        self._processes.start("replica", name, name)
        self._expect(name)

    def _expect(self, *names: str) -> None:
        self._due_s |= dict.fromkeys(names, time.monotonic() + self._comes_s)

    def _require_in_time(self) -> None:
        now_s = time.monotonic()
        for name, due_s in self._due_s.items():
            if now_s > due_s:
                raise EngineError(
                    f"{name} did not come to the newest version in {self._comes_s:g} s", hint=self._where(name)
                )

    def _where(self, name: str) -> str:
        return f"look at {self._settings.folder / LOGS / name}.log"


def require_equal(board: Board) -> None:
    """MismatchError if the live weights of any process are not those of the trainer."""
    wanted = board.digests[TRAINER]
    for name, found in board.digests.items():
        if found != wanted:
            raise MismatchError(
                f"{name} has the digest {found}, the trainer has {wanted}", hint="this is a bug: keep the folder"
            )
