"""The `completion` command: the completion script of a shell, from the parser itself."""

import argparse

import shtab

from deltasync.cli.commands import build_parser
from deltasync.cli.output import Output
from deltasync.cli.parser import Parser

_PATHS = {
    **dict.fromkeys(("FILE", "CHECKPOINT", "DELTA", "OLD", "NEW"), shtab.FILE),
    **dict.fromkeys(("DIR", "URL"), shtab.DIRECTORY),
}
"""The arguments that are paths, by the words that help has for them."""


def completion(args: argparse.Namespace, out: Output) -> None:
    """Print the script."""
    parser = build_parser()
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for command in subparsers.choices.values():
        assert isinstance(command, Parser)
        for action in command._actions:
            if isinstance(action.metavar, str) and action.metavar in _PATHS:
                action.complete = _PATHS[action.metavar]  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))
