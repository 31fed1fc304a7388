"""What the tests share."""

import os

IS_SOAK = os.environ.get("DELTASYNC_SOAK", "") not in ("", "0")


def repeats(default: int, *, soak: int) -> int:
    """How often to repeat what depends on chance: a few times by default, many times in `make soak`.

    Tests that call this carry the mark `soak`.
    """
    return soak if IS_SOAK else default
