"""What the tests share."""

import os
import threading

LONG_S = float(os.environ.get("DELTASYNC_TEST_LONG_S", "300"))
"""What takes so long has failed. It is generous: in CI more processes run at once than there are cores."""

IS_SOAK = os.environ.get("DELTASYNC_SOAK", "") not in ("", "0")

TEST_S = 3 * LONG_S
"""The limit of a test. It is longer than a wait, so that a wait in vain fails with its own message."""

LONG_TEST_S = (48 if IS_SOAK else 5) * LONG_S
"""The limit of a test with the mark `e2e`, `long` or `soak`."""


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(LONG_S)
    assert not thread.is_alive(), f"{thread.name} has not ended after {LONG_S:g} s"


def repeats(default: int, *, soak: int) -> int:
    """How often to repeat what depends on chance: a few times by default, many times in `make soak`.

    Tests that call this carry the mark `soak`.
    """
    return soak if IS_SOAK else default
