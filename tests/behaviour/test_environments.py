"""The commands where they are started otherwise than by a developer: by cron, in containers, with another locale."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import processes
from support.helpers import changed, state, write_sharded

import deltasync

UNKNOWN_USER = 54_321
ONE_CORE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What differs from the environment of the tests. A variable that is None is not set."""

    variables: Mapping[str, str | None] = field(default_factory=dict)
    is_bare: bool = False
    """Whether there are no other variables."""
    prefix: tuple[str, ...] = ()
    umask: int = -1
    user: int | None = None
    has_output: bool = True


def through_shell(script: str) -> tuple[str, ...]:
    return "sh", "-c", f'{script}"$@"', "sh"


SETTINGS = {
    "bare": Setting(is_bare=True, variables={"PATH": os.defpath}),
    "no such folders": Setting(variables=dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME"), "/proc/no")),
    "home is a file": Setting(variables={"HOME": os.devnull, "XDG_CACHE_HOME": None, "HF_HOME": None}),
    "ASCII": Setting(variables={"LC_ALL": "C", "PYTHONUTF8": "0", "TZ": "Asia/Kathmandu"}),
    "unknown locale": Setting(variables={"LC_ALL": "xx_XX.KOI8-R", "PYTHONUTF8": "0", "TZ": "No/Such_Zone"}),
    "narrow": Setting(variables={"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1", "COLUMNS": "10", "LINES": "x", "CI": "1"}),
    "variables of others": Setting(
        variables={
            **dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"), "http://[::1]:9"),
            "DELTASYNC_FEED": "/no/such/feed",
            "DELTASYNC_TOKEN": "t",
            "DELTASYNC_THREADS": "1",
            "RANK": "1",
        }
    ),
    "private": Setting(umask=0o077),
    "background": Setting(prefix=through_shell("trap '' INT HUP; exec <&-; exec ")),
    "no streams": Setting(prefix=through_shell("exec <&- >&- 2>&-; exec "), has_output=False),
    "one core": Setting(prefix=(sys.executable, "-c", ONE_CORE)),
    "unknown user": Setting(user=UNKNOWN_USER, variables={"HOME": None, "USER": None, "LOGNAME": None}),
}


def require_possible(setting: Setting, folder: Path) -> None:
    """Skip what this machine or this user cannot do."""
    if setting.prefix[-1:] == (ONE_CORE,) and not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not bind processes to cores")
    if setting.user is None:
        return
    if os.geteuid() != 0:
        pytest.skip("becomes another user, which only root can")
    command = [sys.executable, "-c", "import deltasync"]
    try:
        can_run = processes.run(command, **identity(setting), cwd="/").returncode == 0
    except OSError:
        can_run = False
    if not can_run:
        pytest.skip("other users may not enter the folder of this Python or of deltasync")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, setting.user, -1)


def identity(setting: Setting) -> dict[str, Any]:
    """The options of `Popen` for the user of a process."""
    return {} if setting.user is None else {"user": setting.user, "group": setting.user, "extra_groups": ()}


def environment_of(setting: Setting) -> dict[str, str]:
    variables = {**({} if setting.is_bare else os.environ), **setting.variables}
    return {name: value for name, value in variables.items() if value is not None}


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below `tmp_path`, which other users cannot enter."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("name", SETTINGS)
def test_commands_work_wherever_they_are_started(name: str, folder: Path) -> None:
    setting = SETTINGS[name]
    first = state()
    first["größe"] = first.pop("packed")
    second = changed(first)
    write_sharded(folder / "modèle-0", first)
    write_sharded(folder / "modèle-1", second)
    require_possible(setting, folder)

    def run(*arguments: str) -> str:
        done = processes.run(
            [*setting.prefix, sys.executable, "-m", "deltasync", *arguments],
            cwd=folder,
            env=environment_of(setting),
            umask=setting.umask,
            **identity(setting),
            text=False,
        )
        assert (done.returncode, done.stderr) == (0, b""), (arguments, done.stdout)
        assert b"\x1b" not in done.stdout
        assert bool(done.stdout) == setting.has_output
        return done.stdout.decode()

    run("show", "--help")
    run("publish", "feed", "modèle-0")
    run("publish", "feed", "modèle-1")
    shown = run("log", "feed", "--json")
    run("verify", "feed", "--deep")
    run("restore", "feed", "-o", "wiederhergestellt-ü")
    run("follow", "feed", "--target", "live", "--once")
    checks = run("doctor", "feed", "--json")

    for written in ("wiederhergestellt-ü", "live"):
        assert deltasync.digest(folder / written) == deltasync.digest(folder / "modèle-1")
    if setting.has_output:
        assert len(json.loads(shown)["versions"]) == 2
        assert json.loads(checks)["healthy"]
    if setting.umask >= 0:
        tops = [folder / name for name in ("feed", ".live.deltasync", "wiederhergestellt-ü")]
        made = [path for top in tops for path in top.rglob("*")]
        assert len(made) > 10
        assert [path for path in made if path.lstat().st_mode & setting.umask] == []
