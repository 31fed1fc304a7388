"""The `deltasync` command, also as `python -m deltasync`."""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Import the commands and run one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from deltasync.cli.main import main as run

    return run()


def _end(number: int, frame: FrameType | None) -> None:
    """End this process, which has nothing to clean up yet.

    Python's own handler raises KeyboardInterrupt, and an import has places where Python ignores all errors.
    """
    os.write(2, b"error: interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
