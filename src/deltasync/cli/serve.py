"""The `serve` command: a vLLM server that follows a feed."""

import argparse
import importlib.util
import json
import os
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path

from deltasync.cli.output import Output
from deltasync.cli.parser import FEED_VARIABLE, Parser, seconds_text
from deltasync.errors import InvalidInputError
from deltasync.format import keys
from deltasync.vllm.plugin import BACKEND
from deltasync.vllm.settings import Settings, options, parse_adapters, variable

_SERVER = "vllm.entrypoints.openai.api_server"
_TRANSFER = "--weight-transfer-config"
_LOAD_FORMAT = "--load-format"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.io_processor_plugins",
    "vllm.platform_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry points of the plugins that vLLM loads unless `VLLM_PLUGINS` is set."""


def adapter(text: str) -> str:
    """NAME=URL, as it was given: all of them become one environment variable, with spaces between them."""
    try:
        is_pair = len(parse_adapters(text)) == 1 and text.split() == [text]
    except InvalidInputError:
        is_pair = False
    if not is_pair:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not NAME=URL without spaces")
    return text


def serve_arguments(parser: Parser) -> None:
    parser.explain(
        "Becomes vLLM's own API server. Without --model, the feed gives the model, too.",
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
    parser.add_replica()
    parser.add_base()
    parser.add_trust_code("use")
    parser.add_argument("arguments", nargs="*", metavar="VLLM-ARGUMENT", help="arguments for vLLM, after --")


def serve(args: argparse.Namespace, out: Output) -> None:
    """Replace this process by the server. What it would refuse as a variable is refused here, by the option's name."""
    from deltasync.store import open_store

    names = [pair.partition("=")[0] for pair in args.adapter]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInputError(f"--adapter {twice} is given twice", hint="give each adapter a name of its own")
    if not (args.feed or names or os.environ.get(FEED_VARIABLE) or os.environ.get("DELTASYNC_ADAPTERS")):
        hint = f"pass --feed URL or --adapter NAME=URL, or set {FEED_VARIABLE}"
        raise InvalidInputError("there is no feed to follow", hint=hint)
    if args.replica is not None:
        keys.replica_key(args.replica)
    token = os.environ.get("DELTASYNC_TOKEN") or None
    if args.token_file is not None:
        token = args.token_file.read_text(encoding="utf-8").strip()
        if not token:
            hint = "put a token into it, or leave --token-file out"
            raise InvalidInputError(f"{args.token_file} is empty", hint=hint)
    given = {
        **{each.name: getattr(args, each.name, None) for each in fields(Settings)},
        "adapters": " ".join(args.adapter) or None,
        "token": secrets.token_urlsafe() if token is None else token,
        "way": "push" if args.push else None,
    }
    installed = [plugin.name for group in _PLUGIN_GROUPS for plugin in entry_points(group=group)]
    launch = prepare_launch(args.arguments, given, environment=os.environ, plugins=installed)
    for feed in (args.feed, *(pair.partition("=")[2] for pair in args.adapter)):
        if feed:
            open_store(feed).close()
    if importlib.util.find_spec("vllm") is None:
        raise InvalidInputError("vLLM is not installed here", hint="pip install 'deltasync[vllm]'")
    if needs_model(args.arguments, launch.settings):
        launch = with_model(launch, trust_code=args.trust_code)
    if token is None:
        print(f"the control routes require the token {given['token']}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(launch.command[0], launch.command, launch.environment)


@dataclass(frozen=True, slots=True)
class Launch:
    """The command and the environment of a server."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)

    @property
    def settings(self) -> Settings:
        return Settings.from_environment(self.environment)


def needs_model(arguments: Sequence[str], settings: Settings) -> bool:
    """Whether vLLM has to get its model from the feed: there is one, and the arguments name no model.

    A file of arguments (`--config`) may name it. InvalidInputError for arguments that need a model on the disk.
    """
    given = _options(arguments)
    if settings.feed is None or not given.keys().isdisjoint({"--model", "--config"}):
        return False
    if given.get(_LOAD_FORMAT, BACKEND) != BACKEND:
        raise InvalidInputError(
            f"{_LOAD_FORMAT} {given[_LOAD_FORMAT]!s:.80} needs a model, and the arguments of vLLM name none",
            hint=f"leave {_LOAD_FORMAT} out to take the weights from the feed, or name one: -- --model MODEL",
        )
    return True


def with_model(launch: Launch, *, trust_code: bool) -> Launch:
    """The same server with the model of the feed, in a private folder that is there as long as this process."""
    from deltasync.vllm.bootstrap import MIRROR, MODEL, BareModel, bootstrap

    settings, given = launch.settings, _options(launch.command)
    assert settings.feed is not None
    model = BareModel.of_feed(
        settings.feed,
        base=settings.base,
        trust_code=trust_code,
        needs_tokenizer=given.keys().isdisjoint({"--tokenizer", "--skip-tokenizer-init"}),
    )
    folder = bootstrap(launch.environment, model)
    added = ["--model", str(folder / MODEL)]
    if _LOAD_FORMAT not in given:
        added += [_LOAD_FORMAT, BACKEND]
    if "--served-model-name" not in given:
        added += ["--served-model-name", settings.feed.rstrip("/").rpartition("/")[2]]
    mirror = folder / MIRROR if settings.mirror is None else settings.mirror
    return Launch((*launch.command, *added), {**launch.environment, "DELTASYNC_MIRROR": str(mirror)})


def prepare_launch(
    arguments: Sequence[str],
    given: Mapping[str, object],
    *,
    environment: Mapping[str, str],
    plugins: Iterable[str],
) -> Launch:
    """A server with these arguments of vLLM, and with `given` as settings, by their names.

    Settings for which None is given stay as they are in `environment`. `plugins` are the names that vLLM loads if no
    list is set. InvalidInputError for a value that the server would refuse, or for another backend in the arguments.
    """
    added = {variable(name): str(value) for name, value in given.items() if value is not None}
    # vLLM loads only the plugins in this list once it is set, so the others have to be named, too.
    allowed = environment["VLLM_PLUGINS"].split(",") if "VLLM_PLUGINS" in environment else sorted(plugins)
    names = dict.fromkeys([*(name for name in allowed if name), BACKEND])
    result = {**environment, **added, "VLLM_PLUGINS": ",".join(names)}
    Settings.from_environment(result)
    backend = None
    for option, value in _options(arguments).items():
        if option == _TRANSFER:
            try:
                config = json.loads(value)
            except ValueError:
                config = None
            backend = config.get("backend") if isinstance(config, dict) else None
            if not isinstance(backend, str):
                message = f"{_TRANSFER} is {value!r:.80}, which names no backend"
                raise InvalidInputError(message, hint="leave the option out")
        elif option == f"{_TRANSFER}.backend":
            backend = value
    if backend not in (None, BACKEND):
        raise InvalidInputError(
            f"{_TRANSFER} selects the backend {backend!r:.80}, not {BACKEND!r}", hint="leave the option out"
        )
    transfer = (_TRANSFER, json.dumps({"backend": BACKEND})) if backend is None else ()
    return Launch((sys.executable, "-m", _SERVER, *arguments, *transfer), result)


def _options(arguments: Sequence[str]) -> dict[str, str]:
    """The options among the arguments of vLLM, each with what follows it."""
    options = {}
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            following = arguments[i + 1] if i + 1 < len(arguments) else ""
            # vLLM takes names with underscores, too.
            options[name.replace("_", "-")] = value if equals else following
    return options
