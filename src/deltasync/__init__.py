"""Lossless sparse weight deltas for reinforcement learning."""

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from deltasync.format.digest import StateDigest
from deltasync.inspection import Inspection, inspect
from deltasync.oneshot import apply, diff, state_digest

__version__ = "0.1.0"

__all__ = [
    "ConflictError",
    "CorruptError",
    "DeltasyncError",
    "FormatError",
    "Inspection",
    "InvalidInputError",
    "MismatchError",
    "NotFoundError",
    "StateDigest",
    "StoreError",
    "__version__",
    "apply",
    "diff",
    "inspect",
    "state_digest",
]
