"""Help, suggestions, the default feed, and the completion of shells."""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from support import processes
from support.helpers import state, write_sharded
from support.servers import missing

import deltasync
from deltasync.cli import main as cli
from deltasync.cli.main import build_parser, parse
from deltasync.cli.parser import Parser, UsageError
from deltasync.replica.folder import Hook
from deltasync.replica.loop import SCRUB_S

Out = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs/commands.md"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "deploy", "examples")
    for path in (ROOT / folder).glob("*.md")
)
PAGES += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("examples/*/README.md"))
PAGES.remove("CHANGELOG.md")  # It also names what is gone.

MODULES_MAX = 110
OWN_MODULES_MAX = 20
"""Modules that help imports, of all and of deltasync alone: about as many as it needs."""

HEAVY = {"numpy", "rich", "obstore", "shtab", "torch", "prometheus_client", "vllm"}
"""What help never imports."""


def commands() -> dict[str, Parser]:
    (subparsers,) = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return subparsers.choices


def usage_error(*argv: str, **environment: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        parse(argv, environment=environment)
    return caught.value


# --- help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["-V", "--version"])
def test_the_release(capsys: Out, option: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([option])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"deltasync {deltasync.__version__}\n"


def test_alone_it_prints_help_and_fails(capsys: Out) -> None:
    """A script whose command is an empty variable must not look successful."""
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(re.search(rf"^    {name} ", err, re.MULTILINE) for name in commands())


@pytest.mark.parametrize("name", [None, *commands()])
def test_help_fits_80_columns(capsys: Out, monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        cli.main(["--help"] if name is None else [name, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "docs/commands.md" in text


@pytest.mark.parametrize(("name", "parser"), commands().items())
def test_every_command_says_what_it_does_with_an_example_and_the_docs(name: str, parser: Parser) -> None:
    summary, more = (parser.description or "").splitlines()
    assert summary.endswith(".")
    assert more.endswith(".")
    example = re.search(r"^example:\n  (.*)$", parser.epilog or "", re.MULTILINE)
    assert example is not None
    words = shlex.split(example[1], comments=True)
    if words[0] == "eval":
        words = shlex.split(words[1].removeprefix("$(").removesuffix(")"))
    assert words[:2] == ["deltasync", name]
    assert parse(words[1:], environment={}).command == name
    assert f"docs/commands.md#{name}" in (parser.epilog or "")


@pytest.mark.parametrize(("name", "parser"), commands().items())
def test_the_docs_have_every_command_and_option(name: str, parser: Parser) -> None:
    text = DOCS.read_text()
    assert f"| [`{name}`](#{name}) |" in text
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    common = text[: text.index("\n## ")]
    for option in (option for action in parser._actions for option in action.option_strings):
        assert re.search(rf"[`\[ |,]{option}\b", section[1] + common), f"{name} {option}"


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_pages_parse(page: str) -> None:
    """Whole lines of code do, but for synopses. Commands inside of a sentence have options that exist."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    for line in re.findall(r"^(?: {4}|)deltasync ([a-z].*)", "\n".join(code_lines(text)), re.M):
        if "[" not in line and "|" not in line:
            words = shlex.split(re.sub(r" > .*", "", line), comments=True)
            assert parse(words, environment={}).command == words[0]
    for words in (re.sub(r"\s+", " ", code).split() for code in re.findall(r"`(?:deltasync )?([a-z]+ [^`]*)`", text)):
        if words[0] in commands():
            ours = words[: words.index("--")] if "--" in words else words
            given = {re.sub(r"\W+$", "", word.lstrip("[")) for word in ours if re.match(r"\[?--", word)}
            assert given <= set(commands()[words[0]]._option_string_actions), words


def code_lines(text: str) -> list[str]:
    """The lines of Markdown that are code: indented after an empty line, or between fences."""
    found, is_fenced, is_indented, before = [], False, False, ""
    for line in text.splitlines():
        if line.startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced:
            found.append(line)
        else:
            is_indented = line.startswith("    ") and (is_indented or not before)
            if is_indented:
                found.append(line)
        before = line
    return found


def test_the_command_in_the_docs_is_split_as_meant() -> None:
    text = DOCS.read_text()
    line = next(line for line in text.splitlines() if "update_weights_from_disk" in line)
    (argument,) = shlex.split(line)
    assert Hook(argument, Path("live"), timeout_s=1)._words == [
        "curl", "-fsS", "http://127.0.0.1:30000/update_weights_from_disk", "--json", '{"model_path": "{path}"}'
    ]  # fmt: skip


def test_the_default_of_the_scrub_is_that_of_the_library() -> None:
    assert parse(["follow", "feed", "--target", "live"], environment={}).scrub_s == SCRUB_S
    assert parse(["follow", "feed", "--target", "live", "--scrub-s", "off"], environment={}).scrub_s is None


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in ("log", "follow", "diff"))], ids=" ".join)
def test_help_imports_little(argv: list[str]) -> None:
    """No NumPy, no rich, no client of a store, and few modules of ours: help and errors of usage come at once."""
    code = (
        "import json, sys\nbefore = set(sys.modules)\nfrom deltasync.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(json.dumps(sorted(set(sys.modules) - before)), file=sys.stderr)"
    )
    done = processes.run([sys.executable, "-c", code, *argv], check=True)
    loaded = json.loads(done.stderr)
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in loaded)
    assert len([name for name in loaded if name.partition(".")[0] == "deltasync"]) <= OWN_MODULES_MAX, loaded
    assert len(loaded) <= MODULES_MAX, loaded
    of_commands = {f"deltasync.cli.{module}" for module, _ in cli.COMMANDS.values()} - {"deltasync.cli.main"}
    chosen = {f"deltasync.cli.{cli.COMMANDS[word][0]}" for word in argv if word in cli.COMMANDS}
    assert of_commands.intersection(loaded) == chosen


def test_no_module_of_a_command_imports_much_before_it_runs() -> None:
    code = "import sys\nfrom deltasync.cli.main import build_parser\nbuild_parser()\nprint(*sys.modules)"
    loaded = processes.run([sys.executable, "-c", code], check=True).stdout.split()
    assert {f"deltasync.cli.{module}" for module, _ in cli.COMMANDS.values()} <= set(loaded)
    assert HEAVY.isdisjoint(name.partition(".")[0] for name in loaded)


# --- did you mean -----------------------------------------------------------------------------------------------------


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


# --- the default feed -------------------------------------------------------------------------------------------------

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


# --- completion -------------------------------------------------------------------------------------------------------

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
COMP_LINE="$*"
COMP_POINT=${#COMP_LINE}
_shtab_deltasync
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The completion scripts of all shells."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in ("bash", "zsh", "fish"):
        command = [sys.executable, "-m", "deltasync", "completion", shell]
        (folder / shell).write_text(processes.run(command, check=True).stdout)
    return folder


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["lo"], {"log"}),
        (["s"], {"show", "status", "serve"}),
        (["log", "--p"], {"--plain"}),
        (["prune", "--keep"], {"--keep-anchors", "--keep-versions", "--keep-s"}),
        (["serve", "--pause", ""], {"keep", "abort", "wait"}),
        (["completion", ""], {"bash", "zsh", "fish"}),
        (["digest", "ck"], {"ckpt.safetensors", "ckpts"}),
        (["restore", "feed", "-o", "ck"], {"ckpts"}),
    ],
)
def test_bash_completes(tmp_path: Path, scripts: Path, words: list[str], expected: set[str]) -> None:
    (tmp_path / "ckpts").mkdir()
    (tmp_path / "ckpt.safetensors").touch()
    command = ["bash", "--norc", "-c", COMPLETE, "complete", str(scripts / "bash"), "deltasync", *words]
    done = processes.run(command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.strip() for line in done.stdout.splitlines()} == expected


@pytest.mark.parametrize(("shell", "option"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")])
def test_the_scripts_are_valid(scripts: Path, shell: str, option: str) -> None:
    text = (scripts / shell).read_text()
    assert all(name in text for name in commands())
    if shutil.which(shell) is None:
        missing(f"{shell} is not installed")
    done = processes.run([shell, option, str(scripts / shell)])
    assert (done.returncode, done.stderr) == (0, "")
