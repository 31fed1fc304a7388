"""The list of all commands. What they do is imported only when one of them runs, so that help is quick.

Commands on feeds and replicas import NumPy, stores and kernels, so their arguments are in modules of their own,
`feed_arguments` and `replica_arguments`. A module that imports none of these until its command runs has both.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from deltasync import __version__
from deltasync.cli import checkpoints, feed_arguments, replica_arguments
from deltasync.cli.output import Output
from deltasync.cli.parser import FEED_VARIABLE, Commands, Parser, add_command, read_arguments
from deltasync.cli.plan import add_plan


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
        "commands",
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
