"""Lossless sparse weight deltas from a trainer to its inference replicas, through an object store.

These names, and those of `deltasync.torch`, `deltasync.transformers`, `deltasync.trl` and `deltasync.testing`, are
public. Everything else is internal. Importing this module needs NumPy, not torch.
"""

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    EngineError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    RankError,
    StoreError,
)
from deltasync.feed.prune import Pruning, plan_prune, prune
from deltasync.feed.replay import restore
from deltasync.feed.verify import Verification, verify
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.oneshot import Inspection, apply, diff, digest, inspect
from deltasync.parallel import set_threads
from deltasync.replica.events import Advance, Status
from deltasync.replica.folder import FolderTarget
from deltasync.replica.follower import Follower
from deltasync.replica.target import Damage, Staged, Target
from deltasync.store import open_store
from deltasync.store.protocol import Store
from deltasync.trainer.anchoring import AnchorPolicy
from deltasync.trainer.checkpoint import publish
from deltasync.trainer.events import Publication, PublishEvent
from deltasync.trainer.publisher import PublisherOptions

__version__ = "0.1.0"

__all__ = [
    "Advance",
    "AnchorPolicy",
    "BaseRef",
    "ConflictError",
    "CorruptError",
    "Damage",
    "DeltasyncError",
    "EngineError",
    "FolderTarget",
    "Follower",
    "FormatError",
    "Inspection",
    "InvalidInputError",
    "Manifest",
    "MismatchError",
    "NotFoundError",
    "Pruning",
    "Publication",
    "PublishEvent",
    "PublisherOptions",
    "RankError",
    "Staged",
    "StateDigest",
    "Status",
    "Store",
    "StoreError",
    "Target",
    "Verification",
    "__version__",
    "apply",
    "diff",
    "digest",
    "inspect",
    "open_store",
    "plan_prune",
    "prune",
    "publish",
    "restore",
    "set_threads",
    "verify",
]
