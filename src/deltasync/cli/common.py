"""Arguments, text, tables and progress bars that the commands share."""

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from deltasync.format.manifest import Manifest
from deltasync.parallel import Progress as ProgressCallback

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object

_WIDTH_WITHOUT_TERMINAL = 160


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], help: str
) -> argparse.ArgumentParser:
    """Add a command that calls `run`; returns its parser, for the arguments."""
    parser = commands.add_parser(name, help=help, description=help)
    parser.set_defaults(run=run)
    return parser


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add `URL`."""
    parser.add_argument("url", metavar="URL", help="the feed: a folder, or s3://…, gs://…, az://…, hf://buckets/…")


def add_base(parser: argparse.ArgumentParser) -> None:
    """Add `--base DIR`."""
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="local copy of the checkpoint that the feed began with"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def add_threads(parser: argparse.ArgumentParser) -> None:
    """Add `--threads N`."""
    parser.add_argument("--threads", type=positive, metavar="N", help="number of threads (default: one per core)")


def positive(text: str) -> int:
    """A whole number from 1 on, from the command line."""
    return _whole_number(text, least=1)


def whole_number(text: str) -> int:
    """A whole number from 0 on, from the command line."""
    return _whole_number(text, least=0)


def _whole_number(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return value


def print_json(value: Any) -> None:
    """Print one JSON object."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=True)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """Print one JSON object on one line, and flush it for a program that reads along."""
    print(json.dumps(value, ensure_ascii=True), flush=True)


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Print names and values, one pair per line."""
    for name, value in fields:
        print(f"{name:<14} {value}")


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, alarming: Collection[int] = ()
) -> None:
    """Print a table. The first column is aligned to the left, the others to the right.

    The `alarming` rows, by index, are red on a terminal.
    """
    table = Table(title=escape(title), title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)
    for i, row in enumerate(rows):
        table.add_row(*(escape(plain(cell)) for cell in row), style="red" if i in alarming else None)
    # Rendered to a string and written here, because rich exits the process when a pipe breaks.
    rendered = io.StringIO()
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else _WIDTH_WITHOUT_TERMINAL
    Console(file=rendered, force_terminal=terminal, highlight=False, width=width).print(table)
    sys.stdout.write(rendered.getvalue())


@contextmanager
def bars() -> Iterator[ProgressCallback | None]:
    """A callback that shows one progress bar per phase; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def update(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total)
            shown.update(tasks[phase], completed=done)

        yield update


def plain(text: str) -> str:
    """Text on one line without control characters: a name in a file may contain escape codes for the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count_text(count: int, noun: str) -> str:
    """A count with its noun: 1 version, 2 versions."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


def bits_text(nbytes: int, changed: int) -> str:
    """Bits per changed element."""
    return "-" if changed == 0 else f"{8 * nbytes / changed:.2f}"


def time_text(unix_s: int) -> str:
    """A time in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return str(unix_s)


def versions_text(versions: Collection[int]) -> str:
    """Ascending versions as ranges with their noun: `version 7`, or `versions 0-3, 7`."""
    return f"{'version' if len(versions) == 1 else 'versions'} {ranges_text(versions)}"


def ranges_text(versions: Iterable[int]) -> str:
    """Ascending versions as ranges: `0-3, 7`."""
    ranges: list[tuple[int, int]] = []
    for version in versions:
        if ranges and ranges[-1][1] == version - 1:
            ranges[-1] = ranges[-1][0], version
        else:
            ranges.append((version, version))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as the commands print it: the fields of docs/format.md, and the sum of its payloads."""
    return {**manifest.to_json(), "payload_bytes": manifest.nbytes}
