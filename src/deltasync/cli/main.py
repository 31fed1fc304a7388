"""The `deltasync` command: the list of all commands, which runs one and turns errors into messages and exit codes.

The module of a command has the function of its name, and `NAME_arguments` beside it. It is imported only for its
command, and imports NumPy, stores and kernels only when that runs, so that help is quick.
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import deltasync
from deltasync import __version__
from deltasync.cli.output import Output
from deltasync.cli.parser import FEED_VARIABLE, Parser, UsageError, read_arguments
from deltasync.errors import ConflictError, CorruptError, DeltasyncError, FormatError, MismatchError, printable
from deltasync.parallel import set_threads

COMMANDS = {
    "publish": ("feeds", "Commit a checkpoint as the next version of a feed."),
    "log": ("feeds", "List the versions of a feed."),
    "show": ("feeds", "Describe one version, and list what a restore of it fetches."),
    "verify": ("feeds", "Check every version of a feed."),
    "restore": ("feeds", "Write a version as a checkpoint folder."),
    "prune": ("upkeep", "Delete the payloads of old versions."),
    "compact": ("upkeep", "Write skips, so that late replicas fetch less."),
    "relay": ("upkeep", "Copy a feed to other stores."),
    "pin": ("upkeep", "Keep a version for good, under a name."),
    "unpin": ("upkeep", "Remove a pin, or all pins of a version."),
    "pins": ("upkeep", "List the pins of a feed."),
    "import": ("folders", "Publish folders of deltas, as slime writes them, to a feed."),
    "export": ("folders", "Write a feed as folders of deltas, as slime and others read them."),
    "follow": ("follow", "Keep a checkpoint folder at the newest version of a feed."),
    "status": ("watch", "List the replicas of a feed and the versions that they serve."),
    "watch": ("watch", "Show a feed and its replicas in the terminal, live."),
    "ui": ("watch", "Serve a web page that shows a feed and its replicas, live."),
    "report": ("watch", "Write the page of `ui` as one HTML file."),
    "serve": ("serve", "Start a vLLM server that follows a feed."),
    "diff": ("checkpoints", "Write the delta between two checkpoints to a file."),
    "apply": ("checkpoints", "Write the checkpoint that a delta leads to from an older one."),
    "inspect": ("checkpoints", "Describe the contents of a payload."),
    "digest": ("checkpoints", "Print the state digest of a checkpoint."),
    "plan": ("plan", "Estimate what a feed would cost: time, bytes, memory, dollars."),
    "doctor": ("doctor", "Check this machine and, with a URL, the store of a feed."),
    "completion": ("main", "Print the completion script of a shell."),
}
"""The commands in the order of the help, each with its module in `deltasync.cli` and a summary."""

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
        if hasattr(args, "url"):
            # Most of what a command on a feed needs. An import has places where Python ignores an interrupt.
            for name in deltasync.__all__:
                getattr(deltasync, name)
        if argv is None and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            # Until now an interrupt has ended this process at once. From here on there is something to clean up.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command(args, out)


def parse(argv: Sequence[str] | None, *, environment: Mapping[str, str] = os.environ) -> argparse.Namespace:
    """The command and its arguments, by default those of this process, as `read_arguments` gives them."""
    given = sys.argv[1:] if argv is None else argv
    return read_arguments(build_parser(given), given, environment)


def build_parser(given: Collection[str] | None = None) -> Parser:
    """The parser of all commands. With the words `given`, only commands that are among them get their arguments."""
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
    output = {"json": False, "plain": False, "verbose": 0, "quiet": False}
    for name, (module, summary) in COMMANDS.items():
        command: Parser = commands.add_parser(
            name, help=summary[0].lower() + summary[1:].rstrip("."), description=summary
        )
        command.set_defaults(command=name, module=module, function=name, parser=command, **output)
        if given is None or name in given:
            getattr(import_module(f"deltasync.cli.{module}"), f"{name}_arguments")(command)
    return parser


def completion_arguments(parser: Parser) -> None:
    parser.explain(
        "It completes commands, options, their values, and paths.",
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
        code = EXIT_CORRUPT if isinstance(error, (CorruptError, FormatError, MismatchError)) else EXIT_ERROR
        fields = {name: getattr(error, name) for name in ("kind", "message", "rule", "hint", "key", "version")}
        return _fail(fields, EXIT_CONFLICT if isinstance(error, ConflictError) else code, is_json=is_json)
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:
            # Let the interpreter not complain again at its exit about output that cannot be written.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


class _LogHandler(logging.StreamHandler[Any]):
    """Writes one line to stderr for each record: `warning: …`, with the time if a command runs for long, or as JSON."""

    def __init__(self, *, is_json: bool, has_time: bool) -> None:
        super().__init__()
        self._is_json = is_json
        self._has_time = has_time

    def emit(self, record: logging.LogRecord) -> None:
        # What stderr is by now: a progress bar replaces it.
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        level, message = record.levelname.lower(), printable(record.getMessage())
        if self._is_json:
            return json.dumps({"log": {"time_unix_s": round(record.created, 3), "level": level, "message": message}})
        prefix = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime(record.created)) if self._has_time else ""
        trace = "" if record.exc_info is None else "".join(traceback.format_exception(*record.exc_info))
        return trace + f"{prefix}{level}: {message}"


@contextmanager
def _logging(args: argparse.Namespace) -> Iterator[None]:
    """Log to stderr during a command: warnings, with -v what is done, with -vv details, with -q errors only."""
    level = logging.ERROR if args.quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(args.verbose, 2)]
    handler = _LogHandler(is_json=args.json, has_time=getattr(args, "follow", args.command == "follow"))
    handler.setLevel(level)
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
