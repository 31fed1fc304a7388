"""Torch models: publish their weights, and overwrite them in place."""

from deltasync.torch.module import ModuleTarget
from deltasync.torch.publisher import Publisher
from deltasync.torch.reader import FeedReader
from deltasync.torch.sharded import ShardedPublisher

__all__ = ["FeedReader", "ModuleTarget", "Publisher", "ShardedPublisher"]
