"""Text for people: sizes, shares and tables."""

import io
import json
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

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
