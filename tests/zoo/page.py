"""The table of the zoo in the documentation."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .models import MODELS

_BEGIN, _END = "<!-- zoo -->", "<!-- end of zoo -->"
_HEAD = """
| model | architecture | elements mapped | computed | result | note |
|---|---|---|---|---|---|
"""


def rows(page: str) -> dict[str, str]:
    """The rows of the table by the name of the model."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    return {match[1]: match[0] for match in re.finditer(r"^\| `([^`]+)` \|.*$", table, re.MULTILINE)}


def write_rows(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of these results, and leave those of other models as they are."""
    page = path.read_text()
    known = rows(page) | {result["name"]: row(result) for result in results}
    lines = [f"{known[name]}\n" for name in MODELS if name in known]
    before, after = page.partition(_BEGIN)[0], page.partition(_END)[2]
    path.write_text("".join([before, _BEGIN, _HEAD, *lines, _END, after]))


def row(result: Mapping[str, Any]) -> str:
    """The row of one result."""
    model = MODELS[result["name"]]
    outcome = re.sub(r"\s+|\|", " ", "; ".join(result["problems"])) or "equal"
    elements = f"{result['mapped']:,} | {result['computed']:,}"
    if model.unserved and not result["problems"]:
        outcome, elements = "not served", " | "
    notes = [model.dtype] if model.dtype != "bfloat16" else []
    notes += [f"{model.ranks} ranks"] if model.ranks > 1 else []
    note = ", ".join([*notes, *filter(None, (model.quantization, model.note, model.unserved))])
    return f"| `{result['name']}` | {model.architecture} | {elements} | {outcome} | {note} |"
