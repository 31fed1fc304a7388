"""The commands of examples/exec, run by `follow --exec` with stand-ins for the engines' own programs and routes.

The routes are those of the llama.cpp server's own documentation (router mode). No engine was run.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.helpers import changed, state, write_sharded
from support.servers import json_server

import deltasync
from deltasync.cli import main as cli

FAILED = {"value": "unloaded", "failed": True, "exit_code": 1}
FOLDER = Path(__file__).parents[2] / "examples" / "exec"


class Engine:
    """An HTTP server with the routes of llama.cpp's router, and a health check."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"value": "loaded"}
        self.calls: list[str] = []
        self.fails = False
        self.unhealthy = 0
        self.url = ""

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/health":
            self.unhealthy -= 1
            return (503 if self.unhealthy >= 0 else 200), {}
        self.calls.append(path)
        if path.startswith("/models") and body is None:
            if self.status["value"] == "loading":
                self.status = (
                    {"value": "unloaded", "failed": True, "exit_code": 1} if self.fails else {"value": "loaded"}
                )
                return 200, {"data": [{"id": "policy", "status": {"value": "loading"}}]}
            return 200, {"data": [{"id": "policy", "status": self.status}]}
        assert body == {"model": "policy"}
        self.status = {"value": "loading" if path == "/models/load" else "unloaded"}
        return 200, {"success": True}


@pytest.fixture
def engine() -> Iterator[Engine]:
    found = Engine()
    with json_server(lambda path, body, headers: found.answer(path, body)) as found.url:
        yield found


@pytest.fixture
def feed(tmp_path: Path) -> str:
    for number in range(2):
        write_sharded(tmp_path / f"c{number}", changed(state(), seed=number))
        deltasync.publish(str(tmp_path / "feed"), tmp_path / f"c{number}")
    return str(tmp_path / "feed")


def follow(feed: str, target: Path, command: str) -> int:
    return cli.main(["follow", feed, "--target", str(target), "--once", "--exec", command])


def program(folder: Path, name: str, text: str) -> None:
    """A program on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!{sys.executable}\nimport pathlib, sys\n{text}")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize("before", [{"value": "loaded"}, {"value": "unloaded"}, FAILED])
def test_llama_cpp_gets_a_file_and_loads_it(tmp_path: Path, feed: str, engine: Engine, before: dict[str, Any]) -> None:
    engine.status = before
    convert = tmp_path / "convert.py"
    convert.write_text(
        "import sys; assert sys.argv[2] == '--outfile' and sys.argv[4:] == ['--outtype', 'bf16']\n"
        "open(sys.argv[3], 'w').write(sys.argv[1])\n"
    )
    model = tmp_path / "gguf" / "policy.gguf"
    model.parent.mkdir()
    command = f"{sys.executable} {FOLDER / 'llama_cpp.py'} {{path}} {model} --convert {convert} --server {engine.url}"
    assert follow(feed, tmp_path / "live", command) == 0
    assert model.read_text() == str((tmp_path / "live").resolve())
    assert [path.name for path in model.parent.iterdir()] == ["policy.gguf"]
    changes = [call for call in engine.calls if call in ("/models/load", "/models/unload")]
    assert changes == (["/models/unload"] if before["value"] == "loaded" else []) + ["/models/load"]
    assert engine.status == {"value": "loaded"}


def test_a_model_that_llama_cpp_cannot_load_is_a_failure(
    tmp_path: Path, feed: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deltasync.cli.follow._ONCE_TRIES", 1)
    engine.fails = True
    convert = tmp_path / "convert.py"
    convert.write_text("import sys; open(sys.argv[3], 'w')")
    command = f"{sys.executable} {FOLDER / 'llama_cpp.py'} {{path}} {tmp_path / 'policy.gguf'} --convert {convert} "
    assert follow(feed, tmp_path / "live", command + f"--server {engine.url}") == 1
    assert "exit code 1" in capfd.readouterr().err


def test_ollama_imports_the_folder_and_drops_the_old_weights(
    tmp_path: Path, feed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    text = (
        "words = sys.argv[1:]\n"
        "if words[0] == 'create': words[3] = pathlib.Path(words[3]).read_text()\n"
        f"with open({str(log)!r}, 'a') as file: print(words, file=file)\n"
    )
    program(tmp_path / "bin", "ollama", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert follow(feed, tmp_path / "live", f"sh {FOLDER / 'ollama.sh'} {{path}} policy") == 0
    folder = (tmp_path / "live").resolve()
    create, stop = log.read_text().splitlines()
    assert create == str(["create", "policy", "-f", f"FROM {folder}\n"])
    assert stop == str(["stop", "policy"])


@pytest.mark.parametrize("is_running", [True, False])
def test_a_container_is_restarted_until_it_answers(
    tmp_path: Path, feed: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    monkeypatch.setattr("deltasync.cli.follow._ONCE_TRIES", 1)
    log = tmp_path / "log"
    text = (
        f"with open({str(log)!r}, 'a') as file: print(sys.argv[1:], file=file)\n"
        f"if sys.argv[1] == 'inspect': print({str(is_running).lower()!r})\n"
    )
    program(tmp_path / "bin", "docker", text)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    engine.unhealthy = 1
    code = follow(feed, tmp_path / "live", f"sh {FOLDER / 'restart.sh'} tgi {engine.url}/health")
    assert code == (0 if is_running else 1)
    restart, inspect = log.read_text().splitlines()
    assert restart == str(["restart", "tgi"])
    assert inspect == str(["inspect", "-f", "{{.State.Running}}", "tgi"])
