"""A feed as torch tensors: versions one after another, and the replicas that serve them."""

import shutil
from pathlib import Path

import pytest
import torch
from support import LONG_S

from deltasync import FolderTarget, Follower, InvalidInputError
from deltasync.torch import FeedReader, Publisher


def publish(feed: Path, *seeds: int) -> None:
    with Publisher(feed) as publisher:
        for seed in seeds:
            publisher.publish(state(seed)).wait(LONG_S)


def state(seed: int) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((4, 8), float(seed), dtype=torch.bfloat16)}


def test_versions_are_fetched_one_after_another(tmp_path: Path) -> None:
    with FeedReader(str(tmp_path / "feed"), wait_s=0.1, device="cpu") as reader:
        with pytest.raises(InvalidInputError, match="no version is held"):
            next(reader.tensors())
        for version, seed in enumerate((5, 6, 7)):
            publish(tmp_path / "feed", seed)
            assert reader.advance(version).version == version
            assert torch.equal(dict(reader.tensors())["weight"], state(seed)["weight"])


def test_a_feed_that_was_made_anew_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    feed = tmp_path / "feed"
    publish(feed, 1, 2)
    with FeedReader(str(feed), wait_s=0.1, device="cpu") as reader:
        reader.advance()
        shutil.rmtree(feed)
        publish(feed, 3, 4)
        assert reader.advance().version == 1
        assert torch.equal(dict(reader.tensors())["weight"], state(4)["weight"])


def test_the_newest_version_and_who_serves_it(tmp_path: Path) -> None:
    feed, target = tmp_path / "feed", FolderTarget(tmp_path / "live")
    with FeedReader(feed) as reader:
        assert reader.head() is None
        assert reader.serving() == {}
        publish(feed, 1, 2)
        with Follower(feed, target, replica="r-1") as follower:
            follower.advance(to=0)
            assert reader.serving() == {"r-1": 0}
        head = reader.head()
        assert head is not None
        assert head.version == 1
