"""No wait of a test is without a limit. A test that hangs all the same fails, and leaves no process behind."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import processes
from support.replicas import wait_until

TESTS = Path(__file__).parents[1]
FREE = (
    "simulation",  # Virtual time: nothing waits, and the scheduler finds what would wait forever.
    "unit/test_simulation_parts.py",
    "e2e/separate_hosts",  # Programs that run where `support` is not. A test that starts them ends them.
    "e2e/installed_package.py",
)
SOURCES = {
    str(path.relative_to(TESTS)): path
    for path in sorted(TESTS.rglob("*.py"))
    if not any(path.is_relative_to(TESTS / free) for free in FREE)
}
WAITS = {"acquire", "communicate", "get", "join", "result", "wait"}
"""Methods that wait without end if they are given no limit."""

CONNECTS = {"HTTPConnection", "create_connection", "urlopen"}
"""What does so for an answer."""

STARTS = {"Popen", "os.popen", "os.system"} | {
    f"subprocess.{name}" for name in ("Popen", "call", "check_call", "check_output", "getoutput", "run")
}
"""What starts a process beside `support.processes`."""


def found_in(source: str) -> Iterator[str]:
    """Calls that start a process in their own way, and calls that may wait without end."""
    tree = ast.parse(source)
    # A coroutine that waits leaves the others their limits.
    awaited = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Await)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        function = ast.unparse(node.func)
        owner, _, name = function.rpartition(".")
        may_wait = name in CONNECTS or (owner and name in WAITS and (not node.args or name == "communicate"))
        # Without a name: `**options` may have a limit.
        is_limited = any(keyword.arg in ("timeout", "timeout_s", None) for keyword in node.keywords)
        if function in STARTS:
            yield f"line {node.lineno}: {ast.unparse(node)}: use support.processes"
        elif may_wait and not is_limited:
            yield f"line {node.lineno}: {ast.unparse(node)}: it has no limit"


@pytest.mark.parametrize("name", SOURCES)
def test_every_wait_of_a_test_has_a_limit(name: str) -> None:
    found = list(found_in(SOURCES[name].read_text()))
    if name == "support/processes.py":
        assert len(found) == 1, "this is where processes are started"
    else:
        assert found == []


@pytest.mark.parametrize(
    "wrong",
    [
        "with subprocess.Popen(command) as process: pass",
        "with Popen(command) as process: pass",
        "subprocess.run(command, timeout=3)",
        "subprocess.check_output(command)",
        "os.system(command)",
        "process.wait()",
        "process.communicate()",
        "process.communicate(text)",
        "thread.join()",
        "queue.get()",
        "lock.acquire()",
        "publish(to, 0).wait()",
        "pool.submit(work).result()",
        "urllib.request.urlopen(url)",
        "http.client.HTTPConnection(address)",
    ],
)
def test_what_has_no_limit_is_found(wrong: str) -> None:
    assert len(list(found_in(wrong))) == 1


@pytest.mark.parametrize(
    "right",
    [
        "with processes.running(command) as process: pass",
        "process.wait(LONG_S)",
        "process.communicate(timeout=LONG_S)",
        "process.communicate(text, timeout=LONG_S)",
        "thread.join(LONG_S)",
        "', '.join(names)",
        "names.get(name)",
        "lock.acquire(timeout=LONG_S)",
        "wait()",
        "async def main(): await event.wait()",
        "urllib.request.urlopen(url, timeout=LONG_S)",
    ],
)
def test_what_has_a_limit_is_not_found(right: str) -> None:
    assert list(found_in(right)) == []


def test_a_failure_shows_what_a_process_said_last() -> None:
    def fail() -> None:
        script = r"printf 'first\nsecond\n'; exec sleep 5000"
        with processes.running(["sh", "-c", script], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == "first\n"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail()
    [note] = caught.value.__notes__
    assert note.endswith(f"ended with {-signal.SIGTERM}. It said last:\nsecond\n")


HANGS = """
import subprocess
import threading
from pathlib import Path

import pytest
from support import processes

FOLDER = Path(__file__).parent

@pytest.fixture
def a_process():
    script = "sleep 5000 & echo $$ $!; wait"
    with processes.running(["sh", "-c", script], stdout=subprocess.PIPE) as process:
        (FOLDER / "pids").write_text(process.stdout.readline())
        yield

@pytest.fixture
def a_hanging_end():
    yield
    stand_still()

def stand_still_beside_it():
    threading.Event().wait()

def stand_still():
    threading.Event().wait()

@pytest.mark.timeout(3)
def test_hangs({fixture}):
    threading.Thread(target=stand_still_beside_it, daemon=True).start()
    {hang}

def test_comes_next():
    pass
"""
TWICE = """try:
        stand_still()
    finally:
        stand_still()"""
"""It hangs again while it cleans up."""


def run_tests(folder: Path, code: str, *options: str, **environment: str) -> tuple[int, str]:
    """The exit code and the output of a run of tests."""
    (folder / "test_generated.py").write_text(code)
    # With the settings and hooks of all tests.
    settings = ["-c", TESTS.parent / "pyproject.toml", "--rootdir", folder, "-p", "conftest", "-p", "no:cacheprovider"]
    others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = processes.run(
        [sys.executable, "-m", "pytest", *settings, *options, folder],
        cwd=folder,
        env={**others, "PYTHONPATH": str(TESTS), **environment},
    )
    return done.returncode, done.stdout + done.stderr


def is_running(pid: int) -> bool:
    """A process that has ended, and that no one has waited for, is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("options", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_a_test_that_hangs_fails_and_ends_what_it_has_started(tmp_path: Path, options: tuple[str, ...]) -> None:
    code, output = run_tests(tmp_path, HANGS.format(fixture="a_process", hang="stand_still()"), *options)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 1 passed" in output
    assert "Timeout (>3.0s)" in output
    for function in ("stand_still", "stand_still_beside_it"):
        assert re.search(rf"\b{function}$|in {function}\b", output, re.MULTILINE), output
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(started) == 2
    wait_until(lambda: not any(is_running(pid) for pid in started))


def test_what_hangs_after_a_test_has_failed_is_an_error(tmp_path: Path) -> None:
    """pytest cancels the limits at a failure."""
    code, output = run_tests(tmp_path, HANGS.format(fixture="a_hanging_end", hang="assert False"))
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 1 passed, 1 error" in output
    assert "Timeout (>3.0s)" in output


def test_a_test_that_hangs_after_its_limit_does_not_stop_the_others(tmp_path: Path) -> None:
    """Nothing cleans up then: the process of the test ends, and another one goes on."""
    code, output = run_tests(tmp_path, HANGS.format(fixture="", hang=TWICE), "-n", "1", DELTASYNC_TEST_LONG_S="1")
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert "1 failed, 1 passed" in output
    assert re.search(r"worker '?gw0'? crashed while running '?test_generated.py::test_hangs", output), output
    for function in ("stand_still", "stand_still_beside_it"):
        assert re.search(rf"in {function}$", output, re.MULTILINE), output
