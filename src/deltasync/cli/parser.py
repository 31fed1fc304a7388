"""An argparse parser that suggests what was meant, and takes the feed from the environment; values of arguments."""

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from deltasync.arguments import COUNT_MAX
from deltasync.errors import InvalidInputError
from deltasync.parallel import THREADS_MAX

FEED_VARIABLE = "DELTASYNC_FEED"
"""Environment variable with the feed of commands that are given none."""

_DIGITS_MAX = 40


class UsageError(Exception):
    """The command line is wrong: what is wrong with it, and what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, slots=True)
class Place:
    """A positional argument. `convert` raises ArgumentTypeError for a text that cannot be its value."""

    name: str
    convert: Callable[[str], Any] = str
    is_optional: bool = False
    is_repeated: bool = False
    """Takes all arguments that are left, as a list."""


class Parser(argparse.ArgumentParser):
    """Suggests the command, option or value that was meant, and raises UsageError instead of exiting."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.places: list[Place] = []

    def add_place(
        self,
        name: str,
        convert: Callable[[str], Any] = str,
        *,
        optional: bool = False,
        repeated: bool = False,
        help: str,
    ) -> None:
        """Add a positional argument. All of them are optional to argparse: `parse` assigns them.

        Only the last one may be repeated; its value is a list.
        """
        self.places.append(Place(name, convert, optional, repeated))
        self.add_argument(name, nargs="*" if repeated else "?", metavar=name.upper(), help=help)

    def explain(self, more: str, *, example: str, has_output: bool = True) -> None:
        """Say more than the summary, give an example, and add the options for the output unless it has none."""
        name = self.prog.rpartition(" ")[2]
        self.description = f"{self.description}\n{more}"
        self.epilog = f"example:\n  {example}\n\ndocs/commands.md#{name} has the details."
        if has_output:
            add = self.add_argument_group("output").add_argument
            add("--json", action="store_true", help="print JSON instead of text, errors too")
            add("--plain", action="store_true", help="print plain text, as into a pipe: tabs, whole numbers")
            add("-v", "--verbose", action="count", default=0, help="log what is done; -vv logs details")
            add("-q", "--quiet", action="store_true", help="no progress bars, no warnings")

    def add_url(self) -> None:
        self.add_place("url", help="the feed: a folder, or s3://…, gs://…, az://…, hf://buckets/…")

    def add_base(self) -> None:
        self.add_argument(
            "--base", type=Path, metavar="DIR", help="local copy of the checkpoint that the feed began with"
        )

    def add_trust_code(self, verb: str) -> None:
        self.add_argument(
            "--trust-code",
            action="store_true",
            help=f"also {verb} files beside the weights that can run code when they are loaded (*.py, *.bin, *.pt, …)",
        )

    def add_threads(self) -> None:
        self.add_argument(
            "--threads",
            type=lambda text: number_within(text, least=1, most=THREADS_MAX),
            metavar="N",
            help="number of threads (default: one per core)",
        )

    def add_follow(self, what: str = "versions") -> None:
        self.add_argument("--follow", action="store_true", help=f"go on with new {what}, until SIGINT or SIGTERM")

    def add_require_fencing(self) -> None:
        self.add_argument(
            "--require-fencing", action="store_true", help="refuse a store that cannot keep two writers apart"
        )

    def add_replica(self) -> None:
        self.add_argument("--replica", metavar="ID", help="the id in heartbeats (default: random)")

    def add_listen(self) -> None:
        self.add_argument(
            "--listen",
            type=address,
            metavar="HOST:PORT",
            help="serve /healthz, /readyz, /status and, with prometheus-client, /metrics while following",
        )
        self.add_argument("--metrics", action="store_true", help="refuse to start without /metrics")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = [str(choice) for choice in action.choices]
            if isinstance(action, argparse._SubParsersAction):
                self.error(f"there is no command {value!r:.80}" + suggestion(str(value), names))
            message = f"{value!r:.80} is none of {', '.join(names)}" + suggestion(str(value), names)
            raise argparse.ArgumentError(action, message)


def suggestion(text: str, names: Sequence[str]) -> str:
    """A question that names the most similar name; empty if none is."""
    from difflib import get_close_matches

    close = get_close_matches(text, names, n=1, cutoff=0.6) or [name for name in names if name.startswith(text)][:1]
    return f": did you mean {close[0]}?" if close else ""


def read_arguments(parser: Parser, given: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    """The command and its arguments. UsageError if they are wrong; SystemExit after `--help` and `--version`.

    Where a command takes a feed and gets one argument too few, the feed is that of `DELTASYNC_FEED`.
    """
    if not given:
        parser.print_help(sys.stderr)
        raise SystemExit(2)
    args, rest = parser.parse_known_args(list(given))
    if "command" not in args:
        raise UsageError("no command was given", f"see `{parser.prog} --help`")
    command: Parser = args.parser
    for text in rest:
        if text.startswith("-"):
            options = [name for action in command._actions for name in action.option_strings]
            command.error(f"there is no option {text.partition('=')[0]!r:.80}" + suggestion(text, options))
    # argparse cannot assign arguments that follow an option to places that may be empty: it returns them as the rest.
    places, texts = command.places, list[str]()
    for place in places:
        value = getattr(args, place.name)
        texts += value if isinstance(value, list) else [] if value is None else [value]
    texts += rest
    if len(texts) > len(places) and not (places and places[-1].is_repeated):
        also = " (a pattern needs quotes)" if getattr(args, "watch", False) else ""
        command.error(f"there is one argument too many: {texts[len(places)]!r:.80}{also}")
    required = [place.name.upper() for place in places if not place.is_optional]
    feed = environment.get(FEED_VARIABLE)
    if feed and places and places[0].name == "url":
        # With all arguments but the feed, it is the one of the environment; a number is a version and not a feed.
        is_version = len(texts) == 1 and places[-1].name == "version" and texts[0].isdecimal()
        if len(texts) < max(1, len(required)) or is_version:
            texts = [feed, *texts]
    missing = required[len(texts) :]
    if missing:
        also = f" (or set {FEED_VARIABLE})" if missing[0] == "URL" else ""
        command.error(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{also}")
    for i, place in enumerate(places):
        try:
            values = [place.convert(text) for text in (texts[i:] if place.is_repeated else texts[i : i + 1])]
        except argparse.ArgumentTypeError as error:
            command.error(f"argument {place.name.upper()}: {error}")
        setattr(args, place.name, values if place.is_repeated else next(iter(values), None))
    return args


def require_unused(args: argparse.Namespace, options: Sequence[str], *, without: str) -> None:
    """InvalidInputError for an option, by the name of its value, that was given and has no effect without another."""
    unused = next((name for name in options if getattr(args, name) not in (None, False)), None)
    if unused is not None:
        option = unused.replace("_", "-")
        raise InvalidInputError(f"--{option} has no effect without {without}", hint=f"add {without}, or leave it out")


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return number_within(text, least=1)


def whole_number(text: str) -> int:
    """A whole number from 0 on."""
    return number_within(text, least=0)


def number_within(text: str, *, least: int, most: int = COUNT_MAX) -> int:
    """A whole number with a range. ArgumentTypeError says what it should be."""
    # Not by its value alone: Python refuses to read a number with thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= _DIGITS_MAX
    if not is_number or not least <= int(text) <= most:
        allowed = f"from {least} on" if most == COUNT_MAX else f"from {least} to {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a whole number {allowed}")
    return int(text)


def version_or_name(text: str) -> int | str:
    """A version, or the name of a pin."""
    from deltasync.format.keys import PINS, parse_pin_key

    if text.isascii() and text.isdecimal():
        return whole_number(text)
    if parse_pin_key(f"{PINS}{text}.json") is None:
        raise argparse.ArgumentTypeError(
            f"{text!r:.80} is neither a version nor the name of a pin, which begins with a letter"
        )
    return text


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not a number of seconds above 0")
    return value


def seconds_or_off(text: str) -> float | None:
    try:
        return None if text == "off" else seconds(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or off") from error


def seconds_text(text: str) -> str:
    """A number of seconds, or `off`, as it was given: for an environment variable."""
    seconds_or_off(text)
    return text


def add_shadow(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--shadow", type=Path, metavar="FILE", help="keep the last weights in this file, not in memory")


def address(text: str) -> tuple[str, int]:
    from deltasync.listener import parse_address

    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not HOST:PORT, such as 127.0.0.1:8642") from error
