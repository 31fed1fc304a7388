"""The arguments of commands on replicas: follow, status, watch, ui, report, serve."""

import argparse
from pathlib import Path

from deltasync.cli.parser import (
    FEED_VARIABLE,
    Commands,
    add_base,
    add_command,
    add_listen,
    add_replica,
    add_threads,
    add_trust_code,
    add_url,
    address,
    seconds,
    seconds_or_off,
    seconds_text,
)
from deltasync.errors import InvalidInputError
from deltasync.vllm.settings import options, parse_adapters


def adapter(text: str) -> str:
    """NAME=URL, as it was given: all of them become one environment variable, with spaces between them."""
    try:
        is_pair = len(parse_adapters(text)) == 1 and text.split() == [text]
    except InvalidInputError:
        is_pair = False
    if not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not NAME=URL without spaces")
    return text


def add_follow(commands: Commands) -> None:
    parser = add_command(
        commands,
        "follow",
        "follow",
        "Keep a checkpoint folder at the newest version of a feed.",
        more="Prints a line for each version that goes live, until SIGINT or SIGTERM.",
        example="deltasync follow s3://bucket/run-42 --target live --exec 'reload {path}'",
    )
    add_url(parser)
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
        metavar="S",
        help="end the command after this time (default: 600)",
    )
    parser.add_argument("--mirror", type=Path, metavar="FILE", help="keep the mirror in this file, across restarts")
    add_base(parser)
    add_trust_code(parser, "write")
    add_replica(parser)
    parser.add_argument(
        "--scrub-s",
        type=seconds_or_off,
        default=3600.0,
        metavar="S",
        help="compare the folder with the mirror about every S seconds, or `off` (default: 3600)",
    )
    add_listen(parser)
    parser.add_argument(
        "--ready-s",
        type=seconds,
        metavar="S",
        help="/readyz is 200 only while the version was the newest at most S seconds ago",
    )
    add_threads(parser)
    sglang = parser.add_argument_group("SGLang")
    sglang.add_argument("--sglang", metavar="URL", help="let this SGLang server load each version from the folder")
    sglang.add_argument(
        "--sglang-path", metavar="DIR", help="the folder's path as the server sees it (default: the same)"
    )
    sglang.add_argument(
        "--pause",
        choices=("retract", "in_place", "abort"),
        help="what happens to running requests: computed again (default), go on with the old cache, or end",
    )
    sglang.add_argument("--keep-cache", action="store_true", help="leave the KV cache of older weights as it is")
    sglang.add_argument(
        "--only-changes",
        action="store_true",
        help="write only what changed over the server's weights; it needs our loader (docs/integrations.md)",
    )


def add_status(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        "watch",
        "List the replicas of a feed and the versions that they serve.",
        more="Exits with 3 if a live replica has other bits than its version.",
        example="deltasync status s3://bucket/run-42",
    )
    add_url(parser)


def add_watch(commands: Commands) -> None:
    parser = add_command(
        commands,
        "watch",
        "watch",
        "Show a feed and its replicas in the terminal, live.",
        more="It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync watch s3://bucket/run-42",
    )
    add_url(parser)
    parser.add_argument("--once", action="store_true", help="print it once, then exit")


def add_ui(commands: Commands) -> None:
    parser = add_command(
        commands,
        "ui",
        "watch",
        "Serve a web page that shows a feed and its replicas, live.",
        more="It goes on until SIGINT or SIGTERM. It reads the feed, and never writes.",
        example="deltasync ui s3://bucket/run-42",
    )
    add_url(parser)
    parser.add_argument(
        "--listen",
        type=address,
        default=("127.0.0.1", 8642),
        metavar="HOST:PORT",
        help="where to serve it (default: 127.0.0.1:8642); other addresses than loopback need DELTASYNC_TOKEN",
    )


def add_report(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        "watch",
        "Write the page of `ui` as one HTML file.",
        more="The file has all it needs inside: it opens anywhere, and makes no request.",
        example="deltasync report s3://bucket/run-42 -o report.html",
    )
    add_url(parser)
    parser.add_argument("-o", "--output", metavar="FILE", required=True, type=Path, help="file to write")


def add_serve(commands: Commands) -> None:
    parser = add_command(
        commands,
        "serve",
        "serve",
        "Start a vLLM server that follows a feed.",
        more="Becomes vLLM's own API server. Without --model, the feed gives the model, too.",
        example="deltasync serve --feed s3://bucket/run-42 -- --port 8000",
        has_output=False,
    )
    parser.usage = (
        "deltasync serve [--feed URL] [--adapter NAME=URL]... [--token-file FILE]\n"
        "                       [--push] [--mirror FILE] [--pause keep|abort|wait]\n"
        "                       [--cache clear|keep] [--on-refused exit|serve]\n"
        "                       [--ready-s S] [--scrub-s S] [--replica ID]\n"
        "                       [--base DIR] [--trust-code] -- VLLM-ARGUMENTS"
    )
    parser.add_argument(
        "--feed", metavar="URL", help=f"the feed of the weights (default: {FEED_VARIABLE}; without it, they stay)"
    )
    parser.add_argument(
        "--adapter",
        type=adapter,
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
    for name, option in options():
        parser.add_argument(name, type=seconds_text if option.get("metavar") == "S" else str, **option)
    add_replica(parser)
    add_base(parser)
    add_trust_code(parser, "use")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="arguments for vLLM, after --")
