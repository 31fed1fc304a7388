"""Virtual time, and threads of which exactly one runs.

A simulated thread is a real one that holds a baton. It passes the baton on when it sleeps or waits, to the thread that
is due first. So a run is as deterministic as its threads are.
"""

import heapq
import threading
from collections.abc import Callable
from itertools import count

START_S = 1_700_000_000.0
ROUTINE, POLL = 1, 2
"""The idleness of a thread that does something now and then, and of one that only polls."""
_IDLE_SHARE = 0.9
"""An idle thread waits for at least this part of the time until a busier one is due: days pass quickly."""


class Death(BaseException):
    """The simulated process has died: this unwinds its threads, and no error handler stops it."""


class Process:
    """What the threads of one process share: its clock, its sleep, its death."""

    def __init__(self, name: str, *, clock_offset_s: float = 0.0) -> None:
        self.name = name
        self.clock_offset_s = clock_offset_s
        self.asleep_until_s = 0.0
        self.is_dead = False
        self.tasks: list[Task] = []


class Task:
    """One simulated thread."""

    def __init__(self, process: Process, work: Callable[[], None]) -> None:
        self.process = process
        self.work = work
        self.ticket = 0
        """Entries of the queue with an older ticket are void."""
        self.parks = 0
        self.is_woken = False
        self.is_done = False
        self.carrier: _Carrier | None = None
        self.joining: list[Waiter] = []


Waiter = tuple[Task, int]
"""A task, and which of its waits is meant: a later one must not end by mistake."""


class _Carrier:
    """A real thread that runs simulated ones, one after another. Starting a thread for each would take long."""

    idle: "list[_Carrier]" = []  # noqa: RUF012

    def __init__(self) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.task: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, name="simulated", daemon=True).start()

    def _run(self) -> None:
        while True:
            self.baton.acquire()
            self.task()


class Scheduler:
    """Runs the tasks of one simulation. Exactly one of them, `current`, runs at any time."""

    def __init__(self) -> None:
        self.now_s = START_S
        self.steps = 0
        self._outside = Task(Process("outside"), lambda: None)
        self.current = self._outside
        self._queue: list[tuple[float, int, int, int, Task]] = []
        self._order = count()
        self._is_stopped = False
        self._tasks: list[Task] = []
        self._returned = threading.Lock()
        self._returned.acquire()
        self.on_error: Callable[[Process, BaseException], None] = lambda process, error: None

    def spawn(self, process: Process, work: Callable[[], None]) -> Task:
        """Start a thread of a process."""
        task = Task(process, work)
        process.tasks.append(task)
        self._tasks.append(task)
        self._push(task, self.now_s)
        return task

    def run(self) -> list[Task]:
        """Run until no task has anything to do. Returns those that wait for something that will never come."""
        self._tasks = [task for task in self._tasks if not task.is_done]
        self._pass_on(None)
        self._returned.acquire()
        self.current = self._outside
        return [task for task in self._tasks if not task.is_done]

    def stop(self) -> None:
        """Let `run` return as soon as the current task gives up the baton."""
        self._is_stopped = True

    def end(self) -> None:
        """Unwind all tasks that are left."""
        self._is_stopped = False
        for _ in range(3):
            for task in self._tasks:
                self.kill(task.process)
            if not self.run():
                return
        raise RuntimeError("a simulated thread does not end")

    def kill(self, process: Process) -> None:
        """Let all threads of a process end as soon as they get their turn."""
        process.is_dead, process.asleep_until_s = True, 0.0
        for task in process.tasks:
            if not task.is_done and task is not self.current:
                self._push(task, self.now_s)

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the calling thread."""
        self.park(seconds)

    def park(self, timeout_s: float | None = None, *, idleness: int = 0) -> bool:
        """Wait until `wake`; False on timeout. A thread with some `idleness` may be late: it waits for busier ones."""
        task = self.current
        if task.process.is_dead:
            raise Death
        if task is self._outside:
            raise RuntimeError("nothing outside of the simulation may wait")
        self.steps += 1
        task.ticket += 1
        task.parks += 1
        task.is_woken = False
        if timeout_s is not None:
            due_s = self.now_s + timeout_s
            if idleness:
                due_s = max(due_s, self.now_s + _IDLE_SHARE * (self._busy_s(idleness) - self.now_s))
            self._push(task, due_s, idleness=idleness)
        self._pass_on(task)
        if task.process.is_dead:
            raise Death
        return task.is_woken

    def waiter(self) -> Waiter:
        """The next wait of the calling thread."""
        return self.current, self.current.parks + 1

    def wake(self, waiter: Waiter) -> None:
        """End a wait, if the thread is still in it."""
        task, parks = waiter
        if not task.is_done and not task.is_woken and task.parks == parks and task is not self.current:
            task.is_woken = True
            self._push(task, self.now_s)

    def _busy_s(self, idleness: int) -> float:
        """When the first thread is due that is busier."""
        entries = (max(at, task.process.asleep_until_s) for at, _, ticket, other, task in self._queue
                   if other < idleness and ticket == task.ticket and not task.is_done)  # fmt: skip
        return min(entries, default=self.now_s)

    def _push(self, task: Task, at_s: float, *, idleness: int = 0) -> None:
        task.ticket += 1
        heapq.heappush(self._queue, (at_s, next(self._order), task.ticket, idleness, task))

    def _next(self) -> Task | None:
        while self._queue and not self._is_stopped:
            at_s, _, ticket, idleness, task = heapq.heappop(self._queue)
            if ticket != task.ticket or task.is_done:
                continue
            if at_s < task.process.asleep_until_s:
                self._push(task, task.process.asleep_until_s, idleness=idleness)
                continue
            self.now_s = max(self.now_s, at_s)
            return task
        return None

    def _pass_on(self, own: Task | None) -> None:
        """Pass the baton to the task that is due next; with `own`, return once that is due."""
        task = self._next()
        if task is own and task is not None:
            return
        if task is None:
            self._returned.release()
        else:
            self.current = task
            if task.carrier is None:
                task.carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
                task.carrier.task = lambda: self._carry(task)
            task.carrier.baton.release()
        if own is not None:
            assert own.carrier is not None
            own.carrier.baton.acquire()

    def _carry(self, task: Task) -> None:
        """The life of a task on its carrier."""
        try:
            if not task.process.is_dead:
                task.work()
        except Death:
            pass
        except BaseException as error:  # noqa: BLE001 - the referee decides what may be raised
            self.on_error(task.process, error)
        task.is_done = True
        for waiting in task.joining:
            self.wake(waiting)
        assert task.carrier is not None
        _Carrier.idle.append(task.carrier)
        self._pass_on(None)


_scheduler = Scheduler()


def scheduler() -> Scheduler:
    """The scheduler of the simulation in progress."""
    return _scheduler


def new_scheduler() -> Scheduler:
    """Begin a simulation."""
    global _scheduler  # noqa: PLW0603 - the stand-ins below are found by the code under test, not passed to it
    _scheduler = Scheduler()
    return _scheduler
