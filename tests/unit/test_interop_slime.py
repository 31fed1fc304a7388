"""The function for slime's hook, called as slime 0.3.1 calls it."""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.helpers import changed, state, write_sharded
from test_interop_folder import restored, same_bits, write_delta

from deltasync.errors import InvalidInputError, MismatchError
from deltasync.feed.log import Log
from deltasync.interop import slime
from deltasync.store import open_store


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    write_sharded(tmp_path / "base", state())
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("DELTASYNC_FEED", str(tmp_path / "feed"))
    monkeypatch.setenv("DELTASYNC_WAIT", "1")
    yield Namespace(
        update_weight_mode="delta",
        update_weight_transport="disk",
        update_weight_disk_dir=str(tmp_path / "run"),
        hf_checkpoint=str(tmp_path / "base"),
    )
    for importer in slime._importers.values():
        importer.close()
    slime._importers.clear()


def head_version(tmp_path: Path) -> int:
    return Log(open_store(tmp_path / "feed")).require_head().version


def test_a_run_in_delta_mode_and_one_that_begins_again(tmp_path: Path, arguments: Namespace) -> None:
    first, second = changed(state(), seed=1), changed(state(), seed=2)
    for run in (first, second):
        # slime's first call is for the folder of all versions, which is empty then.
        slime.publish(arguments, arguments.update_weight_disk_dir, [])
        folder = write_delta(tmp_path / "run", 1, state(), run, "overwrite", "xxh3-128")
        slime.publish(arguments, str(folder), [])
        assert same_bits(restored(str(tmp_path / "feed"), tmp_path / "out"), run)
        for file in sorted(folder.iterdir()):
            file.unlink()
        folder.rmdir()
    assert head_version(tmp_path) == 3


def test_a_run_in_full_mode(tmp_path: Path, arguments: Namespace) -> None:
    arguments.update_weight_mode = "full"
    for i in (1, 2):
        write_sharded(tmp_path / "run" / f"weight_v{i:06d}", changed(state(), seed=i))
        slime.publish(arguments, str(tmp_path / "run" / f"weight_v{i:06d}"), [])
        assert same_bits(restored(str(tmp_path / "feed"), tmp_path / "out"), changed(state(), seed=i))
    assert head_version(tmp_path) == 1


@pytest.mark.parametrize("by", ["environment", "torch"])
def test_only_rank_0_publishes(tmp_path: Path, arguments: Namespace, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    if by == "torch":
        distributed = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 3)
        monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
    else:
        monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
        monkeypatch.setenv("RANK", "3")
    slime.publish(arguments, arguments.update_weight_disk_dir, [])
    assert not (tmp_path / "feed").exists()


def test_a_call_that_is_not_slimes_is_refused_at_once(tmp_path: Path, arguments: Namespace) -> None:
    root = arguments.update_weight_disk_dir
    with pytest.raises(InvalidInputError, match="have no update_weight_mode"):
        slime.publish(Namespace(**{k: v for k, v in vars(arguments).items() if k != "update_weight_mode"}), root)
    with pytest.raises(InvalidInputError, match="--update-weight-transport disk"):
        slime.publish(Namespace(**{**vars(arguments), "update_weight_transport": "nccl"}), root)
    with pytest.raises(InvalidInputError, match="must give a folder weight_v"):
        slime.publish(arguments, str(tmp_path / "elsewhere"))
    del os.environ["DELTASYNC_FEED"]
    with pytest.raises(InvalidInputError, match="DELTASYNC_FEED is not set"):
        slime.publish(arguments, root)
    assert not (tmp_path / "feed").exists()


def test_a_damaged_folder_ends_the_run_and_leaves_the_feed(tmp_path: Path, arguments: Namespace) -> None:
    slime.publish(arguments, arguments.update_weight_disk_dir, [])
    folder = write_delta(tmp_path / "run", 1, changed(state(), seed=5), changed(state(), seed=6))
    with pytest.raises(MismatchError, match="adler32"):
        slime.publish(arguments, str(folder), [])
    assert head_version(tmp_path) == 0
