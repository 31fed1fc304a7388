"""One version as torch tensors, for the checkpoint engines of other frameworks."""

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support import LONG_S

from deltasync.errors import InvalidInputError
from deltasync.torch import Publisher
from deltasync.torch.held import HeldVersion


def publish(feed: Path, *seeds: int) -> None:
    with Publisher(feed) as publisher:
        for seed in seeds:
            publisher.publish(state(seed)).wait(LONG_S)


def state(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 8), float(seed), dtype=torch.bfloat16)}


def test_versions_are_fetched_one_after_another(tmp_path: Path) -> None:
    with closing(HeldVersion(str(tmp_path / "feed"), wait_s=0.1, device="cpu")) as held:
        with pytest.raises(InvalidInputError, match="no version is held"):
            next(held.tensors())
        for version, seed in enumerate((5, 6, 7)):
            publish(tmp_path / "feed", seed)
            assert held.advance(version).version == version
            assert torch.equal(dict(held.tensors())["weight"], state(seed)["weight"])


def test_a_feed_that_was_made_anew_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    publish(feed, 1, 2)
    with closing(HeldVersion(str(feed), wait_s=0.1, device="cpu")) as held:
        held.advance()
        shutil.rmtree(feed)
        publish(feed, 3, 4)
        assert held.advance().version == 1
        assert torch.equal(dict(held.tensors())["weight"], state(4)["weight"])
