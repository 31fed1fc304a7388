"""A copy of the source tree in a temporary folder, in which mutants are tried. The working tree is never touched."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from support import LONG_S, processes

from .mutant import Mutant

ROOT = Path(__file__).parents[2]

KILLED = "killed"
SURVIVED = "survived"
UNKNOWN = "unknown"
"""The mutant does not apply or does not build, or its killers did not run to their end."""

_LEFT_OUT = (".*", "__pycache__", "build", "dist", "deltasync-demo")
_CORE = "_native"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)
_TESTS_FAILED = 1
"""The exit code of pytest if tests ran and some of them failed."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of a mutant: `killer` is the first test that failed, `note` says why it is not known."""

    mutant: str
    result: str
    killer: str | None
    seconds: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class TestRun:
    """A run of tests: its exit code, negative for a signal, the first test that failed, and the output."""

    code: int
    failed: str | None
    output: str


class BuildError(Exception):
    """The native core cannot be built."""


class Sandbox:
    """The copy, an environment that imports it instead of the installed package, and builds of its native core."""

    def __init__(self) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="deltasync-mutants-", ignore_cleanup_errors=True)
        self._folder = Path(self._held.name)
        self._tree = self._folder / "tree"
        self._python = self._folder / "venv" / "bin" / "python"
        self._runner: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        shutil.copytree(ROOT, self._tree, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        installed = importlib.util.find_spec(f"deltasync.kernels.{_CORE}")
        if installed is not None and installed.origin is not None:
            self._install_core(Path(installed.origin))
        # What the tests need is installed here already. Paths that a .pth file adds have none of their own read, so
        # this does not bring the editable deltasync.
        venv.create(self._folder / "venv", symlinks=True)
        packages = [path for path in sys.path if path.endswith("site-packages")]
        site = sysconfig.get_path("purelib", "venv", vars={"base": str(self._folder / "venv")})
        Path(site, "packages.pth").write_text("\n".join([str(self._tree / "src"), *packages]))
        others = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        self._runner = processes.start(
            [str(self._python), "-m", "mutants.runner"],
            cwd=self._tree,
            # A mutant that lets a test wait in vain is killed sooner.
            env={**others, "PYTHONPATH": str(self._tree / "tests"), "DELTASYNC_TEST_LONG_S": "60"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._runner is not None:
            processes.stop(self._runner)
            for pipe in (self._runner.stdin, self._runner.stdout):
                assert pipe is not None
                pipe.close()
        self._held.cleanup()

    def run_tests(self, ids: Iterable[str]) -> TestRun:
        """Run these tests on the copy as it is, until the first one fails."""
        runner = self._runner
        assert runner is not None, "the sandbox is not open"
        assert runner.stdin is not None
        assert runner.stdout is not None
        # With a folder for their files that is removed together with the sandbox.
        arguments = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={self._folder / 'basetemp'}", *ids]
        print(json.dumps(arguments), file=runner.stdin, flush=True)
        answer = runner.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that runs the tests has ended with code {runner.wait(LONG_S)}")
        code, output = json.loads(answer)
        failed = _FAILED.search(output)
        return TestRun(code, None if failed is None else failed[1], output)

    def try_out(self, mutant: Mutant) -> Trial:
        """Apply a mutant, run its killers, and take it back."""
        began = time.monotonic()
        result, killer, note = UNKNOWN, None, ""
        try:
            with self._applied(mutant):
                run = self.run_tests(mutant.killers)
        except ValueError as error:
            note = f"it does not apply: {error}"
        except BuildError as error:
            note = f"it does not build: {error}"
        else:
            if run.code == 0:
                result = SURVIVED
            elif run.code == _TESTS_FAILED and run.failed is not None:
                result, killer = KILLED, run.failed
            else:
                note = f"its killers ended with code {run.code}: {run.output[-2000:]}"
        return Trial(mutant.name, result, killer, round(time.monotonic() - began, 1), note)

    def build_core(self) -> None:
        """Build the native core of the copy. After the first time only what has changed is compiled."""
        build = self._folder / "build"
        if not build.exists():
            tools = self._folder / "tools"
            needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "--no-deps"]
            constraints = {"PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
            _run([*pip, *(name for name in needed if name.startswith("nanobind"))], **constraints)
            # Without the last optimizations: they take most of the time, and change no result.
            settings = {
                "CMAKE_CXX_FLAGS_RELEASE": "-O1",
                "Python_EXECUTABLE": str(self._python),
                "nanobind_DIR": str(tools / "nanobind" / "cmake"),
            }
            _run(["cmake", "-S", str(self._tree), "-B", str(build), *(f"-D{k}={v}" for k, v in settings.items())])
        _run(["cmake", "--build", str(build)])
        self._install_core(next(build.glob(f"{_CORE}.*")))

    @contextmanager
    def _applied(self, mutant: Mutant) -> Iterator[None]:
        path = self._tree / mutant.path
        text = path.read_text()
        cores = {core: core.read_bytes() for core in self._kernels.glob(f"{_CORE}.*.so")} if mutant.is_native else {}
        _write(path, mutant.applied_to(text))
        try:
            if mutant.is_native:
                self.build_core()
            yield
        finally:
            _write(path, text)
            for core, data in cores.items():
                core.write_bytes(data)

    @property
    def _kernels(self) -> Path:
        return self._tree / "src" / "deltasync" / "kernels"

    def _install_core(self, core: Path) -> None:
        shutil.copyfile(core, self._kernels / core.name)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    if path.suffix == ".py":
        # Python finds compiled code by size and whole seconds, which may be the same for the mutant.
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def _run(command: list[str], **environment: str) -> None:
    done = processes.run(command, env={**os.environ, **environment}, stderr=subprocess.STDOUT, timeout_s=4 * LONG_S)
    if done.returncode:
        raise BuildError(done.stdout[-2000:])
