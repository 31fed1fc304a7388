"""Arguments, text, tables and progress bars that the commands share."""

import argparse
import io
import json
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from deltasync.errors import InvalidInputError
from deltasync.format.manifest import Manifest
from deltasync.parallel import Progress as Tell
from deltasync.store import open_store
from deltasync.store.protocol import Store

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = object


def add_threads(parser: argparse.ArgumentParser) -> None:
    """`--threads N`; as many as there are cores by default."""
    parser.add_argument("--threads", type=positive, metavar="N", help="threads to use (default: one for each core)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """`--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def require_other_file(output: Path, *inputs: str) -> None:
    """InvalidInputError if writing `output` would replace an input."""
    for path in inputs:
        if output.exists() and Path(path).exists() and output.samefile(path):
            raise InvalidInputError(f"{output} is an input", hint="choose another output")


def positive(text: str) -> int:
    """A count from 1 on."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return value


_WIDTH_WITHOUT_TERMINAL = 160


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    json.dump(value, sys.stdout, indent=2, ensure_ascii=True)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """One JSON object in one line, at once: whoever reads it works along."""
    print(json.dumps(value, ensure_ascii=True), flush=True)


def print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, alarming: Collection[int] = ()
) -> None:
    """A table on stdout; the first column is text, the others are numbers, aligned to the right.

    `alarming` rows, by their ordinal, are red where that is a terminal.
    """
    table = Table(title=escape(title), title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)
    for i, row in enumerate(rows):
        table.add_row(*(escape(plain(cell)) for cell in row), style="red" if i in alarming else None)
    # Rendered aside and written by us: rich ends the process by itself when a pipe breaks.
    rendered = io.StringIO()
    terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if terminal else _WIDTH_WITHOUT_TERMINAL
    Console(file=rendered, force_terminal=terminal, highlight=False, width=width).print(table)
    sys.stdout.write(rendered.getvalue())


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair in each line."""
    for name, value in fields:
        print(f"{name:<14} {value}")


def plain(text: str) -> str:
    """Text in one line without control characters: names in a file may hold escape codes meant for the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def size_text(nbytes: int) -> str:
    """Bytes with a decimal unit: 1234567 is 1.23 MB."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.2f} {unit}"


def share_text(part: int, whole: int) -> str:
    """A share in per cent."""
    return "-" if whole == 0 else f"{100 * part / whole:.3f} %"


def bits_text(nbytes: int, changed: int) -> str:
    """Bits for each changed element."""
    return "-" if changed == 0 else f"{8 * nbytes / changed:.2f}"


@contextmanager
def bars() -> Iterator[Tell | None]:
    """One bar for each phase; None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description:<8}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        tasks: dict[str, TaskID] = {}

        def tell(phase: str, done: int, total: int) -> None:
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=total)
            shown.update(tasks[phase], completed=done)

        yield tell


def add_url(parser: argparse.ArgumentParser) -> None:
    """`URL`."""
    parser.add_argument("url", metavar="URL", help="the feed: a folder, or s3://…, gs://…, az://…, hf://buckets/…")


def add_version(parser: argparse.ArgumentParser) -> None:
    """`--version N`."""
    parser.add_argument("--version", type=whole_number, metavar="N", help="the version (default: the newest)")


def add_base(parser: argparse.ArgumentParser) -> None:
    """`--base DIR`."""
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="local copy of the checkpoint that the feed began with"
    )


@contextmanager
def feed(url: str) -> Iterator[Store]:
    """The store at a URL, closed at the end."""
    store = open_store(url)
    try:
        yield store
    finally:
        store.close()


def whole_number(text: str) -> int:
    """A count on the command line."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return value


def time_text(unix_s: int) -> str:
    """A moment in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
    except (OverflowError, ValueError, OSError):
        return str(unix_s)


def ranges_text(versions: Iterable[int]) -> str:
    """Ascending versions in few words: 0-3, 7."""
    spans: list[tuple[int, int]] = []
    for version in versions:
        if spans and spans[-1][1] == version - 1:
            spans[-1] = spans[-1][0], version
        else:
            spans.append((version, version))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A manifest as the commands print it: the fields of docs/format.md, and the sum of its payloads."""
    return {**manifest.to_json(), "payload_bytes": manifest.nbytes}
