"""Folders of deltas against code of others: `cwtrain` writes and applies them, and every bit is compared."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.helpers import State, changed, state, write_sharded

import deltasync
from deltasync.checkpoint import open_checkpoint
from deltasync.cli import main as cli
from deltasync.interop.folder import list_folders

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        importlib.util.find_spec("cwtrain") is None and "CI" not in os.environ,
        reason="cwtrain is not installed: make .venv/e2e.stamp",
    ),
]


def bits(path: Path) -> dict[str, bytes]:
    weights = open_checkpoint(path).weights
    return {spec.name: array.tobytes() for spec, array in zip(weights.layout.tensors, weights.arrays, strict=True)}


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """c0 to c4, one step apart, the third equal to the second."""
    tensors: State = state()
    for i in range(5):
        write_sharded(tmp_path / f"c{i}", tensors)
        tensors = tensors if i == 1 else changed(tensors, seed=i)
    return [tmp_path / f"c{i}" for i in range(5)]


def test_folders_that_cwtrain_writes_become_versions(tmp_path: Path, checkpoints: list[Path]) -> None:
    from cwtrain.hotload.delta import write_delta

    for i in range(1, 5):
        write_delta(
            checkpoints[i - 1],
            checkpoints[i],
            tmp_path / "run" / f"weight_v{i:06d}",
            version=f"{i:06d}",
            base_version=f"{i - 1:06d}",
            shard_bytes=300,
        )
    feed = str(tmp_path / "feed")
    assert cli.main(["import", str(tmp_path / "run"), feed, "--base", str(checkpoints[0])]) == 0
    for i, checkpoint in enumerate(checkpoints):
        deltasync.restore(feed, tmp_path / f"r{i}", version=i)
        assert bits(tmp_path / f"r{i}") == bits(checkpoint)
    assert (tmp_path / "r4" / "config.json").read_bytes() == (checkpoints[0] / "config.json").read_bytes()


def test_cwtrain_applies_the_folders_of_a_feed(tmp_path: Path, checkpoints: list[Path]) -> None:
    from cwtrain.hotload import MirrorError, WeightMirror, inspect_snapshot

    feed, root = str(tmp_path / "feed"), tmp_path / "folders"
    for checkpoint in checkpoints:
        deltasync.publish(feed, checkpoint)
    assert cli.main(["export", feed, str(root), "--format", "xor"]) == 0
    folders = list_folders(root)
    assert list(folders) == [0, 1, 2, 3, 4]
    assert inspect_snapshot(folders[0]).type.name == "FULL"
    assert inspect_snapshot(folders[1]).type.name == "INCREMENTAL"
    mirror = WeightMirror.create(folders[0], tmp_path / "mirror", version="0")
    for i in range(1, 5):
        report = mirror.apply_delta(folders[i])
        assert report.version == f"{i:06d}"
        assert bits(tmp_path / "mirror") == bits(checkpoints[i])
    with pytest.raises(MirrorError, match="applies to version"):
        mirror.apply_delta(folders[1])


def test_an_exporter_and_an_importer_follow_each_other(tmp_path: Path, checkpoints: list[Path]) -> None:
    """A feed, its folders, and a feed of the folders, each written by a process of its own as versions appear."""
    feed, root, copy = str(tmp_path / "feed"), str(tmp_path / "folders"), str(tmp_path / "copy")
    deltasync.publish(feed, checkpoints[0])
    command = [sys.executable, "-m", "deltasync"]
    processes.run([*command, "export", feed, root], check=True)
    base = str(tmp_path / "folders" / "weight_v000000")
    exporting = [*command, "export", feed, root, "--follow", "--json"]
    importing = [*command, "import", root, copy, "--base", base, "--follow", "--json"]
    with (
        processes.running(exporting, stdout=subprocess.PIPE) as exporter,
        processes.running(importing, stdout=subprocess.PIPE) as importer,
    ):
        for checkpoint in checkpoints[1:]:
            deltasync.publish(feed, checkpoint)
        lines = [json.loads(importer.stdout.readline()) for _ in checkpoints]
        assert [line["version"] for line in lines] == [0, 1, 2, 3, 4]
        for process in (exporter, importer):
            process.terminate()
        assert [process.wait(LONG_S) for process in (exporter, importer)] == [0, 0]
    deltasync.restore(copy, tmp_path / "out")
    assert bits(tmp_path / "out") == bits(checkpoints[4])
