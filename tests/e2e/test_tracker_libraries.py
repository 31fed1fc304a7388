"""The observers with the real libraries, offline: a publisher and a replica report, and the files are read back."""

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import LONG_S

from deltasync import Follower, PublisherOptions
from deltasync.torch import ModuleTarget, Publisher
from deltasync.trackers import Observer, to_mlflow, to_tensorboard, to_wandb

pytestmark = pytest.mark.e2e

EXPECTED = {
    "deltasync/publish/bytes",
    "deltasync/publish/held_s",
    "deltasync/replica/pause_s",
    "deltasync/replica/lag_s",
}


def needs(library: str) -> Any:
    missing = importlib.util.find_spec(library) is None and "CI" not in os.environ
    return pytest.mark.skipif(missing, reason=f"{library} is not installed: make .venv/e2e.stamp")


def train_and_follow(feed: Path, observer: Observer) -> None:
    """Three versions, each followed by a replica."""
    torch.manual_seed(0)
    model, copy = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    with Publisher(str(feed), options=PublisherOptions(observer=observer)) as publisher:
        for step in range(3):
            publisher.publish(model, step=step).wait(LONG_S)
            with Follower(str(feed), ModuleTarget(copy), observer=observer, beat_s=None) as follower:
                follower.advance()
            with torch.no_grad():
                model.weight[step] += 1
    assert torch.equal(copy.bias, model.bias)


@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "runs")) as writer:
        train_and_follow(tmp_path / "feed", to_tensorboard(writer))
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= EXPECTED
    assert [scalar.step for scalar in events.Scalars("deltasync/publish/bytes")] == [0, 1, 2]
    assert events.Scalars("deltasync/publish/changed_share")[-1].value == pytest.approx(64 / (65 * 64), rel=1e-3)


@needs("mlflow")
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    run_id = client.create_run(client.create_experiment("test")).info.run_id
    train_and_follow(tmp_path / "feed", to_mlflow(client, run_id=run_id))
    assert set(client.get_run(run_id).data.metrics) >= EXPECTED
    history = client.get_metric_history(run_id, "deltasync/publish/bytes")
    assert sorted(point.step for point in history) == [0, 1, 2]
    assert all(point.value > 0 for point in history)


@needs("wandb")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    import wandb

    run = wandb.init(project="test", dir=str(tmp_path))
    train_and_follow(tmp_path / "feed", to_wandb(run))
    assert run.step == 0, "the trainer's steps are its own"
    run.log({"loss": 1.0}, step=1)
    summary = dict(run.summary)
    run.finish()
    assert set(summary) >= EXPECTED
    assert summary["deltasync/version"] == 2
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb")), "nothing was sent"


def test_an_observer_that_fails_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Writer:
        def add_scalar(self, *_: Any) -> None:
            raise RuntimeError("the disk of the tracker is full")

    observer: Callable[..., None] = to_tensorboard(Writer())
    with Publisher(str(tmp_path / "feed"), options=PublisherOptions(observer=observer)) as publisher:
        assert publisher.publish(torch.nn.Linear(4, 4)).wait(LONG_S).version == 0
    assert "the disk of the tracker is full" in caplog.text
