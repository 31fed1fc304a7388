"""`serve`: what vLLM is started with, and what is refused."""

import sys
from pathlib import Path

import pytest
from support import LONG_S
from support.commands import Out, enter_feed, line, process, refusal, run

from deltasync.cli.serve import needs_model, prepare_launch
from deltasync.errors import InvalidInputError
from deltasync.vllm.settings import Settings

TOKEN = "some-token"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> Path:
    """A folder to work in: checkpoints c0 to c3, one step apart, and `feed` with the first three."""
    return enter_feed(tmp_path, monkeypatch, capsys)


OURS = ("--weight-transfer-config", '{"backend": "deltasync"}')
GIVEN = {"FEED": "s3://bucket/run", "TOKEN": "t"}


def test_the_token_is_in_no_repr() -> None:
    launch = prepare_launch([], {"FEED": "s3://bucket/run", "TOKEN": TOKEN}, environment={}, plugins=[])
    assert launch.environment["DELTASYNC_TOKEN"] == TOKEN
    settings = Settings.from_environment(launch.environment)
    assert settings.token == TOKEN
    assert TOKEN not in repr(launch) + repr(settings)


@pytest.mark.parametrize(
    ("arguments", "added"),
    [
        ([], OURS),
        (["--model", "m"], OURS),
        (list(OURS), ()),
        ([f"{OURS[0]}={OURS[1]}"], ()),
        (["--weight_transfer_config", OURS[1], "--port", "1"], ()),
        (["--weight-transfer-config.backend", "deltasync"], ()),
        (["--weight-transfer-config.backend=deltasync"], ()),
    ],
)
def test_serve_adds_the_backend(arguments: list[str], added: tuple[str, ...]) -> None:
    launch = prepare_launch(arguments, GIVEN, environment={}, plugins=[])
    assert launch.command == (sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *added)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weight-transfer-config", '{"backend": "nccl"}'], "'nccl'"),
        (['--weight-transfer-config={"backend": "nccl"}'], "'nccl'"),
        (["--weight-transfer-config.backend", "ipc"], "'ipc'"),
        ([*OURS, "--weight-transfer-config.backend=ipc"], "'ipc'"),
        (["--weight-transfer-config", "{}"], "names no backend"),
        (["--weight-transfer-config", "nccl"], "names no backend"),
        (["--weight-transfer-config"], "names no backend"),
    ],
)
def test_serve_refuses_another_backend(arguments: list[str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        prepare_launch(arguments, GIVEN, environment={}, plugins=[])
    assert caught.value.hint is not None


@pytest.mark.parametrize(
    ("before", "plugins", "allowed"),
    [
        (None, [], "deltasync"),
        (None, ["deltasync"], "deltasync"),
        (None, ["other", "deltasync", "lora", "other"], "deltasync,lora,other"),
        ("", ["other"], "deltasync"),
        ("other", ["third"], "other,deltasync"),
        ("other,deltasync", [], "other,deltasync"),
    ],
)
def test_serve_allows_the_plugin_and_keeps_the_others(before: str | None, plugins: list[str], allowed: str) -> None:
    environment = {} if before is None else {"VLLM_PLUGINS": before}
    assert prepare_launch([], GIVEN, environment=environment, plugins=plugins).environment["VLLM_PLUGINS"] == allowed


def test_the_environment_of_a_server() -> None:
    before = {"PATH": "/bin", "DELTASYNC_WAY": "push", "DELTASYNC_PAUSE": "wait", "DELTASYNC_TOKEN": "old"}
    given = {**GIVEN, "WAY": None, "PAUSE": "abort", "MIRROR": "m", "SCRUB_S": "60", "REPLICA": "r"}
    assert prepare_launch([], given, environment=before, plugins=[]).environment == {
        "PATH": "/bin",
        "VLLM_PLUGINS": "deltasync",
        "DELTASYNC_FEED": "s3://bucket/run",
        "DELTASYNC_TOKEN": "t",
        "DELTASYNC_WAY": "push",
        "DELTASYNC_PAUSE": "abort",
        "DELTASYNC_MIRROR": "m",
        "DELTASYNC_SCRUB_S": "60",
        "DELTASYNC_REPLICA": "r",
    }
    assert before["DELTASYNC_TOKEN"] == "old"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no feed to follow (pass --feed URL or --adapter NAME=URL, or set DELTASYNC_FEED)"),
        (["--adapter", "a=x", "--adapter", "a=y"], "--adapter a is given twice"),
        (["--feed", "feed", "--replica", "a/b"], "'a/b' is not a replica id"),
        (["--feed", "ftp://x"], "ftp:// is not a kind of store"),
        (["--feed", "feed", "--token-file", "none"], "none"),
        (["--feed", "feed", "--token-file", "empty"], "empty is empty"),
        (["--feed", "feed"], "vLLM is not installed here (pip install 'deltasync[vllm]')"),
    ],
)
def test_serve_refuses(
    place: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (place / "empty").write_text("\n")
    assert run("serve", *arguments) == 1
    assert message in refusal(capsys)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--scrub-s", "often", "'often' is not a number of seconds above 0, or off"),
        ("--ready-s", "0", "'0' is not a number of seconds above 0, or off"),
        ("--adapter", "math", "'math' is not NAME=URL without spaces"),
        ("--adapter", "a=x b=y", "'a=x b=y' is not NAME=URL without spaces"),
    ],
)
def test_serve_names_the_option_and_not_its_variable(
    place: Path, capsys: Out, option: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        run("serve", "--feed", "feed", option, value)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: argument {option}: {message} (see `deltasync serve --help`)\n"


SERVER = """
import json, os, sys
print(json.dumps([os.getpid(), sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith("DELTASYNC_")}]))
"""


@pytest.mark.parametrize("has_token", [True, False])
def test_serve_becomes_the_server(place: Path, has_token: bool) -> None:
    """A package in vLLM's place says what it was started with."""
    package = place / "path/vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(SERVER)
    (place / "token").write_text("secret\n")
    token = ["--token-file", "token"] if has_token else []
    options = ["--push", "--pause", "wait", "--cache", "keep", "--on-refused", "serve", "--ready-s", "9", *token]
    arguments = ["serve", "--feed", "feed", *options, "--", "--model", "c0", "--port", "1"]
    with process(*arguments, PYTHONPATH=str(place / "path")) as started:
        pid, given, environment = line(started)
        assert started.stderr is not None
        err = started.stderr.read()
        assert pid == started.pid
        assert started.wait(LONG_S) == 0
    assert given == ["--model", "c0", "--port", "1", *OURS]
    wanted = {"FEED": "feed", "WAY": "push", "PAUSE": "wait", "CACHE": "keep", "ON_REFUSED": "serve", "READY_S": "9"}
    assert environment.items() >= {f"DELTASYNC_{name}": value for name, value in wanted.items()}.items()
    if has_token:
        assert environment["DELTASYNC_TOKEN"] == "secret"
        assert err == ""
    else:
        assert len(environment["DELTASYNC_TOKEN"]) >= 32
        assert err == f"the control routes require the token {environment['DELTASYNC_TOKEN']}\n"


FEED = {"DELTASYNC_FEED": "feed"}


@pytest.mark.parametrize(
    ("arguments", "environment", "needed"),
    [
        ([], FEED, True),
        (["--port", "8000", "--load-format", "deltasync"], FEED, True),
        (["--model", "m"], FEED, False),
        (["--model=m"], FEED, False),
        (["--config", "vllm.yaml"], FEED, False),
        (["--load-format", "dummy", "--model", "m"], FEED, False),
        ([], {"DELTASYNC_ADAPTERS": "a=b"}, False),
    ],
)
def test_when_the_feed_gives_the_model(arguments: list[str], environment: dict[str, str], needed: bool) -> None:
    assert needs_model(arguments, Settings.from_environment(environment)) is needed


def test_weights_from_elsewhere_need_a_model() -> None:
    with pytest.raises(InvalidInputError, match="--load-format dummy needs a model") as caught:
        needs_model(["--load_format=dummy"], Settings.from_environment(FEED))
    assert "--model MODEL" in str(caught.value.hint)
