"""Help and the pages, completion of shells, exit codes and errors, signals."""

import argparse
import json
import logging
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from support import LONG_S, processes
from support.commands import Out, enter_checkpoints, run
from support.servers import missing

import deltasync
from deltasync import errors
from deltasync.cli import main as cli
from deltasync.cli.main import build_parser, parse
from deltasync.cli.parser import Parser
from deltasync.replica.folder import Hook
from deltasync.replica.loop import SCRUB_S

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


PYTHON = [sys.executable, "-W", "ignore", "-m", "deltasync"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: `old` (sharded), `new` (sharded), `one.safetensors` (old in one file)."""
    return enter_checkpoints(tmp_path, monkeypatch)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# --- errors, signals, output that breaks off --------------------------------------------------------------------------


def test_version(capsys: Out) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"deltasync {deltasync.__version__}\n"


CODES: list[tuple[BaseException, int]] = [
    (errors.ConflictError("x"), 4),
    (errors.CorruptError("x"), 3),
    (errors.MismatchError("x"), 3),
    (errors.FormatError("x"), 3),
    (errors.NotFoundError("x"), 1),
    (errors.InvalidInputError("x"), 1),
    (errors.StoreError("x", transient=True), 1),
    (PermissionError(13, "denied", "f"), 1),
    (KeyboardInterrupt(), 130),
    (RuntimeError("a bug"), 1),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=[type(e).__name__ for e, _ in CODES])
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: Out, error: BaseException, code: int) -> None:
    def fail(path: str, **options: object) -> None:
        raise error

    monkeypatch.setattr("deltasync.oneshot.inspect", fail)
    assert run("inspect", "x") == code
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "f"), "f: Permission denied (check the owner and the mode"),
        (OSError(28, "No space left on device", "f"), "f: No space left on device (the disk is full"),
        (OSError(30, "Read-only file system", "f"), "f: Read-only file system (the file system is mounted read-only"),
        (OSError(18, "Invalid cross-device link", "a", None, "b"), "a and b: Invalid cross-device link\n"),
        (OSError("a plain text"), "a plain text\n"),
        (OSError(28, "No space left", "out/.d.0123456789ab.tmp/x"), "out/d/x: No space left (the disk is full"),
    ],
    ids=["permission", "full", "read-only", "two files", "text", "a temporary file"],
)
def test_errors_of_files_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Out, error: OSError, message: str
) -> None:
    def fail(path: str, **options: object) -> None:
        raise error

    monkeypatch.setattr("deltasync.oneshot.inspect", fail)
    assert run("inspect", "x") == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert run("inspect", "x", "--json") == 1
    found = json.loads(capsys.readouterr().err)["error"]
    assert (found["kind"], found["key"] is None) == ("os", error.filename is None)


def test_errors_as_json(place: Path, capsys: Out) -> None:
    """One line with all that the error knows."""
    run("diff", "new", "old", "-o", "d")
    capsys.readouterr()
    assert run("apply", "old", "d", "-o", "out", "--json") == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    found = json.loads(err)["error"]
    assert found.keys() == {"kind", "message", "rule", "hint", "key", "version", "exit_code"}
    assert (found["kind"], found["rule"], found["exit_code"]) == ("mismatch", "payload.parent", 3)
    assert found["hint"] == "apply it to the state that it was made against"


def test_levels_of_the_log(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def chatty(path: str, **options: object) -> None:
        logger = logging.getLogger("deltasync.feed")
        logger.debug("a detail")
        logger.info("what is done")
        logger.warning("something odd: %s", "\x1b[2J")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("built without kernels", RuntimeWarning, stacklevel=1)
        raise errors.InvalidInputError("wrong")

    monkeypatch.setattr("deltasync.oneshot.inspect", chatty)
    odd = ["warning: something odd: \\x1b[2J", "warning: built without kernels"]
    for options, expected in (
        ([], odd),
        (["-q"], []),
        (["-v"], ["info: what is done", *odd]),
        (["-vv"], ["debug: a detail", "info: what is done", *odd]),
    ):
        assert run("inspect", "x", *options) == 1
        assert capsys.readouterr().err.splitlines() == [*expected, "error: wrong"]
    assert run("inspect", "x", "--json") == 1
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["log"]["message"] for line in lines[:2]] == [text.removeprefix("warning: ") for text in odd]
    assert lines[2]["error"]["message"] == "wrong"
    assert not logging.getLogger("deltasync").handlers, "nothing is left behind in this process"


def test_the_program(place: Path) -> None:
    done = processes.run([*PYTHON, "diff", "old", "new", "-o", "d"])
    assert (done.returncode, done.stderr) == (0, "")
    done = processes.run([*PYTHON, "apply", "new", "d", "-o", "out"])
    assert done.returncode == 3
    assert deltasync.digest("old").hex in done.stderr
    assert deltasync.digest("new").hex in done.stderr
    assert done.stdout == ""
    assert not (place / "out").exists()
    assert processes.run([*PYTHON]).returncode == 2


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_reader_that_leaves_early(place: Path, option: list[str]) -> None:
    run("diff", "old", "new", "-o", "d")
    reading, writing = os.pipe()
    os.close(reading)
    done = processes.run([*PYTHON, "inspect", "d", *option], stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("arguments", [["--help"], ["log", "--help"], ["--version"], ["digest", "old"]])
def test_output_that_cannot_be_written(place: Path, arguments: list[str]) -> None:
    """A reader that has gone, a full disk, a closed stdout: an exit code, and no traceback."""
    reading, writing = os.pipe()
    os.close(reading)
    done = processes.run([*PYTHON, *arguments], stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
    with open("/dev/full", "w") as full:
        done = processes.run([*PYTHON, *arguments], stdout=full)
    assert done.returncode == 1
    assert done.stderr.startswith("error: No space left on device (")
    assert done.stderr.count("\n") == 1
    command = ["sh", "-c", '"$@" >&-', "sh", *PYTHON, *arguments]
    done = processes.run(command)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_leaves_nothing(place: Path) -> None:
    """Interrupted while the copy is being filled, the command removes it and says 130."""
    run("diff", "old", "new", "-o", "d")
    before = names(place)
    script = (
        "import sys, time\n"
        "from deltasync import blocks\n"
        "blocks.decode_into = lambda *a, **k: (print('filling', flush=True), time.sleep(600))\n"
        "from deltasync.cli.main import main\n"
        "sys.exit(main(['apply', 'old', 'd', '-o', 'out']))\n"
    )
    with processes.running(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "filling\n"
        assert names(place) != before, "the temporary folder is there"
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LONG_S)
    assert (process.returncode, err) == (130, "error: interrupted\n")
    assert names(place) == before


INTERRUPTER = """
import importlib.abc, os, signal, sys

class Interrupter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""


@pytest.mark.parametrize("module", ["deltasync.cli.main", "numpy", "deltasync.cli.feeds", "deltasync.upkeep.verify"])
def test_an_interrupt_while_modules_are_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "run.py").write_text(f"{INTERRUPTER}\nfrom deltasync.__main__ import main\nsys.exit(main())\n")
    environment = {**os.environ, "INTERRUPT_AT": module}
    command = [sys.executable, str(tmp_path / "run.py"), "log", "nowhere"]
    done = processes.run(command, env=environment)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
