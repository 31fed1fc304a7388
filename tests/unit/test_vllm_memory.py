"""Folders in shared memory: private, gone at the end, and swept once their process is dead."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync.vllm.settings import memory_folder

_HOLDER = """
import sys, time
from pathlib import Path
from deltasync.vllm.settings import memory_folder
with memory_folder(Path(sys.argv[1])) as folder:
    (folder / "mirror.safetensors").write_bytes(b"large")
    print(folder, flush=True)
    time.sleep(600)
"""


def folders(place: Path) -> set[Path]:
    return {found for found in place.iterdir() if found.is_dir()}


def test_each_has_its_own(tmp_path: Path) -> None:
    with memory_folder(tmp_path) as one, memory_folder(tmp_path) as two:
        assert folders(tmp_path) == {one, two}
        # Nobody else may look at weights, or write what a server is to become.
        assert one.stat().st_mode & 0o077 == 0
    assert folders(tmp_path) == set()


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no folder in shared memory")
def test_in_shared_memory_by_default() -> None:
    with memory_folder() as folder:
        assert Path("/dev/shm") in folder.parents
    assert not folder.exists()


def test_what_a_killed_process_left_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            held = Path(holder.stdout.readline().strip())
            with memory_folder(tmp_path) as ours:
                assert folders(tmp_path) == {held, ours}
        finally:
            holder.send_signal(signal.SIGKILL)
    assert folders(tmp_path) == {held}
    foreign = tmp_path / "deltasync-other"
    foreign.mkdir()
    with memory_folder(tmp_path) as ours:
        assert folders(tmp_path) == {foreign, ours}
