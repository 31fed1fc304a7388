"""A disk that is full, or cannot be written: a clear error, and a feed that still verifies and goes on later."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from known import head_of, manifests, nth, publish, require_clean, require_exact, require_whole
from running import mounted, run
from safetensors.numpy import save_file
from support import LONG_S, processes
from support.helpers import State

import deltasync
from deltasync.errors import StoreError
from deltasync.store import open_store
from deltasync.store.local import LocalStore

PAGE_BYTES = 4096


def fill(folder: Path, *, free_pages: int) -> Path:
    """A file that leaves just so much room."""
    filler = folder / "filler"
    found = os.statvfs(folder)
    with filler.open("wb") as file:
        file.write(bytes((found.f_bavail - free_pages) * found.f_frsize))
    assert os.statvfs(folder).f_bavail == free_pages
    return filler


@pytest.mark.parametrize("anchor", [False, True], ids=["delta", "delta and late anchor"])
def test_disk_full(tmp_path: Path, anchor: bool) -> None:
    """With ever more room left, so that each write of a publication is the one that does not fit."""
    states: dict[int, State] = {0: nth(0), 1: nth(1)}
    errors = 0
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=512k", "none") as disk:
        store = open_store(disk / "feed")
        for n in states:
            publish(store, n)
        for free_pages in range(8):
            filler = fill(disk, free_pages=free_pages)
            before, head = manifests(store), head_of(store)
            try:
                publish(store, head + 1, anchor=anchor)
            except StoreError as error:
                transient, message = error.transient, str(error)
                assert transient is False
                assert "disk is full" in message
                errors += 1
            require_clean(store)
            assert before.items() <= manifests(store).items()
            assert not [path for path in disk.rglob(".*") if path.is_file()], "nothing is left behind"
            if head_of(store) > head:
                states[head + 1] = nth(head + 1)
            filler.unlink()
        assert errors >= (3 if anchor else 2)
        assert errors < 8, "in the end there was room"
        states[head_of(store) + 1] = nth(head_of(store) + 1)
        publish(store, head_of(store) + 1)
        require_whole(store, states)


def test_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=512k", "none") as disk:
        store = LocalStore(disk / "feed")
        publish(store, 0)
        assert run("mount", "-o", "remount,ro", disk).returncode == 0
        for fresh in (store, LocalStore(disk / "feed"), LocalStore(disk / "new")):
            with pytest.raises(StoreError, match="read-only") as caught:
                publish(fresh, 1)
            assert not caught.value.transient
            assert caught.value.hint is not None
        require_clean(store)
        require_exact(store, {0: nth(0)})
        assert run("mount", "-o", "remount,rw", disk).returncode == 0
        publish(store, 1)
        require_whole(store, {0: nth(0), 1: nth(1)})


# Weights that are written through mappings: a page without space behind it is SIGBUS.

MODEL_BYTES = 6 << 20
DISK = ("-t", "tmpfs", "-o", "size=10m", "none")


def large_feed(path: Path) -> LocalStore:
    store = LocalStore(path)
    tensors = {"w": np.random.default_rng(0).integers(0, 1 << 16, MODEL_BYTES // 2, np.uint16)}
    save_file(tensors, path.with_name("c0.safetensors"))
    deltasync.publish(store, path.with_name("c0.safetensors"))
    return store


def outcomes(*commands: Sequence[str | Path]) -> list[tuple[int, str]]:
    """The exit codes and errors of commands that run at the same time."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with ExitStack() as ended:
        programs = [[sys.executable, "-m", "deltasync", *command] for command in commands]
        both = [ended.enter_context(processes.running(program, **pipes)) for program in programs]
        errors = [process.communicate(timeout=LONG_S)[1] for process in both]
    return [(process.returncode, error) for process, error in zip(both, errors, strict=True)]


UNCHECKED = """
import sys
from deltasync import checkpoint
checkpoint.require_space = lambda target, nbytes: None
from deltasync.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
"""A command that does not see at its start that there is too little space: others take it in the meantime."""


@pytest.mark.parametrize("command", ["restore", "follow", "mirror"])
def test_a_disk_that_becomes_full_is_an_error_and_not_a_signal(command: str, tmp_path: Path) -> None:
    large_feed(tmp_path / "feed")
    with mounted(tmp_path / "small", *DISK) as disk:
        (disk / "filler").write_bytes(bytes(5 << 20))
        arguments = {
            "restore": ("restore", tmp_path / "feed", "-o", disk / "out"),
            "follow": ("follow", tmp_path / "feed", "--target", disk / "out", "--once"),
            "mirror": ("follow", tmp_path / "feed", "--target", tmp_path / "x", "--mirror", disk / "out", "--once"),
        }[command]
        done = processes.run([sys.executable, "-c", UNCHECKED, *arguments])
        assert done.returncode == 1, f"{done.returncode}: {done.stderr}"
        assert "there is not enough space: No space left on device" in done.stderr
        assert "free some space" in done.stderr
        assert [path.name for path in disk.iterdir() if "lock" not in path.name and path.is_file()] == ["filler"]
        assert not (disk / "out").exists()


def test_two_restores_at_once_on_a_small_disk(tmp_path: Path) -> None:
    """There is space for one, which both find at their start. Each may take a part of it, so that neither fits."""
    large_feed(tmp_path / "feed")
    for round_ in range(3):
        with mounted(tmp_path / f"small-{round_}", *DISK) as disk:
            ended = sorted(outcomes(*(["restore", tmp_path / "feed", "-o", disk / name] for name in ("one", "two"))))
            codes = [code for code, _ in ended]
            assert codes in ([0, 1], [1, 1]), ended
            assert all("free some space" in err for code, err in ended if code == 1), ended
            whole = [path for path in disk.iterdir() if path.is_dir()]
            assert len(whole) == codes.count(0), "nothing is left of one that failed"
            if not whole:
                assert outcomes(["restore", tmp_path / "feed", "-o", disk / "one"]) == [(0, "")]


def test_two_restores_at_once_that_both_do_not_fit(tmp_path: Path) -> None:
    large_feed(tmp_path / "feed")
    with mounted(tmp_path / "small", *DISK) as disk:
        (disk / "filler").write_bytes(bytes(5 << 20))
        for code, err in outcomes(*(["restore", tmp_path / "feed", "-o", disk / name] for name in ("one", "two"))):
            assert (code, "free some space" in err) == (1, True), err
        assert [path.name for path in disk.iterdir()] == ["filler"]
