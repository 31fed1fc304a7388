"""The `deltasync` command: its parser, exit codes and error messages."""

import argparse
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence

from deltasync import __version__
from deltasync.cli import checkpoints, feeds, replicas
from deltasync.cli.common import plain
from deltasync.errors import ConflictError, CorruptError, DeltasyncError, FormatError, MismatchError
from deltasync.parallel import set_threads

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_CONFLICT = 4
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse exits with 2 on wrong usage."""
    parser = argparse.ArgumentParser(
        prog="deltasync",
        description="Ships the weights of a model in training, version by version, through an object store.",
        epilog="Exit codes: 0 ok, 1 error, 2 wrong usage, 3 corrupt or mismatched data, 4 conflict.",
    )
    parser.add_argument("--version", action="version", version=f"deltasync {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (feeds, replicas, checkpoints):
        module.add_commands(commands)
    return guarded(_run, parser.parse_args(argv))


def _run(args: argparse.Namespace) -> None:
    set_threads(getattr(args, "threads", None))
    args.run(args)


def guarded(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    """Call `run` and return the exit code. An error is printed to stderr on one line."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names with characters that the terminal's encoding lacks are printed escaped, as on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        run(args)
        sys.stdout.flush()
    except DeltasyncError as error:
        return _fail(str(error), _exit_code(error))
    except BrokenPipeError:
        # The reader of our output has gone. The interpreter flushes stdout at exit, and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        return _fail(str(error), EXIT_ERROR)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - the one place that stops every error
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error} (this is a bug in deltasync)", EXIT_ERROR)
    return EXIT_OK


def _exit_code(error: DeltasyncError) -> int:
    if isinstance(error, ConflictError):
        return EXIT_CONFLICT
    return EXIT_CORRUPT if isinstance(error, (CorruptError, FormatError, MismatchError)) else EXIT_ERROR


def _fail(message: str, code: int) -> int:
    print(f"error: {plain(message)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
