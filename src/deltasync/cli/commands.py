"""The commands and their arguments. What they do is imported only when one of them runs, so that help is quick."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from deltasync import __version__
from deltasync.cli.parser import (
    FEED_VARIABLE,
    Parser,
    positive,
    read_arguments,
    seconds,
    seconds_or_off,
    version_or_name,
    whole_number,
)
from deltasync.vllm.settings import CachePolicy, OnRefused, PauseMode

ROWS_MAX = 20
"""Rows of a table without `--all`."""

_SHELLS = ("bash", "zsh", "fish")


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
        _add_publish,
        _add_log,
        _add_show,
        _add_verify,
        _add_restore,
        _add_prune,
        _add_compact,
        _add_relay,
        _add_pin,
        _add_unpin,
        _add_pins,
        _add_import,
        _add_export,
        _add_follow,
        _add_status,
        _add_watch,
        _add_ui,
        _add_report,
        _add_serve,
        _add_diff,
        _add_apply,
        _add_inspect,
        _add_digest,
        _add_doctor,
        _add_completion,
    ):
        add(commands)
    return parser


Commands = Any
"""What `add_subparsers` returns; its class is private."""


def _command(
    commands: Commands, name: str, module: str, summary: str, *, more: str, example: str, has_output: bool = True
) -> Parser:
    """Add a command that calls the function of its name in `deltasync.cli.MODULE`."""
    parser: Parser = commands.add_parser(
        name,
        help=summary[0].lower() + summary[1:].rstrip("."),
        description=f"{summary}\n{more}",
        epilog=f"example:\n  {example}\n\ndocs/commands.md#{name} has the details.",
    )
    parser.set_defaults(
        command=name, module=module, function=name, parser=parser, json=False, plain=False, verbose=0, quiet=False
    )
    if has_output:
        group = parser.add_argument_group("output")
        group.add_argument("--json", action="store_true", help="print JSON instead of text, errors too")
        group.add_argument("--plain", action="store_true", help="print plain text, as into a pipe: tabs, whole numbers")
        group.add_argument("-v", "--verbose", action="count", default=0, help="log what is done; -vv logs details")
        group.add_argument("-q", "--quiet", action="store_true", help="no progress bars, no warnings")
    return parser


def _add_url(parser: Parser) -> None:
    parser.add_place("url", help="the feed: a folder, or s3://…, gs://…, az://…, hf://buckets/…")


def _add_base(parser: Parser) -> None:
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="local copy of the checkpoint that the feed began with"
    )


def _add_trust_code(parser: Parser, verb: str) -> None:
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help=f"also {verb} files beside the weights that can run code when they are loaded (*.py, *.bin, *.pt, …)",
    )


def _add_threads(parser: Parser) -> None:
    parser.add_argument("--threads", type=positive, metavar="N", help="number of threads (default: one per core)")


def _address(text: str) -> tuple[str, int]:
    from deltasync.listener import parse_address

    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not HOST:PORT") from error


def _add_publish(commands: Commands) -> None:
    parser = _command(
        commands,
        "publish",
        "feeds",
        "Commit a checkpoint as the next version of a feed.",
        more="The first version has all weights; later ones have only what changed.",
        example="deltasync publish s3://bucket/run-42 checkpoints/step-100 --step 100",
    )
    _add_url(parser)
    parser.add_place("checkpoint", help="checkpoint folder or .safetensors file; with --watch, a pattern of folders")
    parser.add_argument("--step", type=whole_number, metavar="N", help="the trainer's step, as information")
    parser.add_argument(
        "--parent",
        type=Path,
        metavar="CHECKPOINT",
        help="the checkpoint that was published last (default: rebuild it from the feed)",
    )
    parser.add_argument(
        "--anchor",
        action="store_true",
        help="add all weights, for replicas that join late; required if the set of tensors changed",
    )
    parser.add_argument(
        "--base",
        metavar="NAME[@REVISION]",
        help="first version only: replicas have this checkpoint as NAME, a folder or a Hub id; nothing is uploaded",
    )
    _add_trust_code(parser, "publish")
    parser.add_argument(
        "--require-fencing", action="store_true", help="refuse a store that cannot keep two writers apart"
    )
    parser.add_argument("--must-exist", action="store_true", help="refuse to start a new feed")
    _add_threads(parser)
    watch = parser.add_argument_group("checkpoints as they appear")
    watch.add_argument(
        "--watch",
        action="store_true",
        help="publish every folder that matches, such as 'run/weights/step_*', once it is complete; until SIGINT",
    )
    watch.add_argument("--once", action="store_true", help="publish the folders that are there, then exit")
    watch.add_argument("--after", type=whole_number, metavar="N", help="leave out folders with a number up to N")
    watch.add_argument("--marker", metavar="NAME", help="a folder is complete only with this file in it")
    watch.add_argument(
        "--settle-s",
        type=seconds,
        default=2.0,
        metavar="S",
        help="a folder is complete only if its files have not changed for S seconds (default: 2)",
    )
    watch.add_argument("--shadow", type=Path, metavar="FILE", help="keep the last weights in this file, not in memory")
    watch.add_argument("--keep-anchors", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")
    watch.add_argument("--keep-versions", type=positive, metavar="N", help="prune the feed, as `deltasync prune` does")


def _add_log(commands: Commands) -> None:
    parser = _command(
        commands,
        "log",
        "feeds",
        "List the versions of a feed.",
        more="Prints when each was committed, how much changed, and the feed's size.",
        example="deltasync log s3://bucket/run-42",
    )
    _add_url(parser)
    parser.add_argument("--all", action="store_true", help=f"list every version, not only the newest {ROWS_MAX}")


def _add_show(commands: Commands) -> None:
    parser = _command(
        commands,
        "show",
        "feeds",
        "Describe one version, and list what a restore of it fetches.",
        more="Without a version it describes the newest one.",
        example="deltasync show s3://bucket/run-42 17",
    )
    _add_url(parser)
    parser.add_place(
        "version", version_or_name, optional=True, help="the version, or the name of a pin (default: the newest)"
    )
    parser.add_argument(
        "--timeline", action="store_true", help="list its steps instead, from the capture to replicas that serve it"
    )


def _add_verify(commands: Commands) -> None:
    parser = _command(
        commands,
        "verify",
        "feeds",
        "Check every version of a feed.",
        more="Reports damage, the versions that it costs, and those that can be restored.",
        example="deltasync verify s3://bucket/run-42 --deep",
    )
    _add_url(parser)
    parser.add_argument("--deep", action="store_true", help="fetch and decode every payload, too")
    _add_base(parser)
    _add_threads(parser)


def _add_restore(commands: Commands) -> None:
    parser = _command(
        commands,
        "restore",
        "feeds",
        "Write a version as a checkpoint folder.",
        more="The folder appears whole, after every bit of it is proved, or not at all.",
        example="deltasync restore s3://bucket/run-42 -o checkpoint --version 17",
    )
    _add_url(parser)
    parser.add_argument("-o", "--output", metavar="DIR", required=True, type=Path, help="folder to write")
    parser.add_argument(
        "--version", type=version_or_name, metavar="N", help="the version, or the name of a pin (default: the newest)"
    )
    _add_base(parser)
    parser.add_argument(
        "--no-files", action="store_true", help="write only the weights, without configuration and tokenizer"
    )
    _add_trust_code(parser, "write")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be fetched")
    _add_threads(parser)


def _add_prune(commands: Commands) -> None:
    parser = _command(
        commands,
        "prune",
        "feeds",
        "Delete the payloads of old versions.",
        more="Without --yes it only lists them. It may run beside a publisher.",
        example="deltasync prune s3://bucket/run-42 --keep-anchors 2 --keep-versions 99",
    )
    _add_url(parser)
    parser.add_argument(
        "--keep-anchors", type=positive, required=True, metavar="N", help="keep at least this many anchors"
    )
    parser.add_argument(
        "--keep-versions", type=positive, required=True, metavar="N", help="keep at least this many versions restorable"
    )
    parser.add_argument(
        "--keep-s", type=seconds, metavar="S", help="keep every version restorable that was committed within S seconds"
    )
    parser.add_argument("--yes", action="store_true", help="delete; without it nothing is deleted")
    parser.add_argument("--follow", action="store_true", help="with --yes: again and again, until SIGINT or SIGTERM")
    parser.add_argument(
        "--every-s", type=seconds, default=60.0, metavar="S", help="with --follow: about every S seconds (default: 60)"
    )


def _add_compact(commands: Commands) -> None:
    parser = _command(
        commands,
        "compact",
        "feeds",
        "Write skips, so that late replicas fetch less.",
        more="A skip leads over many versions at once. It may run beside a publisher.",
        example="deltasync compact s3://bucket/run-42 --follow",
    )
    _add_url(parser)
    parser.add_argument("--follow", action="store_true", help="go on with new versions, until SIGINT or SIGTERM")
    parser.add_argument(
        "--levels",
        type=_levels,
        metavar="N,N,…",
        help="versions that a skip leads over, each a multiple of the one before (default: 4,16,64)",
    )
    _add_threads(parser)


def _add_relay(commands: Commands) -> None:
    parser = _command(
        commands,
        "relay",
        "relay",
        "Copy a feed to other stores.",
        more="Only what a destination does not have is sent. An interrupted copy goes on.",
        example="deltasync relay s3://us-bucket/run-42 s3://eu-bucket/run-42 --follow",
    )
    _add_url(parser)
    parser.add_place("destination", repeated=True, help="where to copy it to: an empty place, or an earlier copy")
    parser.add_argument("--follow", action="store_true", help="go on with new versions, until SIGINT or SIGTERM")
    parser.add_argument(
        "--every", action="store_true", help="copy every version that can be restored, however far behind"
    )
    parser.add_argument("--no-anchors", action="store_true", help="do not copy anchors that were added to versions")
    parser.add_argument("--skips", action="store_true", help="copy skips, too")
    parser.add_argument(
        "--heartbeats", action="store_true", help="let the source know the replicas of the destinations"
    )


def _add_pin(commands: Commands) -> None:
    parser = _command(
        commands,
        "pin",
        "pins",
        "Keep a version for good, under a name.",
        more="`prune` deletes nothing that it needs, and its name stands for its number.",
        example="deltasync pin s3://bucket/run-42 17 --name best --note 'reward 0.71'",
    )
    _add_url(parser)
    parser.add_place("version", version_or_name, help="the version, or the name of another pin")
    parser.add_argument(
        "--name", metavar="NAME", help="letters, digits, `.`, `_` and `-`, a letter first (default: v and the version)"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="why, for people")


def _add_unpin(commands: Commands) -> None:
    parser = _command(
        commands,
        "unpin",
        "pins",
        "Remove a pin, or all pins of a version.",
        more="The next `prune` may delete the version.",
        example="deltasync unpin s3://bucket/run-42 best",
    )
    _add_url(parser)
    parser.add_place("version", version_or_name, help="the name of the pin, or a version")


def _add_pins(commands: Commands) -> None:
    parser = _command(
        commands,
        "pins",
        "pins",
        "List the pins of a feed.",
        more="Prints their names, versions and notes.",
        example="deltasync pins s3://bucket/run-42",
    )
    _add_url(parser)


def _levels(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def _add_import(commands: Commands) -> None:
    parser = _command(
        commands,
        "import",
        "folders",
        "Publish folders of deltas, as slime writes them, to a feed.",
        more="Each weight_v… becomes a version, after every tensor passed its checksum.",
        example="deltasync import run/weights s3://bucket/run-42 --base Qwen3-8B --follow",
    )
    parser.set_defaults(function="import_folders")
    parser.add_place("folders", help="the folder that the trainer writes weight_v000001, … to")
    _add_url(parser)
    parser.add_argument("--follow", action="store_true", help="go on with new folders, until SIGINT or SIGTERM")
    parser.add_argument(
        "--base", type=Path, metavar="DIR", help="the checkpoint that the trainer began with: the version of a new feed"
    )
    parser.add_argument(
        "--restart", action="store_true", help="the trainer began again at --base: publish that, then the folders"
    )
    parser.add_argument("--shadow", type=Path, metavar="FILE", help="keep the last weights in this file, not in memory")
    parser.add_argument(
        "--require-fencing", action="store_true", help="refuse a store that cannot keep two writers apart"
    )
    _add_threads(parser)


def _add_export(commands: Commands) -> None:
    parser = _command(
        commands,
        "export",
        "folders",
        "Write a feed as folders of deltas, as slime and others read them.",
        more="The first folder is a checkpoint, each further one the change to a version.",
        example="deltasync export s3://bucket/run-42 shared/weights --follow",
    )
    _add_url(parser)
    parser.add_place("folders", help="folder to write weight_v000000, … to")
    parser.add_argument("--follow", action="store_true", help="go on with new versions, until SIGINT or SIGTERM")
    parser.add_argument(
        "--format", choices=("xor", "overwrite"), default="xor", help="how changes are written (default: xor)"
    )
    parser.add_argument(
        "--checksum",
        choices=("adler32", "xxh3-128", "blake3"),
        default="adler32",
        help="checksum of each tensor (default: adler32)",
    )
    parser.add_argument(
        "--from", dest="start", type=whole_number, metavar="N", help="first version (default: the oldest that is kept)"
    )
    _add_base(parser)
    _add_trust_code(parser, "write")
    _add_threads(parser)


def _add_follow(commands: Commands) -> None:
    parser = _command(
        commands,
        "follow",
        "follow",
        "Keep a checkpoint folder at the newest version of a feed.",
        more="Prints a line for each version that goes live, until SIGINT or SIGTERM.",
        example="deltasync follow s3://bucket/run-42 --target live --exec 'reload {path}'",
    )
    _add_url(parser)
    parser.add_argument("--target", type=Path, required=True, metavar="DIR", help="the checkpoint folder")
    parser.add_argument("--once", action="store_true", help="move to the newest version, then exit")
    parser.add_argument(
        "--exec",
        dest="program",
        metavar="COMMAND",
        help="run this after each switch, without a shell; {path} and {version} are replaced",
    )
    parser.add_argument(
        "--exec-timeout-s",
        type=seconds,
        default=600.0,
        metavar="S",
        help="end the command after this time (default: 600)",
    )
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    _add_base(parser)
    _add_trust_code(parser, "write")
    parser.add_argument("--replica", metavar="ID", help="the id in heartbeats (default: random)")
    parser.add_argument(
        "--scrub-s",
        type=seconds_or_off,
        default=3600.0,
        metavar="S",
        help="compare the folder with the mirror about every S seconds, or `off` (default: 3600)",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="serve /healthz, /readyz, /status and, with prometheus-client, /metrics while following",
    )
    parser.add_argument(
        "--ready-s",
        type=seconds,
        metavar="S",
        help="/readyz is 200 only while the version was the newest at most S seconds ago",
    )
    parser.add_argument("--metrics", action="store_true", help="refuse to start without /metrics")
    _add_threads(parser)
    sglang = parser.add_argument_group("SGLang")
    sglang.add_argument("--sglang", metavar="URL", help="let this SGLang server load each version from the folder")
    sglang.add_argument(
        "--sglang-path", metavar="DIR", help="the folder's path as the server sees it (default: the same)"
    )
    sglang.add_argument(
        "--pause",
        choices=("retract", "in_place", "abort"),
        default="retract",
        help="what happens to running requests: computed again (default), go on with the old cache, or end",
    )
    sglang.add_argument("--keep-cache", action="store_true", help="leave the KV cache of older weights as it is")


def _add_status(commands: Commands) -> None:
    parser = _command(
        commands,
        "status",
        "status",
        "List the replicas of a feed and the versions that they serve.",
        more="Exits with 3 if a live replica has other bits than its version.",
        example="deltasync status s3://bucket/run-42",
    )
    _add_url(parser)


def _add_watch(commands: Commands) -> None:
    parser = _command(
        commands,
        "watch",
        "watch",
        "Show a feed and its replicas in the terminal, live.",
        more="It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync watch s3://bucket/run-42",
    )
    _add_url(parser)
    parser.add_argument("--once", action="store_true", help="print it once, then exit")


def _add_ui(commands: Commands) -> None:
    parser = _command(
        commands,
        "ui",
        "watch",
        "Serve a web page that shows a feed and its replicas, live.",
        more="It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync ui s3://bucket/run-42",
    )
    _add_url(parser)
    parser.add_argument(
        "--listen",
        type=_address,
        default=("127.0.0.1", 8642),
        metavar="HOST:PORT",
        help="where to serve it (default: 127.0.0.1:8642); other addresses than loopback need DELTASYNC_TOKEN",
    )


def _add_report(commands: Commands) -> None:
    parser = _command(
        commands,
        "report",
        "watch",
        "Write the page of `ui` as one HTML file.",
        more="The file has all it needs inside: it opens anywhere, and makes no request.",
        example="deltasync report s3://bucket/run-42 -o report.html",
    )
    _add_url(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, type=Path, help="file to write")


def _add_serve(commands: Commands) -> None:
    parser = _command(
        commands,
        "serve",
        "serve",
        "Start a vLLM server that follows a feed.",
        more="Becomes vLLM's own API server, with the plugin and its settings.",
        example="deltasync serve --feed s3://bucket/run-42 -- --model Qwen/Qwen3-8B",
        has_output=False,
    )
    parser.usage = (
        "deltasync serve [--feed URL] [--adapter NAME=URL]... [--token-file FILE]\n"
        "                       [--push] [--mirror FILE] [--pause keep|abort|wait]\n"
        "                       [--cache clear|keep] [--on-refused exit|serve]\n"
        "                       [--ready-s S] [--scrub-s S] [--replica ID]\n"
        "                       -- VLLM-ARGUMENTS"
    )
    parser.add_argument(
        "--feed", metavar="URL", help=f"the feed of the weights (default: {FEED_VARIABLE}; without it, they stay)"
    )
    parser.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="the feed of a LoRA adapter and the name that requests use; can be repeated",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token that the control routes require (default: DELTASYNC_TOKEN)",
    )
    parser.add_argument("--push", action="store_true", help="move only on POST /deltasync/advance")
    parser.add_argument("--mirror", metavar="FILE", help="keep the mirror in this file, across restarts")
    parser.add_argument("--pause", choices=get_args(PauseMode), help="what happens to requests in flight at a switch")
    parser.add_argument("--cache", choices=get_args(CachePolicy), help="what happens to the KV cache at a switch")
    parser.add_argument("--on-refused", choices=get_args(OnRefused), help="what to do if the feed is refused for good")
    parser.add_argument("--ready-s", metavar="S", help="ready while the version was the newest at most S seconds ago")
    parser.add_argument("--scrub-s", metavar="S", help="compare all weights with the mirror about every S seconds")
    parser.add_argument("--replica", metavar="ID", help="the id in heartbeats (default: random)")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="arguments for vLLM, after --")


def _add_diff(commands: Commands) -> None:
    parser = _command(
        commands,
        "diff",
        "checkpoints",
        "Write the delta between two checkpoints to a file.",
        more="`deltasync apply` makes the new checkpoint from the old one and this file.",
        example="deltasync diff step-100 step-101 -o step-101.delta",
    )
    parser.add_place("old", help="checkpoint folder or .safetensors file")
    parser.add_place("new", help="checkpoint folder or .safetensors file")
    parser.add_argument("-o", "--output", metavar="DELTA", required=True, type=Path, help="file to write")
    parser.add_argument(
        "--codec",
        choices=("exp/1", "coo/1"),
        default="exp/1",
        help="exp/1 is the smallest (default), coo/1 has plain indices and values",
    )
    _add_threads(parser)


def _add_apply(commands: Commands) -> None:
    parser = _command(
        commands,
        "apply",
        "checkpoints",
        "Write the checkpoint that a delta leads to from an older one.",
        more="Refuses a delta that was made from other weights than those of OLD.",
        example="deltasync apply step-100 step-101.delta -o step-101",
    )
    parser.add_place("old", help="checkpoint folder or .safetensors file")
    parser.add_place("delta", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "-o", "--output", metavar="NEW", required=True, type=Path, help="checkpoint to write, structured as OLD"
    )
    _add_threads(parser)


def _add_inspect(commands: Commands) -> None:
    parser = _command(
        commands,
        "inspect",
        "checkpoints",
        "Describe the contents of a payload.",
        more="With --old it counts the changes of each layer and tensor.",
        example="deltasync inspect step-101.delta --old step-100",
    )
    parser.add_place("file", help="file that `deltasync diff` wrote")
    parser.add_argument(
        "--old", metavar="CHECKPOINT", help="the checkpoint that the delta was made from: count changes by tensor"
    )
    parser.add_argument(
        "--all", action="store_true", help=f"list every layer, block and tensor, not only the {ROWS_MAX} most changed"
    )
    _add_threads(parser)


def _add_digest(commands: Commands) -> None:
    parser = _command(
        commands,
        "digest",
        "checkpoints",
        "Print the state digest of a checkpoint.",
        more="Checkpoints with one digest have the same names, types, shapes and bits.",
        example="deltasync digest checkpoints/step-100",
    )
    parser.add_place("checkpoint", help="checkpoint folder or .safetensors file")
    _add_threads(parser)


def _add_doctor(commands: Commands) -> None:
    parser = _command(
        commands,
        "doctor",
        "doctor",
        "Check this machine and, with a URL, the store of a feed.",
        more="Writes only objects under probes/, and removes them. Exits with 1 on failure.",
        example="deltasync doctor s3://bucket/run-42",
    )
    parser.add_place(
        "url", optional=True, help=f"the feed (default: {FEED_VARIABLE}; without it, only this machine is checked)"
    )
    parser.add_argument("--read-only", action="store_true", help="write nothing: only list and read")
    parser.add_argument(
        "--probe-mb", type=positive, default=8, metavar="N", help="size of the bandwidth probe in MB (default: 8)"
    )


def _add_completion(commands: Commands) -> None:
    parser = _command(
        commands,
        "completion",
        "completion",
        "Print the completion script of a shell.",
        more="It completes commands, options, their values, and paths.",
        example='eval "$(deltasync completion bash)"    # in ~/.bashrc',
        has_output=False,
    )
    parser.add_argument("shell", choices=_SHELLS, help="the shell")
