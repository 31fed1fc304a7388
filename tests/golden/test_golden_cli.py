"""What every command prints and returns, on fixed feeds.

A scenario is a list of lines: commands, and after `>` what is done to the folder in between. Each command runs twice:
with `--json`, in a copy of the folder if it writes something, and as it is given.
"""

import argparse
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden import DURATIONS, TIMES, Labels, check, check_json, fixed_state, without
from support import LONG_S
from support.helpers import resealed, write_sharded

import deltasync
from deltasync.cli import folders
from deltasync.cli import main as cli
from deltasync.format import keys
from deltasync.format.sealed import Heartbeat
from deltasync.store.local import LocalStore

CREATE = LocalStore.create
PARSER = cache(cli.build_parser)
Out = pytest.CaptureFixture[str]

SETTLE_S = 0.05
"""Of `publish --watch`."""
CHECKPOINTS = 6
"""Of the first five, the feed is made; it has an anchor at version 3."""


# What is done to a folder


def manifest(feed: str, version: str) -> Path:
    return Path(feed, keys.version_key(int(version)))


def payload(feed: str, version: str) -> Path:
    named: dict[str, Any] = json.loads(manifest(feed, version).read_text())
    return Path(feed, keys.payload_key(named["payloads"][0]["sha256"]))


def flip(path: Path) -> None:
    """Another last byte. Objects of a feed are never written in place: others may be links to the same file."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def beat(replica: str, version: str, age_s: str, *facts: str) -> None:
    """The heartbeat of a replica of `feed`, from `age_s` ago."""
    path = Path("feed", keys.replica_key(replica))
    path.parent.mkdir(exist_ok=True)
    given = dict(fact.split("=") for fact in facts)
    path.write_bytes(Heartbeat(replica, None if version == "-" else int(version), 1, given).to_bytes())
    at = time.time() - float(age_s)
    os.utime(path, (at, at))


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def other_model(folder: str) -> None:
    """A checkpoint with other tensors."""
    tensors = fixed_state()
    del tensors["layers.0.bias"]
    write_sharded(Path(folder), tensors)


def overtaken_by(rival: str) -> None:
    """From now on, another trainer is faster: what is to be created in `feed` is copied from `rival` before."""

    def create(self: LocalStore, key: str, data: Any) -> bool:
        if Path(rival, key).exists() and not Path("feed", key).exists():
            shutil.copy(Path(rival, key), Path("feed", key))
        return CREATE(self, key, data)

    LocalStore.create = create  # type: ignore[method-assign]


ACTIONS: dict[str, Callable[..., object]] = {
    "flip-payload": lambda feed, version: flip(payload(feed, version)),
    "flip-manifest": lambda feed, version: flip(manifest(feed, version)),
    "remove-payload": lambda feed, version: payload(feed, version).unlink(),
    "remove-manifest": lambda feed, version: manifest(feed, version).unlink(),
    "remove": lambda path: Path(path).unlink(),
    "age": lambda path, days: [os.utime(p, (1, time.time() - 86400 * float(days))) for p in Path(path).iterdir()],
    "beat": beat,
    "copy": shutil.copytree,
    "flip": lambda path: flip(Path(path)),
    "write": write,
    "other-model": other_model,
    "overtaken-by": overtaken_by,
}

SCENARIOS = {
    "publish": """
        publish new c0 --step 0
        publish new c1 --step 10 --parent c0 --threads 1
        publish new c1 --must-exist --require-fencing
        publish new c2 --anchor -v
        publish based c0 --base org/model@abc
        publish based c1 --parent c0
        show based 0
        show new
        publish typo c0 --must-exist
        publish feed nowhere
        publish c0 c1
        publish feed c5 --parent c2
        > copy feed rival
        publish rival c4
        > overtaken-by rival
        publish feed c5
        > overtaken-by nobody
        > other-model other
        publish feed other
        publish feed other --anchor
        publish feed c5 --keep-anchors 1
        publish feed
        publish feed c5 --stpe 3
        publish memory: c0
        publish ftp://host/feed c0
        > flip-payload new 3
        > remove new/anchors/00000000000000000003.json
        publish new c5
        """,
    "read": """
        log feed
        log feed --all --plain
        log nowhere
        show feed
        show feed 3
        show feed 1 --timeline
        show feed 99
        show feed best
        restore feed -o out
        restore feed -o out
        digest out
        restore feed -o older --version 2 --no-files --threads 1
        restore feed -o dry --dry-run
        restore feed -o dry --dry-run --version 2
        restore feed -o other --version 99
        restore nowhere -o other
        > flip-payload feed 4
        restore feed -o other
        > remove-payload feed 2
        restore feed -o other --version 2
        restore feed -o at-anchor --version 3
        > remove-manifest feed 1
        restore feed -o other --version 1
        restore feed -o other --version 2
        log feed
        """,
    "verify": """
        verify feed
        verify feed --deep
        verify nowhere
        > copy feed damaged
        > write damaged/payloads/0000000000000000000000000000000000000000000000000000000000000000.safetensors orphan
        verify damaged
        > flip-payload damaged 1
        verify damaged
        verify damaged --deep --threads 1
        > remove-payload damaged 4
        verify damaged
        > flip-manifest damaged 2
        verify damaged --deep
        > copy feed missing
        > remove-manifest missing 2
        verify missing
        verify missing --deep
        publish based c0 --base nowhere/at-all
        publish based c1 --parent c0
        verify based --deep
        verify based --deep --base c0
        restore based -o out --base c1
        restore based -o out --base c0
        """,
    "upkeep": """
        pins feed
        pin feed 1 --name best --note 'reward 0.71'
        pin feed best
        pin feed 1 --name best --note other
        pin feed 2 --name best
        pin feed 99
        pin feed 1 --name 1bad
        pins feed
        pins nowhere
        show feed best
        restore feed -o pinned --version best
        log feed
        compact feed --levels 2,4
        compact feed --levels 2,4
        compact feed --levels 3,4
        compact nowhere
        log feed
        > beat r1 2 10
        prune feed --keep-anchors 1 --keep-versions 1
        prune feed --keep-anchors 1 --keep-versions 1 --yes
        prune feed --keep-anchors 1 --keep-versions 1 --keep-s 3600
        > remove feed/replicas/r1.json
        unpin feed best
        unpin feed best
        unpin feed 3
        prune feed --keep-anchors 1 --keep-versions 1 --yes
        prune feed --keep-anchors 1 --keep-versions 1 --yes
        prune nowhere --keep-anchors 1 --keep-versions 1
        prune feed --keep-anchors 1
        prune feed --keep-anchors 1 --keep-versions 1 --follow
        prune feed --keep-anchors 1 --keep-versions 1 --listen 127.0.0.1:0
        compact feed --metrics
        log feed
        restore feed -o old --version 1
        restore feed -o pruned --version 2
        pin feed 2
        verify feed --deep
        publish feed c5
        restore feed -o new
        > write feed/payloads/0000000000000000000000000000000000000000000000000000000000000000.safetensors orphan
        prune feed --keep-anchors 9 --keep-versions 9
        > age feed/payloads 3
        prune feed --keep-anchors 9 --keep-versions 9 --yes
        """,
    "relay": """
        relay feed copy
        relay feed copy
        publish feed c5 --anchor
        relay feed copy --heartbeats
        compact feed --levels 2
        relay feed copy other --skips
        log copy
        verify copy --deep
        relay feed late --no-anchors --every
        relay feed feed
        relay feed same same
        relay nowhere copy
        relay feed c0
        publish fork c0
        relay feed fork
        > flip-payload feed 2
        relay feed broken --every
        """,
    "replicas": """
        follow feed --target live --once --replica r1
        follow feed --target live --once --replica r1 --mirror mirror
        follow feed --target live --once --replica r1 --mirror mirror
        publish feed c5
        follow feed --target live --once --replica r1 --mirror mirror
        digest live
        follow nowhere --target live2 --once
        follow feed --target c0 --once
        follow feed --target live --once --listen 127.0.0.1:0
        follow feed --target live --once --pause abort
        follow feed --target live --once --exec-timeout-s 3
        follow feed --target live --once --exec true
        follow feed --target live --once --replica a/b
        status feed
        > beat good 5 10 engine=folder fetch_s=0.25 pause_s=0.0040
        > beat late 2 20 engine=vllm proved_version=2 proved_unix_s=1700000000
        > beat gone 0 4000
        > beat new - 1
        status feed
        watch feed --once
        report feed -o report.html
        report feed -o c0/config.json
        > beat wrong 5 5 digest=00000000000000000000000000000000
        status feed
        watch feed --once
        status nowhere
        watch nowhere --once
        ui nowhere
        report nowhere -o none.html
        > flip-payload feed 5
        follow feed --target damaged --once --replica r1
        serve
        serve --feed feed --replica a/b
        serve --feed feed --scrub-s soon
        """,
    "folders": """
        export feed folders
        export feed folders
        export feed overwritten --format overwrite --checksum blake3 --from 2
        export nowhere folders2
        import folders copy --base folders/weight_v000000
        import folders copy
        import folders wrong --base c1
        import nowhere copy
        import c1 copy
        verify copy --deep
        digest c4
        publish watched 'c*' --watch --once --settle-s 0.05
        publish watched 'x*' --watch --once
        publish watched 'c*' --watch --once --anchor
        publish feed c5 --once
        """,
    "checkpoints": """
        diff c0 c1 -o c1.delta
        diff c0 c1 -o coo.delta --codec coo/1 --threads 1
        diff c0 c1 -o c0/config.json
        diff c0 nowhere -o x.delta
        diff c0 c1
        inspect c1.delta
        inspect c1.delta --old c0 --all
        inspect c0/config.json
        apply c0 c1.delta -o made
        apply c2 c1.delta -o wrong
        apply c0 c1.delta -o made
        digest made
        digest c1
        digest nowhere
        > flip c1.delta
        inspect c1.delta
        apply c0 c1.delta -o damaged
        > other-model other
        diff c0 other -o x.delta
        """,
    "usage": """
        (no command)
        log
        lgo feed
        log feed extra
        log feed --jsno
        show feed x/y
        restore feed
        verify feed --threads 0
        compact feed --levels 4,x
        follow feed --target live --scrub-s never
        completion sh
        log s3://
        log feed --version
        plan --params 8e9 --changed 1% --link 1gbit --replicas 16
        plan --params 70B --lr 1e-6 --dtype fp8 --link 100mbit --ranks 8 --links 2 --sites 3 --every-s 30
        plan c0 c1 --link 1gbit --threads 1
        plan --params 8e9 --link 1gbit
        plan --params many --link 1gbit
        """,
}

READERS = {"log", "show", "verify", "pins", "status", "watch", "ui", "serve", "inspect", "digest", "plan", "completion"}
"""Commands that write nothing."""

RULES = {
    "log": ((r"(?m)\t[0-9a-f]{8}$", "\t<writer>"),),
    # Ages and times of moves; the size of what zstd compresses, or of a page with times in it, is not ours.
    "status": ((r"(?m)^(\w+\t[-\d]+\t[-\d]+\t)\d+\t", r"\1<s>\t"),),
    "watch": ((r'("versions_per_minute": )[0-9.]+', r"\1<rate>"), (r"; [0-9.e]+ per minute", "; <rate> per minute")),
    "report": ((r'("bytes": )\d+', r"\1<bytes>"), (r": [0-9.]+ kB", ": <bytes>")),
    "export": ((r'("nbytes": )\d+', r"\1<bytes>"), (r"(?m), [0-9.]+ k?B$", ", <bytes>")),
}


@pytest.fixture(scope="module")
def made(fixed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints c0 to c5, and `feed` with the first five."""
    place = tmp_path_factory.mktemp("made")
    for i in range(CHECKPOINTS):
        write_sharded(place / f"c{i}", fixed_state(i))
    for i in range(CHECKPOINTS - 1):
        deltasync.publish(place / "feed", place / f"c{i}", step=10 * i, anchor=i == 3)
        # One each minute: how many there are in a minute, and who is late, does not depend on this machine.
        path = manifest(str(place / "feed"), str(i))
        committed = {"created_unix_s": int(time.time()) - 60 * (CHECKPOINTS - 1 - i)}
        path.write_bytes(resealed(path.read_bytes(), committed))
    return place


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser is made once, nothing has to survive a power cut, and no command gives up on a busy machine."""
    monkeypatch.setattr(cli, "build_parser", lambda given=None: PARSER())
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(LocalStore, "create", CREATE)
    monkeypatch.setattr(folders, "_ONCE_SETTLES", LONG_S / SETTLE_S)


def copy_or_link(source: str, destination: str) -> None:
    """Files that are never written in place need no copy."""
    is_fixed = Path(source).parent.name in ("payloads", "versions", "anchors", *(f"c{i}" for i in range(CHECKPOINTS)))
    (os.link if is_fixed else shutil.copy2)(source, destination)


def run(argv: list[str], capsys: Out) -> tuple[str, str, int]:
    """What a command prints, and its exit code."""
    try:
        code = cli.main(argv)
    except SystemExit as exit:
        code = int(exit.code or 0)
    out, err = capsys.readouterr()
    return out, err, code


def transcript(place: Path, argv: list[str], labels: Labels, capsys: Out) -> list[str]:
    out, err, code = run(argv, capsys)
    command = argv[0] if argv else ""
    rules = [*TIMES, *(() if command == "plan" else DURATIONS)]
    lines = []
    for prefix, text in (("", out), ("! ", err)):
        text = without(text.replace(str(place), "<dir>"), RULES.get(command, ()))
        text = labels.ids(without(text, rules))
        lines += [prefix + line for line in text.splitlines()]
    return [f"$ {shlex.join(['deltasync', *argv])}", *lines, *([f"= {code}"] if code else []), ""]


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_commands_print(
    name: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    place, labels, found = tmp_path / "place", Labels(), []
    shutil.copytree(made, place, copy_function=copy_or_link)
    monkeypatch.chdir(place)
    for line in SCENARIOS[name].strip().splitlines():
        words = [] if line.strip() == "(no command)" else shlex.split(line)
        if words[:1] == [">"]:
            ACTIONS[words[1]](*words[2:])
            found += [line.strip(), ""]
            continue
        writes = bool(words) and words[0] not in READERS
        copy = tmp_path / "copy" if writes else place
        if writes:
            shutil.copytree(place, copy, symlinks=True, copy_function=copy_or_link)
            monkeypatch.chdir(copy)
        with_json = transcript(copy, [*words, "--json"], labels, capsys) if words[:1] != ["serve"] else []
        if writes:
            monkeypatch.chdir(place)
            shutil.rmtree(copy)
        found += transcript(place, words, labels, capsys) + with_json
    check(f"cli_{name}.txt", "\n".join(found))


def test_the_arguments_of_all_commands() -> None:
    """Not as help: argparse formats it in another way in each release of Python."""
    commands = next(a for a in PARSER()._actions if isinstance(a, argparse._SubParsersAction)).choices
    found = {}
    for name, parser in commands.items():
        found[name] = {
            "summary": parser.description,
            "example": parser.epilog,
            "places": [
                place.name + "..." * place.is_repeated + "?" * place.is_optional
                for place in getattr(parser, "places", [])
            ],
            "arguments": {
                " ".join(action.option_strings) or action.dest: {
                    "help": action.help,
                    **{
                        field: getattr(action, field)
                        for field in ("default", "nargs", "choices", "metavar", "required")
                        if getattr(action, field) not in (None, False)
                    },
                }
                for action in parser._actions
            },
        }
    check_json("arguments.json", found)


MACHINE = ("deltasync", "packages", "vLLM", "kernels", "threads", "memory", "shared memory", "disk", "temporary files")
"""The checks of `doctor` whose results depend on the machine."""


def test_what_doctor_checks(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    shutil.copytree(made / "feed", tmp_path / "feed")
    monkeypatch.chdir(tmp_path)
    found = {}
    for line in ("doctor", "doctor feed --probe-mb 1", "doctor feed --read-only", "doctor nowhere", "doctor ftp://x/y"):
        words = line.split()
        out, err, code = run([*words, "--json"], capsys)
        plain, _, _ = run(words, capsys)
        report = json.loads(out)
        checks = [
            {
                "name": check["name"],
                "fields": sorted(check),
                "state": check["state"] if check["name"] not in MACHINE else "any",
                "text": without(check["text"].replace(str(tmp_path), "<dir>"), TIMES)
                if check["name"] not in (*MACHINE, "list", "clock", "latency", "bandwidth")
                else "any",
            }
            for check in report.pop("checks")
            if check["name"] != "vLLM"
        ]
        report["probes"] = len(report["probes"])
        rows = [row.split("\t")[1] for row in plain.splitlines() if "\t" in row]
        last = plain.splitlines()[-1] if "\t" not in plain.splitlines()[-1] else None
        found[line] = {**report, "checks": checks, "rows": rows, "last line": last, "stderr": err, "exit code": code}
    check_json("doctor.json", found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_command(shell: str, capsys: Out) -> None:
    out, err, code = run(["completion", shell], capsys)
    commands = next(a for a in PARSER()._actions if isinstance(a, argparse._SubParsersAction)).choices
    assert (err, code) == ("", 0)
    assert all(name in out for name in commands)
