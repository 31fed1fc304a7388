"""Scripts that end without closing their publisher: real child processes, and what is in the feed afterwards."""

import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.feeds import begun, publish, require_steps

from deltasync.parallel import Pool
from deltasync.store.local import LocalStore

SCRIPT = """
import sys, threading, time
sys.path.insert(0, {tests!r})
from support.feeds import NEVER, nth
from deltasync.errors import StoreError
from deltasync.format.weights import Weights
from deltasync.store.local import LocalStore
from deltasync.store.protocol import WrapperStore
from deltasync.trainer.publisher import FeedPublisher, PublisherOptions
from deltasync.trainer.capture import WeightsSource

class Slow(WrapperStore):
    '''Payloads take a while once the feed has begun, so that the script ends before they are put.'''

    act = time.sleep
    is_slow = False

    def put(self, key, data):
        if self.is_slow and key.startswith("payloads/"):
            self.act(0.5)
        super().put(key, data)

def refuse(_):
    raise StoreError("the store is broken", transient=False)

def hang(_):
    threading.Event().wait()

def publisher(store, **options):
    return FeedPublisher(store, PublisherOptions(**{{"anchors": NEVER, **options}}))

def publish(to, step, **options):
    return to.publish(WeightsSource(Weights.of(nth(step))), step=step, **options)

store = Slow(LocalStore({feed!r}))
to = publisher(store, exit_s={exit_s})
publish(to, 0).wait()
store.is_slow = True
"""


def run(folder: Path, script: str, *, exit_s: float = 60.0, python: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """The exit status and what is on stdout and stderr of a script, after the start that all of them have."""
    start = SCRIPT.format(tests=str(Path(__file__).parents[1]), feed=str(folder), exit_s=exit_s)
    command = [sys.executable, *python, "-c", start + textwrap.dedent(script)]
    done = processes.run(command)
    return done.returncode, done.stdout, done.stderr


ENDS = {
    "the end": ("", 0),
    "sys.exit": ("sys.exit(3)", 3),
    "an exception": ("raise ZeroDivisionError", 1),
    "a publisher that was dropped": ("del to", 0),
    "a thread that still runs": ("threading.Thread(target=time.sleep, args=(1,)).start()", 0),
    "exit handlers that print": ("import atexit; atexit.register(print, 'bye', flush=True)", 0),
}


@pytest.mark.parametrize(("end", "status"), ENDS.values(), ids=ENDS)
def test_what_was_accepted_is_finished(tmp_path: Path, end: str, status: int) -> None:
    """The newest step is in the feed, whether it was in flight or waited behind another one."""
    code, out, error = run(tmp_path, f"publish(to, 1)\npublish(to, 2)\n{end}")
    assert code == status, error
    assert "error:" not in error
    assert ("bye" in out) == ("bye" in end)
    require_steps(LocalStore(tmp_path), {0: 0, 1: 1, 2: 2})


def test_an_anchor_is_finished(tmp_path: Path) -> None:
    code, _, error = run(tmp_path, "publish(to, 1, anchor=True)")
    assert code == 0, error
    assert [path.name for path in (tmp_path / "anchors").iterdir()] == [f"{1:020d}.json"]


@pytest.mark.parametrize(
    ("act", "exit_s", "message"),
    [("refuse", 60.0, "the store is broken"), ("hang", 1.5, "within 1.5 s")],
)
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise ZeroDivisionError"])
def test_what_is_lost_is_reported(tmp_path: Path, act: str, exit_s: float, message: str, end: str) -> None:
    """By one line that names the step, the feed and the reason, and by an exit status that is not 0."""
    script = f"import atexit; atexit.register(print, 'bye', flush=True)\nstore.act = {act}\npublish(to, 7)\n{end}"
    code, out, error = run(tmp_path, script, exit_s=exit_s)
    assert code == 120, error
    lines = [line for line in error.splitlines() if line.startswith("deltasync: error:")]
    assert len(lines) == 1
    assert f"step 7 was not published to {tmp_path.as_uri()}" in lines[0]
    assert message in lines[0]
    assert "with" in lines[0]
    assert "Exception ignored" not in error
    assert out == "bye\n", "other exit handlers run, and their output arrives"
    require_steps(LocalStore(tmp_path), {0: 0})


def test_a_long_exit_shows_its_progress(tmp_path: Path) -> None:
    script = "from deltasync.trainer import exit\nexit.QUIET_S = exit.PROGRESS_S = 0.1\npublish(to, 1)"
    code, _, error = run(tmp_path, script)
    assert code == 0
    assert error.count("exiting, but first finishing what was published to") > 1


def test_a_closed_publisher_has_nothing_left_to_do(tmp_path: Path) -> None:
    """The handle has reported the error: the script decides what it means."""
    code, _, error = run(tmp_path, "store.act = refuse\npublish(to, 1)\nto.close()")
    assert code == 0
    assert "deltasync: error" not in error


@pytest.mark.parametrize(
    ("end", "warned"), [("", True), ("del to", True), ("to.close()", False), ("to.close(); del to", False)]
)
def test_a_warning_names_what_was_not_closed(tmp_path: Path, end: str, warned: bool) -> None:
    _, _, error = run(tmp_path, f"publish(to, 1)\nto.wait()\n{end}", python=("-W", "default"))
    message = f"ResourceWarning: the publisher of {tmp_path.as_uri()} was not closed"
    assert error.count(message) == warned, error


def test_a_child_of_a_fork_leaves_its_parents_publications_alone(tmp_path: Path) -> None:
    """Its exit waits for nothing: the threads are those of the parent."""
    script = """
    import multiprocessing
    publish(to, 1)
    child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
    child.start()
    child.join()
    print(child.exitcode)
    """
    code, out, error = run(tmp_path, script)
    assert code == 0, error
    assert out.split() == ["child", "0"]
    require_steps(LocalStore(tmp_path), {0: 0, 1: 1})


def test_no_warning_for_a_publisher_that_was_closed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, to = begun()
        publish(to, 1).wait(LONG_S)
        to.close()


def test_a_pool_ends_with_its_last_user() -> None:
    pool = Pool(2, "deltasync-test")
    assert pool.submit(divmod, 7, 2).result(LONG_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(LONG_S)
    threads = list(pool._threads)
    assert all(thread.daemon for thread in threads)
    del pool
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()


def test_a_pool_does_all_of_its_work_before_it_is_shut_down() -> None:
    pool = Pool(1, "deltasync-test")
    pool.start()
    results = [pool.submit(pow, 2, n) for n in range(20)]
    pool.shutdown()
    assert [result.result(0) for result in results] == [2**n for n in range(20)]
    with pytest.raises(RuntimeError, match="shut down"):
        pool.submit(pow, 2, 2)
