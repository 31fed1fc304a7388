"""Suggestions for what was meant, and the default feed."""

import json
import os
import sys
from pathlib import Path

import pytest
from support import processes
from support.commands import Out
from support.helpers import state, write_sharded

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.main import parse
from deltasync.cli.parser import UsageError


def usage_error(*argv: str, **environment: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(argv, environment=environment)
    return caught.value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lgo", "feed"], "there is no command 'lgo': did you mean log?"),
        (["complete", "bash"], "there is no command 'complete': did you mean completion?"),
        (["qqqq"], "there is no command 'qqqq'"),
        (["log", "feed", "--jsno"], "there is no option '--jsno': did you mean --json?"),
        (["log", "feed", "--verbos=1"], "argument -v/--verbose: ignored explicit argument '1'"),
        (["log", "feed", "-x"], "there is no option '-x'"),
        (["serve", "--pause", "kep"], "argument --pause: 'kep' is none of keep, abort, wait: did you mean keep?"),
        (["completion", "sh"], "argument shell: 'sh' is none of bash, zsh, fish"),
        (["log"], "URL is missing (or set DELTASYNC_FEED)"),
        (["publish", "feed"], "CHECKPOINT is missing"),
        (["diff", "-o", "d"], "OLD and NEW are missing"),
        (["log", "feed", "more"], "there is one argument too many: 'more'"),
        (["show", "feed", "-best"], "there is no option '-best'"),
        (["show", "feed", "9best"], "argument VERSION: '9best' is neither a version nor the name of a pin"),
        (["show", "feed", 5000 * "9"], f"argument VERSION: '{79 * '9'} is not a whole number from 0 on"),
        (["pin", "feed", 5000 * "9"], f"argument VERSION: '{79 * '9'} is not a whole number from 0 on"),
        (["restore", "feed", "-o", "out", "--version", 30 * "9"], f"argument --version: '{30 * '9'}' is not a whole"),
        (["verify", "feed", "--threads", "1025"], "argument --threads: '1025' is not a whole number from 1 to 1,024"),
        (["doctor", "feed", "--probe-mb", "9999999"], "argument --probe-mb: '9999999' is not a whole number from 1 to"),
        (["publish", "feed", "--watch", "step_1", "step_2"], "there is one argument too many: 'step_2' (a pattern"),
    ],
)  # fmt: skip
def test_wrong_usage_says_what_was_meant(argv: list[str], message: str, capsys: Out) -> None:
    assert usage_error(*argv).message.startswith(message)
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr() == ("", f"error: {usage_error(*argv).message} ({usage_error(*argv).hint})\n")
    with pytest.raises(SystemExit):
        cli.main([*argv, "--json"])
    found = json.loads(capsys.readouterr().err)["error"]
    assert (found["kind"], found["exit_code"]) == ("usage", 2)


ENV = {"DELTASYNC_FEED": "s3://b/env"}


@pytest.mark.parametrize(
    ("argv", "fields"),
    [
        (["log"], {"url": "s3://b/env"}),
        (["log", "mine"], {"url": "mine"}),
        (["log", "--json", "mine", "--all"], {"url": "mine", "json": True, "all": True}),
        (["show"], {"url": "s3://b/env", "version": None}),
        (["show", "7"], {"url": "s3://b/env", "version": 7}),
        (["show", "mine"], {"url": "mine", "version": None}),
        (["show", "./7"], {"url": "./7", "version": None}),
        (["show", "mine", "--json", "7"], {"url": "mine", "version": 7}),
        (["publish", "ckpt"], {"url": "s3://b/env", "checkpoint": "ckpt"}),
        (["publish", "mine", "--step", "3", "ckpt"], {"url": "mine", "checkpoint": "ckpt", "step": 3}),
        (["restore", "-o", "out"], {"url": "s3://b/env"}),
        (["follow", "--target", "live"], {"url": "s3://b/env"}),
        (["doctor"], {"url": "s3://b/env"}),
        (["doctor", "mine"], {"url": "mine"}),
    ],
)
def test_the_feed_of_the_environment(argv: list[str], fields: dict[str, object]) -> None:
    args = vars(parse(argv, environment=ENV))
    assert {name: args[name] for name in fields} == fields


def test_a_number_is_a_feed_without_the_environment() -> None:
    args = parse(["show", "7"], environment={})
    assert (args.url, args.version) == ("7", None)
    assert parse(["doctor"], environment={}).url is None


def test_the_feed_of_the_environment_in_a_process(tmp_path: Path) -> None:
    write_sharded(tmp_path / "c0", state())
    environment = {**os.environ, "DELTASYNC_FEED": str(tmp_path / "feed")}
    for arguments in (["publish", str(tmp_path / "c0")], ["show"]):
        command = [sys.executable, "-m", "deltasync", *arguments]
        done = processes.run(command, env=environment)
        assert done.returncode == 0, done.stderr
    assert f"digest\t{deltasync.digest(state())}" in done.stdout
