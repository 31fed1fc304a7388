"""The `deltasync` command: the list of all commands, which runs one and turns errors into messages and exit codes.

What commands do is imported only when one of them runs, so that help is quick. Commands on feeds and replicas import
NumPy, stores and kernels, so their arguments are in modules of their own, `feed_arguments` and `replica_arguments`. A
module that imports none of these until its command runs has both.
"""

import argparse
import errno
import io
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

from deltasync import __version__
from deltasync.cli import checkpoints, feed_arguments, replica_arguments
from deltasync.cli.output import Output
from deltasync.cli.parser import FEED_VARIABLE, Commands, Parser, UsageError, add_command, read_arguments
from deltasync.cli.plan import add_plan
from deltasync.errors import ConflictError, CorruptError, DeltasyncError, FormatError, MismatchError, printable
from deltasync.parallel import set_threads

EXIT_OK = 0
EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_CONFLICT = 4
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_TEMPORARY = re.compile(r"\.([^/]+)\.[0-9a-f]{12}\.tmp(?=/|$)")
_OS_HINTS = {
    errno.EACCES: "check the owner and the mode of the file and its folder",
    errno.EPERM: "check the owner and the mode of the file and its folder",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a file is where a folder should be: check the path",
    errno.EISDIR: "a folder is where a file should be: check the path",
    errno.ENOSPC: "the disk is full: free some space, or choose another place",
    errno.EDQUOT: "the quota is used up: free some space, or choose another place",
    errno.EROFS: "the file system is mounted read-only: choose another place",
    errno.EFBIG: "the file system or the limits of this process do not allow files this large",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
    errno.EIO: "the disk or the connection to it failed: check the system's log",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. SystemExit after `--help` and `--version`, and on wrong usage."""
    is_json = "--json" in (sys.argv if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # The caller has closed it. What would be printed is lost, but the command and its exit code are not.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - it stays open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names with characters that the terminal's encoding lacks are printed escaped, as on stderr.
        sys.stdout.reconfigure(errors="backslashreplace")
    return guarded(lambda: _run(argv), is_json=is_json)


def _run(argv: Sequence[str] | None) -> None:
    try:
        args = parse(argv)
    except SystemExit:
        # Help that cannot be printed is reported like any other output.
        sys.stdout.flush()
        raise
    with _logging(args):
        set_threads(getattr(args, "threads", None))
        out = Output.of(is_json=args.json, is_plain=args.plain, is_quiet=args.quiet)
        command = getattr(import_module(f"deltasync.cli.{args.module}"), args.function)
        if argv is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Until now an interrupt has ended this process at once. From here on there is something to clean up.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(args, out)


def parse(argv: Sequence[str] | None, *, environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """The command and its arguments, by default those of this process, as `read_arguments` gives them."""
    return read_arguments(build_parser(), sys.argv[1:] if argv is None else argv, environment)


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="deltasync",
        description="Ships the weights of a model in training through an object store.",
        epilog="`deltasync COMMAND --help` has the options and an example of a command.\n"
        f"{FEED_VARIABLE} is the feed of commands that are given none.\n"
        "Exit codes: 0 ok, 1 error, 2 wrong usage, 3 corrupt or mismatched data,\n"
        "4 conflict. docs/commands.md describes everything.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"deltasync {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    for add in (
        feed_arguments.add_publish,
        feed_arguments.add_log,
        feed_arguments.add_show,
        feed_arguments.add_verify,
        feed_arguments.add_restore,
        feed_arguments.add_prune,
        feed_arguments.add_compact,
        feed_arguments.add_relay,
        feed_arguments.add_pin,
        feed_arguments.add_unpin,
        feed_arguments.add_pins,
        feed_arguments.add_import,
        feed_arguments.add_export,
        replica_arguments.add_follow,
        replica_arguments.add_status,
        replica_arguments.add_watch,
        replica_arguments.add_ui,
        replica_arguments.add_report,
        replica_arguments.add_serve,
        checkpoints.add_diff,
        checkpoints.add_apply,
        checkpoints.add_inspect,
        checkpoints.add_digest,
        add_plan,
        feed_arguments.add_doctor,
        add_completion,
    ):
        add(commands)
    return parser


def add_completion(commands: Commands) -> None:
    parser = add_command(
        commands,
        "completion",
        "main",
        "Print the completion script of a shell.",
        more="It completes commands, options, their values, and paths.",
        example='eval "$(deltasync completion bash)"    # in ~/.bashrc',
        has_output=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")


def completion(args: argparse.Namespace, out: Output) -> None:
    """Print the completion script of a shell."""
    import shtab

    paths = {
        **dict.fromkeys(("FILE", "CHECKPOINT", "DELTA", "OLD", "NEW"), shtab.FILE),
        **dict.fromkeys(("DIR", "URL"), shtab.DIRECTORY),
    }
    parser = build_parser()
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in subparsers.choices.values():
        assert isinstance(command, Parser)
        for action in command._actions:
            if isinstance(action.metavar, str) and action.metavar in paths:
                action.complete = paths[action.metavar]  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))


def guarded(run: Callable[[], None], *, is_json: bool = False) -> int:
    """Call `run` and return the exit code. An error is printed to stderr on one line, as text or as JSON."""
    try:
        run()
        sys.stdout.flush()
    except UsageError as error:
        _fail({"kind": "usage", "message": error.message, "hint": error.hint}, EXIT_USAGE, is_json=is_json)
        raise SystemExit(EXIT_USAGE) from None
    except DeltasyncError as error:
        return _fail(_fields(error), _exit_code(error), is_json=is_json)
    except OSError as error:
        _abandon_stdout()
        if error.errno == errno.EPIPE:
            return EXIT_BROKEN_PIPE
        return _fail(_os_fields(error), EXIT_ERROR, is_json=is_json)
    except KeyboardInterrupt:
        return _fail({"kind": "interrupted", "message": "interrupted"}, EXIT_INTERRUPTED, is_json=is_json)
    except Exception as error:  # noqa: BLE001 - the one place that stops every error
        # Only where it happened: the text of the error is foreign, and follows on one line.
        print("".join(traceback.format_tb(error.__traceback__)), file=sys.stderr, end="")
        message = f"{type(error).__name__}: {error} (this is a bug in deltasync)"
        return _fail({"kind": "bug", "message": message}, EXIT_ERROR, is_json=is_json)
    return EXIT_OK


def _abandon_stdout() -> None:
    """Let the interpreter not complain again at its exit about output that cannot be written."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: DeltasyncError) -> int:
    if isinstance(error, ConflictError):
        return EXIT_CONFLICT
    return EXIT_CORRUPT if isinstance(error, (CorruptError, FormatError, MismatchError)) else EXIT_ERROR


def _fields(error: DeltasyncError) -> dict[str, Any]:
    return {
        "kind": error.kind,
        "message": error.message,
        "rule": error.rule,
        "hint": error.hint,
        "key": error.key,
        "version": error.version,
    }


def _os_fields(error: OSError) -> dict[str, Any]:
    """The error of a local file: which one, what is wrong, what to do."""
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if isinstance(path, str | bytes)]
    # What is written beside its place, under a hidden name, is named by its place.
    paths = [_TEMPORARY.sub(r"\1", path) for path in paths]
    message = error.strerror or str(error)
    return {
        "kind": "os",
        "message": f"{' and '.join(paths)}: {message}" if paths else message,
        "hint": _OS_HINTS.get(error.errno or 0),
        "key": paths[0] if paths else None,
    }


def _fail(fields: dict[str, Any], code: int, *, is_json: bool) -> int:
    if is_json:
        known = {"kind": None, "message": None, "rule": None, "hint": None, "key": None, "version": None}
        text = json.dumps({"error": {**known, **fields, "exit_code": code}}, ensure_ascii=True)
    else:
        rule, hint = fields.get("rule"), fields.get("hint")
        text = f"error: {fields['message']}" + (f" [{rule}]" if rule else "") + (f" ({hint})" if hint else "")
    with suppress(OSError):
        print(printable(text), file=sys.stderr)
    return code


class _LogFormatter(logging.Formatter):
    """One line for each record: `warning: …`, with the time for commands that run for long, or as JSON."""

    def __init__(self, *, is_json: bool, has_time: bool) -> None:
        super().__init__()
        self._is_json = is_json
        self._has_time = has_time

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), printable(record.getMessage())
        if self._is_json:
            return json.dumps({"log": {"time_unix_s": round(record.created, 3), "level": level, "message": message}})
        prefix = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime(record.created)) if self._has_time else ""
        trace = "" if record.exc_info is None else "".join(traceback.format_exception(*record.exc_info))
        return trace + f"{prefix}{level}: {message}"


class _StderrHandler(logging.StreamHandler[Any]):
    """Writes to what stderr is when a record comes, as a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def _logging(args: argparse.Namespace) -> Iterator[None]:
    """Log to stderr during a command: warnings, with -v what is done, with -vv details, with -q errors only."""
    level = logging.ERROR if args.quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(args.verbose, 2)]
    handler = _StderrHandler()
    handler.setLevel(level)
    handler.setFormatter(_LogFormatter(is_json=args.json, has_time=getattr(args, "follow", args.command == "follow")))
    logger = logging.getLogger("deltasync")
    level_before, show_before = logger.level, warnings.showwarning
    logger.addHandler(handler)
    if args.verbose:
        logger.setLevel(level)

    def show(message: Warning | str, *rest: Any, **named: Any) -> None:
        logger.warning("%s", message)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = show_before
        logger.setLevel(level_before)
        logger.removeHandler(handler)


if __name__ == "__main__":
    sys.exit(main())
