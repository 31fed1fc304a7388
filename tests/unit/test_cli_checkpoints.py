"""`diff`, `apply`, `inspect` and `digest`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import processes
from support.commands import Out, enter_checkpoints, run
from support.helpers import changed, safetensors_bytes, state

import deltasync
from deltasync.cli import main as cli

PYTHON = [sys.executable, "-W", "ignore", "-m", "deltasync"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in: `old` (sharded), `new` (sharded), `one.safetensors` (old in one file)."""
    return enter_checkpoints(tmp_path, monkeypatch)


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.parametrize("codec", ["exp/1", "coo/1"])
def test_diff_then_apply_gives_the_new_checkpoint(place: Path, capsys: Out, codec: str) -> None:
    assert run("diff", "old", "new", "-o", "d.safetensors", "--codec", codec, "--threads", "1") == 0
    assert "d.safetensors" in capsys.readouterr().out
    assert run("apply", "old", "d.safetensors", "-o", "out") == 0
    assert capsys.readouterr() == (f"{deltasync.digest('new')}  out\n", "")
    assert deltasync.digest("out") == deltasync.digest("new")
    assert run("apply", "one.safetensors", "d.safetensors", "-o", "one-new.safetensors") == 0
    assert deltasync.digest("one-new.safetensors") == deltasync.digest("new")
    assert names(place) == {"old", "new", "one.safetensors", "d.safetensors", "out", "one-new.safetensors"}


def test_the_command_and_the_library_write_the_same_delta(place: Path) -> None:
    assert run("diff", "old", "new", "-o", "d") == 0
    assert (place / "d").read_bytes() == deltasync.diff(state(), changed(state()))


def test_digest(place: Path, capsys: Out) -> None:
    assert run("digest", "old") == run("digest", "one.safetensors") == 0
    digest = deltasync.digest(state())
    assert capsys.readouterr().out == f"{digest}  old\n{digest}  one.safetensors\n"
    assert run("digest", "old", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["digest"] == digest.hex
    assert found["tensors"] == len(state())
    assert found["bytes"] == sum(a.nbytes for a in state().values())


def test_inspect(place: Path, capsys: Out) -> None:
    run("diff", "old", "new", "-o", "d")
    capsys.readouterr()
    assert run("inspect", "d", "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(deltasync.inspect("d").to_json()))
    assert run("inspect", "d") == 0
    text = capsys.readouterr().out
    for expected in (deltasync.digest("new").hex, deltasync.digest("old").hex, "embed", "delta", "BF16"):
        assert expected in text


def test_inspect_by_layer(place: Path, capsys: Out) -> None:
    """With the old weights the changes of each layer are counted; without them a block may be shared."""
    rng = np.random.default_rng(3)
    old = {f"model.layers.{i}.{part}.weight": np.zeros(1000, np.float32) for i in range(11) for part in ("q", "mlp")}
    old |= {"lm_head.weight": np.zeros(1000, np.float32), "scale": np.zeros(3, np.int8)}
    new = {name: array.copy() for name, array in old.items()}
    counts = {name: int(rng.integers(1, min(50, array.size))) for name, array in old.items()}
    for name, count in counts.items():
        new[name][rng.choice(new[name].size, count, replace=False)] += 1
    new["model.layers.4.q.weight"] += 1  # so dense that all weights of the block are smaller
    counts["model.layers.4.q.weight"] = 1000
    expected = {f"model.layers.{i}": 0 for i in range(11)} | {"lm_head": 0, "scale": 0}
    for name, count in counts.items():
        expected[name.rsplit(".", 2)[0] if "layers" in name else name.partition(".")[0]] += count
    (place / "o.safetensors").write_bytes(safetensors_bytes(old))
    for codec in ("exp/1", "coo/1"):
        (place / "d").write_bytes(deltasync.diff(old, new, codec=codec))
        assert run("inspect", "d", "--old", "o.safetensors", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert {layer["name"]: layer["changed"] for layer in found["layers"]} == expected
        assert {tensor["name"]: tensor["changed"] for tensor in found["tensors"]} == counts
        assert sum(layer["tensors"] for layer in found["layers"]) == len(old)
    assert [layer["name"] for layer in found["layers"]][1:12] == [f"model.layers.{i}" for i in range(11)]
    assert run("inspect", "d") == 0
    assert f"model.layers.4\t2\t2000\t{expected['model.layers.4']}\t" in capsys.readouterr().out, "coo/1 has no sharing"
    (place / "d").write_bytes(deltasync.diff(old, new))
    assert run("inspect", "d") == 0
    text = capsys.readouterr().out
    assert "model.layers.4\t2\t2000\tshared\t-" in text
    assert f"scale\t1\t3\t{expected['scale']}\t" in text, "its block has no other tensor"
    assert run("inspect", "d", "--old", "old") == 3
    assert "the delta" in capsys.readouterr().err


def test_inspect_prints_names_unchanged(tmp_path: Path, capsys: Out) -> None:
    """Names in square brackets are not markup, and long lists are cut only without --all."""
    old = {f"[bold]{i}[/bold]": np.zeros(3, np.float32) for i in range(30)}
    (tmp_path / "d").write_bytes(deltasync.diff(old, {n: a + 1 for n, a in old.items()}, codec="coo/1"))
    assert run("inspect", str(tmp_path / "d")) == 0
    assert "20 of 30" in capsys.readouterr().out
    assert run("inspect", str(tmp_path / "d"), "--all") == 0
    text = capsys.readouterr().out
    assert all(name in text for name in old)


def test_control_characters_in_names_are_escaped(tmp_path: Path, capsys: Out) -> None:
    old = {"a\x1b[2Jb\nc": np.zeros(3, np.float32)}
    (tmp_path / "d").write_bytes(deltasync.diff(old, {n: a + 1 for n, a in old.items()}))
    assert run("inspect", str(tmp_path / "d")) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "a\\x1b[2Jb\\nc" in text


def test_an_ascii_terminal(place: Path) -> None:
    run("diff", "old", "new", "-o", "d")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = processes.run([*PYTHON, "inspect", "d"], env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["no-such-command"],
        ["diff", "old", "new"],
        ["diff", "old", "-o", "d"],
        ["diff", "old", "new", "-o", "d", "--codec", "zip"],
        ["diff", "old", "new", "-o", "d", "--threads", "0"],
        ["digest", "old", "--threads", "many"],
        ["apply", "old", "d"],
        ["inspect"],
    ],
)
def test_wrong_usage_is_2(argv: list[str], capsys: Out) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def prepare_wrong_parent(place: Path) -> list[str]:
    run("diff", "new", "old", "-o", "d")
    return ["apply", "old", "d", "-o", "out"]


def prepare_damaged_block(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    damage(place / "d", -1)
    return ["apply", "old", "d", "-o", "out"]


def prepare_truncated(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    (place / "d").write_bytes((place / "d").read_bytes()[:-1])
    return ["inspect", "d"]


def prepare_not_a_payload(place: Path) -> list[str]:
    return ["inspect", "one.safetensors"]


def prepare_other_shape(place: Path) -> list[str]:
    other = state() | {"embed": state()["embed"].reshape(32, 64)}
    (place / "other.safetensors").write_bytes(safetensors_bytes(other))
    return ["diff", "old", "other.safetensors", "-o", "out"]


def prepare_missing(place: Path) -> list[str]:
    return ["diff", "old", "nowhere", "-o", "out"]


def prepare_missing_shard(place: Path) -> list[str]:
    next((place / "new").glob("*-of-*")).unlink()
    return ["digest", "new"]


def prepare_taken(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    (place / "taken").mkdir()
    (place / "taken" / "file").write_text("precious")
    return ["apply", "old", "d", "-o", "taken"]


def prepare_output_is_input(place: Path) -> list[str]:
    return ["diff", "old", "one.safetensors", "-o", "one.safetensors"]


def prepare_output_is_folder(place: Path) -> list[str]:
    return ["diff", "old", "new", "-o", "new"]


def prepare_output_nowhere(place: Path) -> list[str]:
    return ["diff", "old", "new", "-o", "no/such/folder/d"]


def prepare_output_is_a_file_of_the_user(place: Path) -> list[str]:
    (place / "notes.txt").write_text("precious")
    return ["diff", "old", "new", "-o", "notes.txt"]


def prepare_output_is_inside_an_input(place: Path) -> list[str]:
    return ["diff", "old", "new", "-o", str(next((place / "new").glob("*.safetensors")))]


def prepare_output_is_a_device(place: Path) -> list[str]:
    """As /dev/null: it would be replaced by a file where that is allowed."""
    os.mkfifo("pipe")
    return ["diff", "old", "new", "-o", "pipe"]


def prepare_output_is_a_link(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    (place / "latest").symlink_to("d")
    return ["diff", "new", "old", "-o", "latest"]


def prepare_delta_missing(place: Path) -> list[str]:
    return ["apply", "old", "no-delta", "-o", "out"]


def prepare_delta_is_output(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    return ["apply", "one.safetensors", "d", "-o", "d"]


def prepare_not_safetensors(place: Path) -> list[str]:
    (place / "notes.txt").write_text("this is not a checkpoint at all")
    return ["digest", "notes.txt"]


def prepare_empty_file(place: Path) -> list[str]:
    (place / "empty.safetensors").touch()
    return ["digest", "empty.safetensors"]


def prepare_pickle_folder(place: Path) -> list[str]:
    (place / "pickled").mkdir()
    (place / "pickled" / "pytorch_model.bin").write_bytes(b"PK\x03\x04 and more")
    return ["publish", "feed", "pickled"]


def prepare_pickle_file(place: Path) -> list[str]:
    (place / "model.pt").write_bytes(b"PK\x03\x04 and more")
    return ["diff", "old", "model.pt", "-o", "out"]


def prepare_checkpoint_of_transformers(place: Path) -> list[str]:
    (place / "pt.safetensors").write_bytes(safetensors_bytes(state()))
    return ["apply", "old", "pt.safetensors", "-o", "out"]


def prepare_delta_as_checkpoint(place: Path) -> list[str]:
    run("diff", "old", "new", "-o", "d")
    return ["publish", "feed", "d"]


def prepare_folder_as_delta(place: Path) -> list[str]:
    return ["inspect", "new"]


BAD = [
    (prepare_not_safetensors, 3, ["notes.txt is not a safetensors file"]),
    (prepare_empty_file, 3, ["empty.safetensors is not a safetensors file"]),
    (prepare_pickle_folder, 1, ["pickled has no .safetensors file, only pytorch_model.bin", "convert it with"]),
    (prepare_pickle_file, 3, ["model.pt is not a safetensors file", "convert it with"]),
    (prepare_checkpoint_of_transformers, 3, ["pt.safetensors: this is a checkpoint, not a delta", "payload.format"]),
    (prepare_delta_as_checkpoint, 1, ["d is a delta of deltasync, not a checkpoint"]),
    (prepare_folder_as_delta, 1, ["new is a folder, not a delta"]),
    (prepare_wrong_parent, 3, ["digest", "hint"]),
    (prepare_damaged_block, 3, ["block.sha256"]),
    (prepare_truncated, 3, ["safetensors.truncated"]),
    (prepare_not_a_payload, 3, ["payload.format"]),
    (prepare_other_shape, 3, ["'embed'", "[64, 32]", "[32, 64]", "old", "other.safetensors"]),
    (prepare_missing, 1, ["nowhere"]),
    (prepare_missing_shard, 1, ["model-0000", "index.json"]),
    (prepare_taken, 1, ["taken"]),
    (prepare_output_is_input, 1, ["one.safetensors"]),
    (prepare_output_is_folder, 1, ["new"]),
    (prepare_output_nowhere, 1, ["no/such/folder"]),
    (prepare_output_is_a_file_of_the_user, 1, ["notes.txt exists and is not a delta that deltasync wrote"]),
    (prepare_output_is_inside_an_input, 1, ["safetensors exists and is not a delta"]),
    (prepare_output_is_a_device, 1, ["pipe exists and is not a delta"]),
    (prepare_output_is_a_link, 1, ["latest exists and is not a delta"]),
    (prepare_delta_missing, 1, ["no-delta"]),
    (prepare_delta_is_output, 1, ["d is an input"]),
]


@pytest.mark.parametrize(("prepare", "code", "words"), BAD, ids=[b[0].__name__ for b in BAD])
def test_errors(place: Path, capsys: Out, prepare: Any, code: int, words: list[str]) -> None:
    """The exit code, a message that names the thing, and nothing written."""
    argv = prepare(place)
    capsys.readouterr()
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert cli.main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words if word != "hint")
    assert {p: p.read_bytes() for p in place.rglob("*") if p.is_file()} == before
    assert not (place / "out").exists()


def test_a_delta_replaces_an_earlier_one(place: Path) -> None:
    assert run("diff", "old", "new", "-o", "d") == 0
    assert run("diff", "new", "old", "-o", "d") == 0
    assert deltasync.inspect("d").digest == deltasync.digest("old")


def test_diff_and_apply_as_json(place: Path, capsys: Out) -> None:
    assert run("diff", "old", "new", "-o", "d", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["output"], found["bytes"]) == ("d", (place / "d").stat().st_size)
    assert (found["parent_digest"], found["digest"]) == (deltasync.digest("old").hex, deltasync.digest("new").hex)
    assert run("apply", "old", "d", "-o", "out", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"output": "out", "digest": deltasync.digest("new").hex}
