"""How a command prints its result: as JSON, as plain text for other programs, or as text that fits a terminal.

Plain text is printed if stdout is not a terminal, or with `--plain`: tables have all columns, tabs between them, and
numbers without separators and units; nothing is shortened, wrapped or coloured. At the end are the texts of numbers,
sizes, times and versions for people.
"""

import json
import math
import os
import shutil
import sys
import textwrap
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deltasync.errors import printable
from deltasync.parallel import Progress as ProgressCallback

ROWS_MAX = 20
"""Rows of a table without `--all`."""

_GAP = "  "
_LEAST_TEXT = 8
_SHORT_TEXT = 24
_RED, _FAINT, _BOLD, _RESET = "\x1b[31m", "\x1b[2m", "\x1b[1m", "\x1b[0m"


class OutputError(OSError):
    """What a command prints cannot be written: its reader has gone, or the disk is full."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `text` shows a value that is not None on a terminal; plain text has its `str`.

    `rank` decides what a narrow terminal leaves out: the columns of the highest rank first, those of rank 0 never.
    `is_name`: text that is aligned to the left, and may be shortened in its middle. Numbers never are.
    """

    name: str
    text: Callable[[Any], str] = str
    rank: int = 0
    is_name: bool = False


def number_text(count: int) -> str:
    """A whole number with separators: 1,234,567."""
    return f"{count:,}"


def number_column(name: str, *, rank: int = 0) -> Column:
    """A column of whole numbers with separators."""
    return Column(name, number_text, rank)


@dataclass(frozen=True, slots=True)
class Output:
    """Prints the result of one command to stdout. `columns` is the width of the terminal, None for plain text."""

    is_json: bool = False
    columns: int | None = None
    has_colours: bool = False
    has_bars: bool = False
    """Whether progress bars are shown on stderr."""

    @classmethod
    def of(cls, *, is_json: bool, is_plain: bool, is_quiet: bool) -> "Output":
        """For the options of a command, and for the terminal if there is one."""
        is_terminal = sys.stdout.isatty() and not is_plain and not is_json
        columns = max(20, shutil.get_terminal_size().columns) if is_terminal else None
        has_colours = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(is_json, columns, has_colours, sys.stderr.isatty() and not is_quiet and not is_json)

    def json(self, value: Any) -> None:
        """Print one JSON object."""
        json.dump(value, sys.stdout, indent=2, ensure_ascii=True)
        sys.stdout.write("\n")

    def json_line(self, value: Any) -> None:
        """Print one JSON object on one line, and flush it for a program that reads along."""
        print(json.dumps(value, ensure_ascii=True), flush=True)

    def event(self, fields: Mapping[str, Any], text: str, *, has_time: bool = False) -> None:
        """Print what has just happened, for a reader that follows: the fields as JSON on one line, or the text.

        OutputError if that fails, so that a poll loop ends instead of retrying.
        """
        now_unix_s = time.time()
        try:
            if self.is_json:
                self.json_line({"time_unix_s": round(now_unix_s, 3), **fields} if has_time else fields)
            elif has_time:
                self.line(f"{time_text(now_unix_s)}  {text}", indent=" " * 21)
            else:
                self.line(text, indent="  ")
            sys.stdout.flush()
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error

    def line(self, text: str, *, indent: str = "") -> None:
        """Print a sentence. A terminal gets it wrapped at spaces, with `indent` before its later lines."""
        text = printable(text)
        if self.columns is None or text_width(text) <= self.columns:
            print(text)
            return
        wrapped = textwrap.wrap(
            text, self.columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        for part in wrapped:
            print(part)

    def key(self, key: str) -> None:
        """Print the key of an object, shortened in its middle where a terminal is too narrow for it."""
        text = printable(key)
        print(text if self.columns is None else shortened(text, self.columns))

    def fields(self, fields: Iterable[tuple[str, str]]) -> None:
        """Print names and values, one pair per line."""
        pairs = list(fields)
        if self.columns is None:
            for name, value in pairs:
                print(printable(name) + "\t" + printable(value))
            return
        most = max((text_width(name) for name, _ in pairs), default=0)
        for name, value in pairs:
            self.line(f"{name:<{most}}{_GAP}{value}", indent=" " * (most + len(_GAP)))

    def table(
        self,
        title: str,
        columns: Sequence[Column],
        rows: Iterable[Sequence[Any]],
        *,
        alarming: Collection[int] = (),
        faint: Collection[int] = (),
    ) -> None:
        """Print a table. The `alarming` rows, by index, are red on a terminal, and the `faint` ones are dimmed."""
        values = list(rows)
        if self.columns is None:
            print(f"# {printable(title)}")
            print("\t".join(column.name for column in columns))
            for row in values:
                print("\t".join(printable(or_dash(value)) for value in row))
            return
        self.line(title)
        cells = [
            [
                printable("-" if value is None else column.text(value))
                for column, value in zip(columns, row, strict=True)
            ]
            for row in values
        ]
        widths = fitted_widths(columns, cells, self.columns)
        kept = [i for i in range(len(columns)) if i in widths]
        self._row([shortened(columns[i].name, widths[i]) for i in kept], columns, widths, _BOLD)
        for number, row in enumerate(cells):
            style = _RED if number in alarming else _FAINT if number in faint else ""
            self._row([shortened(row[i], widths[i]) for i in kept], columns, widths, style)
        left_out = [column.name for i, column in enumerate(columns) if i not in widths]
        if left_out:
            self.line(f"({', '.join(left_out)}: in a wider terminal, with --plain or --json)")

    def _row(self, texts: Sequence[str], columns: Sequence[Column], widths: dict[int, int], style: str) -> None:
        parts = []
        for text, (i, width) in zip(texts, sorted(widths.items()), strict=True):
            space = " " * (width - text_width(text))
            parts.append(text + space if columns[i].is_name else space + text)
        line = _GAP.join(parts).rstrip()
        print(f"{style}{line}{_RESET}" if style and self.has_colours else line)

    @contextmanager
    def bars(self) -> Iterator[ProgressCallback | None]:
        """A callback that shows one progress bar per phase; None if there is no terminal to show it on."""
        if not self.has_bars:
            yield None
            return
        # Imported here: most commands show no bars, and rich takes as long to import as all of them.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
            tasks: dict[str, TaskID] = {}

            def update(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = shown.add_task(phase, total=total)
                shown.update(tasks[phase], completed=done)

            yield update


def text_width(text: str) -> int:
    """The number of columns that a text takes in a terminal."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def shortened(text: str, columns: int) -> str:
    """A text that takes at most so many columns: `..` stands for what is left out of its middle."""
    if text_width(text) <= columns:
        return text
    if columns <= 2:
        return "."[:columns]
    front = columns - 2 - (columns - 2) // 3
    start, end = "", ""
    for character in text:
        if text_width(start + character) > front:
            break
        start += character
    for character in reversed(text):
        if text_width(start + ".." + character + end) > columns:
            break
        end = character + end
    return f"{start}..{end}"


def fitted_widths(columns: Sequence[Column], cells: Sequence[Sequence[str]], most: int) -> dict[int, int]:
    """The widths of the columns that fit `most` columns of a terminal, by their index.

    Names are shortened to a length that can still be read, then columns are left out by rank. If the rest is still too
    wide, names are shortened further. Space that is left goes to the names again.
    """
    natural = [max([text_width(c.name), *(text_width(row[i]) for row in cells)]) for i, c in enumerate(columns)]
    widths = dict(enumerate(natural))
    names = [i for i, column in enumerate(columns) if column.is_name]

    def excess() -> int:
        return sum(widths.values()) + len(_GAP) * (len(widths) - 1) - most

    for least in (_SHORT_TEXT, _LEAST_TEXT):
        for i in (i for i in names if i in widths):
            widths[i] -= max(0, min(excess(), widths[i] - max(least, text_width(columns[i].name))))
        for i in sorted(widths, key=lambda i: (-columns[i].rank, -i)):
            if excess() > 0 and columns[i].rank:
                del widths[i]
    for i in (i for i in names if i in widths):
        widths[i] += max(0, min(-excess(), natural[i] - widths[i]))
    return widths


def count_text(count: int, noun: str) -> str:
    """A count with its noun: 1 version, 2 versions."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def or_dash(value: object) -> str:
    """A value as text; `-` for None."""
    return "-" if value is None else str(value)


def size_text(nbytes: int) -> str:
    """Bytes with a decimal unit: 1234567 is 1.23 MB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def share_text(part: int, whole: int) -> str:
    """A share in percent."""
    return "-" if whole == 0 else f"{100 * part / whole:.3f} %"


def percent(part: int | None, whole: int) -> float | None:
    """A share in percent as a number; None if it is not known."""
    return None if part is None or whole == 0 else round(100 * part / whole, 6)


def ratio_text(part: int, whole: int) -> str:
    """How many times smaller the part is: `218 times smaller`."""
    if part == 0 or whole == 0:
        return "-"
    ratio = whole / part
    return f"{ratio:,.0f} times smaller" if ratio >= 100 else f"{ratio:.3g} times smaller"


def bits_text(nbytes: int, changed: int) -> str:
    """Bits per changed element."""
    return "-" if changed == 0 else f"{8 * nbytes / changed:.2f}"


def duration_text(seconds: float) -> str:
    """A duration with its unit: `4.2 ms`, `2.31 s`, `3 min 12 s`, `5 h 10 min`, `2 d 4 h`."""
    if seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    if math.isinf(seconds):
        return "-"
    whole = round(seconds)
    for size, unit, smaller, smaller_unit in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size:,} {unit}" + (f" {rest} {smaller_unit}" if rest else "")
    return f"{whole} s"


def time_text(unix_s: float) -> str:
    """A time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return str(unix_s)


def versions_text(versions: Collection[int]) -> str:
    """Ascending versions as ranges with their noun: `version 7`, or `versions 0-3, 7`."""
    return f"{'version' if len(versions) == 1 else 'versions'} {ranges_text(versions)}"


_RANGES_MAX = 50
"""Ranges that are printed: junk in a store can make thousands of them, in each of thousands of lines."""


def ranges_text(versions: Iterable[int]) -> str:
    """Ascending versions as ranges: `0-3, 7`. Of very many ranges, only the first ones and the last one."""
    from deltasync.format import keys  # here, so that help does not import the format

    texts = [str(first) if first == last else f"{first}-{last}" for first, last in keys.ranges(versions)]
    if len(texts) > _RANGES_MAX:
        texts = [*texts[: _RANGES_MAX - 2], f"{len(texts) - _RANGES_MAX + 1} more ranges", texts[-1]]
    return ", ".join(texts)
