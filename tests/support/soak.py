"""How often tests repeat what depends on chance: a few times by default, many times in `make soak`.

This is the only place that reads `DELTASYNC_SOAK`. Tests that call `repeats` carry the mark `soak`.
"""

import os

IS_SOAK = os.environ.get("DELTASYNC_SOAK", "") not in ("", "0")


def repeats(default: int, *, soak: int) -> int:
    """The number of repetitions for this run."""
    return soak if IS_SOAK else default
