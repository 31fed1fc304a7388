"""The examples, run as a newcomer would: as programs of their own, offline, and on a store of the reader's choice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deltasync.log.log import Log
from deltasync.store.opening import open_store
from deltasync.verify import verify

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
FEEDS = {
    "feed.py": ("",),
    "torch_loop.py": ("",),
    "transformers_trainer.py": ("model", "adapter", "merged"),
    "trl_transfer.py": ("",),
}
"""Each example, with the feeds that it leaves below the store that it is given."""
TOLD = {
    "feed.py": "rebuilt exactly: yes",
    "torch_loop.py": "is step 10, bit for bit: yes",
    "transformers_trainer.py": "restored exactly",
    "trl_transfer.py": "no sample is older than its label",
}


def run(name: str, *arguments: str, folder: Path) -> str:
    """What an example prints; it must succeed, and without a hub."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder), "COLUMNS": "120"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_none_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == FEEDS.keys() == TOLD.keys()


@pytest.mark.parametrize("name", FEEDS)
def test_example_on_a_temporary_store(name: str, tmp_path: Path) -> None:
    told = run(name, folder=tmp_path)
    assert TOLD[name] in told
    assert "NO" not in told.split()
    # Its own temporary folder is gone; torch leaves a cache.
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")] == []


@pytest.mark.parametrize("name", FEEDS)
def test_example_on_a_store_that_is_given(name: str, tmp_path: Path) -> None:
    run(name, str(tmp_path / "store"), folder=tmp_path)
    for feed in FEEDS[name]:
        store = open_store(tmp_path / "store" / feed)
        assert verify(store, deep=True).is_clean
        assert Log(store).require_head().version >= 1
