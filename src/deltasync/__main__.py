"""The `deltasync` command, also as `python -m deltasync`."""

import sys


def main() -> int:
    """Import the commands and run one. An interrupt ends both without a traceback."""
    try:
        from deltasync.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
