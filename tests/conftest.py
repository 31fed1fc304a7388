"""What all tests have in common. Because of this file `support` is importable from each: its folder is on the path."""

import codecs
import faulthandler
import locale
import os
import random
import signal
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings
from pytest_timeout import Settings
from support import LONG_S, LONG_TEST_S, TEST_S

from deltasync.kernels import VARIABLE, available, kernels
from deltasync.store import patient

# A deadline is an assertion of wall-clock time, which fails on a busy machine.
settings.register_profile("deltasync", deadline=None)
settings.load_profile("deltasync")

_FOR_TESTS = {"DELTASYNC_GOLDEN", "DELTASYNC_SOAK", "DELTASYNC_TEST_LONG_S", "DELTASYNC_VLLM_PYTHON"}
for _name in list(os.environ):
    # What the shell has for the commands, as a feed or a token, or for a distributed training. Not in a fixture: those
    # with a wider scope start processes, too.
    if (_name.startswith("DELTASYNC_") and _name not in _FOR_TESTS) or _name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        del os.environ[_name]
for _name in ("no_proxy", "NO_PROXY"):
    # Servers of the tests are on this machine, and must not be asked for through a proxy.
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "localhost,127.0.0.1,::1"]))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs with SIGINT ignored, and child processes inherit that. They do not inherit a
    # handler, so this one lets tests interrupt their children while the test run itself still ignores SIGINT.
    signal.signal(signal.SIGINT, lambda number, frame: None)


_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, which is captured during a test. All files of the tests are in UTF-8."""
    config.stash[_STDERR] = os.dup(2)
    # torch.compile reads its own files in the encoding of the locale, and so do many tests.
    if codecs.lookup(locale.getpreferredencoding(False)).name != "utf-8":
        raise pytest.UsageError(
            "the tests read text in the encoding of the locale, which is not UTF-8: set PYTHONUTF8=1"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process if a test does not even end after its limit, with the tracebacks of all threads.

    At its limit a test fails by an exception. That does not reach a call that never returns to Python, and whatever
    cleans up after the exception may hang in turn. pytest-xdist reports the test and replaces the process.
    """
    _limit_process(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Limit what comes after the test, too: where the test has failed, pytest has cancelled both limits."""
    _limit_process(item)
    limited = Settings(_limit_s(item), "signal", func_only=False, disable_debugger_detection=False)
    item.ihook.pytest_timeout_set_timer(item=item, settings=limited)


def _limit_process(item: pytest.Item) -> None:
    faulthandler.dump_traceback_later(_limit_s(item) + LONG_S, exit=True, file=item.config.stash[_STDERR])


def _limit_s(item: pytest.Item) -> float:
    limit = item.get_closest_marker("timeout")
    assert limit is not None, "every test gets its limit when it is collected"
    return float(limit.args[0])


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Give each test a limit, unless it has one of its own."""
    if item.get_closest_marker("timeout") is None:
        is_long = any(item.get_closest_marker(mark) for mark in ("e2e", "long", "soak"))
        item.add_marker(pytest.mark.timeout(LONG_TEST_S if is_long else TEST_S))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order that depends on the seed")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start long tests first: one that starts last keeps a single core busy while the others wait for it.

    pytest-xdist cuts the list into one run of tests for each worker, and an idle worker steals from the end of another
    one's run. So every run begins with its share of the long tests, and goes on with the others in their usual order.

    `--shuffle` mixes all of them instead, so that a test that needs another one to run before it fails.
    """
    seed = config.getoption("--shuffle")
    if seed is not None:
        random.Random(seed).shuffle(items)
        return
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    ordered: list[pytest.Item] = []
    for worker in range(workers):
        share = long[worker::workers]
        room = max(0, len(items) * (worker + 1) // workers - len(ordered) - len(share))
        ordered += share + others[:room]
        del others[:room]
    items[:] = ordered + others


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        terminalreporter.write_line(f"The order was that of --shuffle {seed}.")


@pytest.fixture(params=available())
def every_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test once on each set of kernels that this machine has; gives its name."""
    monkeypatch.setenv(VARIABLE, request.param)
    kernels.cache_clear()
    yield request.param
    kernels.cache_clear()


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing store is asked again at once."""
    monkeypatch.setattr(patient, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(patient, "LONGEST_PAUSE_S", 0.002)
