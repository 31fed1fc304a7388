"""What trackers get. The real libraries, offline, are in tests/e2e/test_tracker_libraries.py."""

from typing import Any

import pytest

from deltasync.errors import InvalidInputError
from deltasync.replica.events import Advance, Seconds
from deltasync.trackers import event_metrics, to_mlflow, to_tensorboard, to_wandb
from deltasync.trainer.events import PublishEvent


def published(**fields: Any) -> PublishEvent:
    return PublishEvent(
        **{
            "kind": "delta", "version": 3, "step": 30, "elements": 1000, "changed": 10, "payload_bytes": 20,
            "held_s": 0.5, "encode_s": 1.0, "put_s": 2.0, "commit_s": 4.0, "coalesced": 0, "retries": 1, **fields,
        }
    )  # fmt: skip


MOVED = Advance(2, 3, ("delta",), 20, 10, Seconds(1, 2, 3, 4, 5, 0.25), committed_unix_s=100)


def test_numbers_of_a_publication() -> None:
    assert event_metrics(published()) == {
        "deltasync/version": 3,
        "deltasync/publish/bytes": 20,
        "deltasync/publish/changed_share": 0.01,
        "deltasync/publish/bits_per_changed": 16,
        "deltasync/publish/held_s": 0.5,
        "deltasync/publish/background_s": 7,
        "deltasync/publish/retries": 1,
    }
    first = event_metrics(published(kind="anchor", version=0, changed=None))
    assert first["deltasync/publish/bytes"] == 20
    assert "deltasync/publish/changed_share" not in first
    assert "deltasync/publish/bits_per_changed" not in event_metrics(published(changed=0))
    assert event_metrics(published(kind="anchor")) == {"deltasync/version": 3, "deltasync/anchor/bytes": 20}


def test_numbers_of_a_replica() -> None:
    assert event_metrics(MOVED, clock=lambda: 107.5) == {
        "deltasync/version": 3,
        "deltasync/replica/bytes": 20,
        "deltasync/replica/pause_s": 0.25,
        "deltasync/replica/total_s": 15,
        "deltasync/replica/lag_s": 7.5,
    }
    assert event_metrics(MOVED, clock=lambda: 99)["deltasync/replica/lag_s"] == 0, "a clock that is behind"


@pytest.mark.parametrize("make", [to_wandb, lambda thing: to_mlflow(thing, run_id="x"), to_tensorboard])
def test_something_else_is_refused_at_once(make: Any) -> None:
    with pytest.raises(InvalidInputError, match="this must be a"):
        make(object())
