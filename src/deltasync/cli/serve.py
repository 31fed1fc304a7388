"""`deltasync serve --feed URL -- VLLM-ARGUMENTS`."""

import argparse
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args

from deltasync.cli.options import Commands
from deltasync.errors import InvalidInputError
from deltasync.serve.vllm.plugin import BACKEND
from deltasync.serve.vllm.settings import PauseMode, Settings
from deltasync.store.opening import open_store

_SERVER = "vllm.entrypoints.openai.api_server"
_TRANSFER = "--weight-transfer-config"
_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry points of plugins that vLLM loads unless `VLLM_PLUGINS` is set."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The process to become."""

    command: tuple[str, ...]
    environment: Mapping[str, str]


def register(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "serve", help="start a vLLM server that follows a feed", description=__doc__, usage=_USAGE
    )
    parser.add_argument("--feed", required=True, metavar="URL", help="the feed to follow")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE", help="what the control routes ask for (default: DELTASYNC_TOKEN)"
    )
    parser.add_argument("--push", action="store_true", help="move only when told, by `deltasync follow --vllm`")
    parser.add_argument("--mirror", metavar="FILE", help="keep the mirror in this file, across restarts")
    parser.add_argument("--pause", choices=get_args(PauseMode), help="what becomes of requests at a switch")
    parser.add_argument("--scrub-s", metavar="S", help="compare all weights with the mirror every S seconds or so")
    parser.add_argument("--replica", metavar="ID", help="the name in heartbeats (default: one that nobody else has)")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="what follows -- is for vLLM")
    parser.set_defaults(run=run)


_USAGE = (
    "deltasync serve --feed URL [--token-file FILE] [--push] [--mirror FILE] [--pause keep|abort|wait] [--scrub-s S]\n"
    "                       [--replica ID] -- VLLM-ARGUMENTS"
)


def run(args: argparse.Namespace) -> None:
    """Become the server. Does not return."""
    token = _token(args.token_file, os.environ)
    given = {
        "FEED": args.feed,
        "TOKEN": secrets.token_urlsafe() if token is None else token,
        "WAY": "push" if args.push else None,
        "MIRROR": args.mirror,
        "PAUSE": args.pause,
        "SCRUB_S": args.scrub_s,
        "REPLICA": args.replica,
    }
    installed = [plugin.name for group in _GROUPS for plugin in entry_points(group=group)]
    launch = prepare(args.arguments, given, environment=os.environ, plugins=installed)
    open_store(args.feed).close()
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed here", hint="pip install 'deltasync[vllm]'")
    if token is None:
        print(f"the control routes ask for the token {given['TOKEN']}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


def prepare(
    arguments: Sequence[str],
    given: Mapping[str, str | None],
    *,
    environment: Mapping[str, str],
    plugins: Iterable[str],
) -> Launch:
    """The command and environment of a server with these arguments of vLLM, and `given` as `DELTASYNC_*` variables.

    What is not given stays as it is in the environment. `plugins` are the names that vLLM would load by itself.
    InvalidInputError for a value that the server would refuse, or for another backend among the arguments.
    """
    added = {f"DELTASYNC_{name}": value for name, value in given.items() if value is not None}
    # The list of plugins allows these and no others: what was loaded without one must be named from now on.
    allowed = environment["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environment else sorted(plugins)
    names = dict.fromkeys([*(name for name in allowed if name), BACKEND])
    result = {**environment, **added, "VLLM_PLUGINS": ",".join(names)}
    Settings.from_environment(result)
    transfer = () if _has_backend(arguments) else (_TRANSFER, json.dumps({"backend": BACKEND}))
    return Launch((sys.executable, "-m", _SERVER, *arguments, *transfer), result)


def _has_backend(arguments: Sequence[str]) -> bool:
    """Whether our backend is chosen among vLLM's arguments; InvalidInputError if another one is."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not equals:
            value = arguments[i + 1] if i + 1 < len(arguments) else ""
        option = name.replace("_", "-")
        if option == _TRANSFER:
            found = _backend(value)
        elif option == f"{_TRANSFER}.backend":
            found = value
    if found not in (None, BACKEND):
        raise InvalidInputError(
            f"{_TRANSFER} asks for the backend {found!r:.80}", hint="leave it out: a server has one backend"
        )
    return found is not None


def _backend(value: str) -> str:
    try:
        config = json.loads(value)
    except ValueError:
        config = None
    found = config.get("backend") if isinstance(config, dict) else None
    if not isinstance(found, str):
        raise InvalidInputError(f"{_TRANSFER} is {value!r:.80}, which names no backend", hint="leave it out")
    return found


def _token(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """The token from the file, else from the environment."""
    if path is None:
        value = environment.get("DELTASYNC_TOKEN", "")
        return value if value else None
    text = path.read_text().strip()
    if not text:
        raise InvalidInputError(f"{path} is empty", hint="put a token into it, or leave --token-file out")
    return text
