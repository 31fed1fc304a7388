"""Lossless sparse weight deltas for reinforcement learning."""

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
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import BaseRef, Manifest
from deltasync.inspection import Inspection, inspect
from deltasync.oneshot import apply, diff, state_digest
from deltasync.prune import Pruning, plan_prune, prune
from deltasync.publish import publish_checkpoint
from deltasync.restore import restore
from deltasync.store.opening import open_store
from deltasync.store.protocol import Store
from deltasync.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "BaseRef",
    "ConflictError",
    "CorruptError",
    "DeltasyncError",
    "EngineError",
    "FormatError",
    "Inspection",
    "InvalidInputError",
    "Manifest",
    "MismatchError",
    "NotFoundError",
    "Pruning",
    "RankError",
    "StateDigest",
    "Store",
    "StoreError",
    "Verification",
    "__version__",
    "apply",
    "diff",
    "inspect",
    "open_store",
    "plan_prune",
    "prune",
    "publish_checkpoint",
    "restore",
    "state_digest",
    "verify",
]
