"""Arguments that several commands share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from deltasync.errors import InvalidInputError

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
