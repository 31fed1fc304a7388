"""Lossless sparse weight deltas from a trainer to its inference replicas, through an object store.

These names, and those of `deltasync.torch`, `deltasync.transformers`, `deltasync.trl`, `deltasync.interop`,
`deltasync.sglang`, `deltasync.trackers` and `deltasync.testing`, are public. Everything else is internal. They need
NumPy, not torch. Each is imported when it is first used, so that a command that is interrupted while it starts can end
without a traceback.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    # Refused as a whole: a lock that does nothing would let two processes write the same file.
    raise ImportError(
        "deltasync does not run on Windows, which lacks the file locks and the synced folders that it relies on; "
        "use Linux or macOS, or Linux under WSL"
    )

if TYPE_CHECKING:
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
    from deltasync.feed.pins import pin, pins, unpin
    from deltasync.format.digest import StateDigest
    from deltasync.format.manifest import BaseRef, Manifest
    from deltasync.format.sealed import Pin
    from deltasync.oneshot import Inspection, apply, diff, digest, inspect
    from deltasync.parallel import set_threads
    from deltasync.replica.events import Advance, Status
    from deltasync.replica.folder import FolderTarget
    from deltasync.replica.follower import Follower
    from deltasync.replica.target import Damage, Gate, Staged, Target
    from deltasync.store import open_store
    from deltasync.store.protocol import Store
    from deltasync.trainer.checkpoint import publish
    from deltasync.trainer.events import Publication, PublisherMetrics, PublishEvent
    from deltasync.trainer.publisher import PublisherOptions
    from deltasync.trainer.schedule import AnchorPolicy
    from deltasync.upkeep.compact import compact
    from deltasync.upkeep.prune import Pruning, Retention, plan_prune, prune
    from deltasync.upkeep.relay import Relayed, relay
    from deltasync.upkeep.restore import restore
    from deltasync.upkeep.verify import Verification, verify

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
    "Gate",
    "Inspection",
    "InvalidInputError",
    "Manifest",
    "MismatchError",
    "NotFoundError",
    "Pin",
    "Pruning",
    "Publication",
    "PublishEvent",
    "PublisherMetrics",
    "PublisherOptions",
    "RankError",
    "Relayed",
    "Retention",
    "Staged",
    "StateDigest",
    "Status",
    "Store",
    "StoreError",
    "Target",
    "Verification",
    "__version__",
    "apply",
    "compact",
    "diff",
    "digest",
    "inspect",
    "open_store",
    "pin",
    "pins",
    "plan_prune",
    "prune",
    "publish",
    "relay",
    "restore",
    "set_threads",
    "unpin",
    "verify",
]

_MODULES = {
    "deltasync.errors": (
        "ConflictError",
        "CorruptError",
        "DeltasyncError",
        "EngineError",
        "FormatError",
        "InvalidInputError",
        "MismatchError",
        "NotFoundError",
        "RankError",
        "StoreError",
    ),
    "deltasync.upkeep.compact": ("compact",),
    "deltasync.feed.pins": ("pin", "pins", "unpin"),
    "deltasync.upkeep.prune": ("Pruning", "Retention", "plan_prune", "prune"),
    "deltasync.upkeep.relay": ("Relayed", "relay"),
    "deltasync.upkeep.restore": ("restore",),
    "deltasync.upkeep.verify": ("Verification", "verify"),
    "deltasync.format.digest": ("StateDigest",),
    "deltasync.format.manifest": ("BaseRef", "Manifest"),
    "deltasync.format.sealed": ("Pin",),
    "deltasync.oneshot": ("Inspection", "apply", "diff", "digest", "inspect"),
    "deltasync.parallel": ("set_threads",),
    "deltasync.replica.events": ("Advance", "Status"),
    "deltasync.replica.folder": ("FolderTarget",),
    "deltasync.replica.follower": ("Follower",),
    "deltasync.replica.target": ("Damage", "Gate", "Staged", "Target"),
    "deltasync.store": ("open_store",),
    "deltasync.store.protocol": ("Store",),
    "deltasync.trainer.checkpoint": ("publish",),
    "deltasync.trainer.events": ("Publication", "PublishEvent", "PublisherMetrics"),
    "deltasync.trainer.publisher": ("PublisherOptions",),
    "deltasync.trainer.schedule": ("AnchorPolicy",),
}
"""The public names by the modules that define them."""

_ROOMS = {module.split(".")[1] for module in _MODULES}
"""The packages and modules that these lie in: `deltasync.errors` is available without an import of its own."""


if not TYPE_CHECKING:
    # Hidden from type checkers, to which every name would exist otherwise.
    def __getattr__(name: str) -> Any:
        for module, names in _MODULES.items():
            if name in names:
                value = getattr(import_module(module), name)
                globals()[name] = value
                return value
        if name in _ROOMS:
            return import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
