"""A version as a folder: weights, files beside them, and all of it or nothing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.feeds import Feed, SpyStore, flip, same_weights
from support.helpers import State, state

import deltasync
from deltasync import blocks, checkpoint
from deltasync.checkpoint import open_checkpoint
from deltasync.errors import CorruptError, FormatError, InvalidInputError, NotFoundError
from deltasync.format import keys
from deltasync.format.companions import write_files
from deltasync.format.manifest import Manifest
from deltasync.format.weights import Weights
from deltasync.upkeep.restore import plan_restore, restore


def published(feed: Feed, files: dict[str, bytes]) -> Manifest:
    """The next version, with files beside its weights."""
    ref = feed.upload.put(write_files(files))
    new = feed.next_state()
    found = blocks.encode_delta(feed.states[-1], new)
    version = len(feed.states)
    refs = (feed.put_change(version - 1, version, found),)
    count = sum(block.changed for block in found)
    manifest = feed.new("delta", new, blocks.digest(new), payloads=refs, changed=count, files=ref)
    feed.upload.commit(manifest)
    feed.states.append(new)
    feed.head = manifest
    return manifest


FILES = {"config.json": b'{"a": 1}', "tokenizer/vocab.txt": b"x\ny", "empty": b""}


def test_a_folder_with_everything_in_it(tmp_path: Path) -> None:
    feed = Feed.of(2)
    manifest = published(feed, FILES)
    assert restore(feed.store, tmp_path / "out") == manifest
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {*FILES, "model.safetensors"}
    assert all((tmp_path / "out" / name).read_bytes() == data for name, data in FILES.items())
    assert same_weights(open_checkpoint(tmp_path / "out").weights, feed.states[2])
    assert deltasync.digest(tmp_path / "out") == manifest.digest


@pytest.mark.parametrize("version", range(3))
def test_each_version_with_its_own_files(tmp_path: Path, version: int) -> None:
    feed = Feed.of(1)
    published(feed, {"config.json": b"1"})
    published(feed, {"config.json": b"2"})
    restore(feed.store, tmp_path / "out", version=version)
    config = tmp_path / "out" / "config.json"
    assert (config.read_bytes() if config.exists() else None) == [None, b"1", b"2"][version]


def without_fp8() -> Feed:
    """Of types that the NumPy side of safetensors reads."""
    feed = Feed()
    feed.anchor({n: a for n, a in state().items() if n != "layer.0.fp8"})
    feed.delta()
    feed.delta()
    return feed


def test_several_files_as_transformers_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 2000)
    feed = without_fp8()
    restore(feed.store, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == feed.states[2].layout.nbytes
    assert not (tmp_path / "out" / "model.safetensors").exists()
    read: State = {}
    for name in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / "out" / name)
        assert {t for t, at in index["weight_map"].items() if at == name} == set(part)
        assert sum(a.nbytes for a in part.values()) <= 2000 or len(part) == 1
        read |= part
    assert len(set(index["weight_map"].values())) == 3
    assert all(a.dtype == state()[n].dtype and a.shape == state()[n].shape for n, a in read.items())
    assert same_weights(Weights.of(read), feed.states[2])


def test_one_file_as_safetensors_reads_it(tmp_path: Path) -> None:
    feed = without_fp8()
    restore(feed.store, tmp_path / "out", version=0)
    assert same_weights(Weights.of(load_file(tmp_path / "out" / "model.safetensors")), feed.states[0])


@pytest.mark.parametrize("there", ["nothing", "an empty folder"])
def test_output_that_is_free(tmp_path: Path, there: str) -> None:
    if there == "an empty folder":
        (tmp_path / "out").mkdir()
    restore(Feed.of(1).store, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("there", ["a file", "a folder"])
def test_output_that_is_taken(tmp_path: Path, there: str) -> None:
    precious = tmp_path / "out" if there == "a file" else tmp_path / "out" / "file"
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("precious")
    with pytest.raises(InvalidInputError, match="out"):
        restore(Feed.of(1).store, tmp_path / "out")
    assert precious.read_text() == "precious"


def test_no_folder_appears_after_an_error(tmp_path: Path) -> None:
    feed = Feed.of(3)
    flip(feed.store, feed.payload_keys(feed.log.read(2))[0])
    with pytest.raises(CorruptError):
        restore(feed.store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["flipped", "gone", "not files"])
def test_files_that_are_damaged(tmp_path: Path, how: str) -> None:
    feed = Feed.of(1)
    manifest = published(feed, FILES)
    assert manifest.files is not None
    key = keys.payload_key(manifest.files.sha256)
    if how == "flipped":
        flip(feed.store, key)
    elif how == "gone":
        feed.store.delete(key)
    else:
        wrong = replace(manifest, files=manifest.payloads[0])
        feed.store.put(keys.version_key(1), wrong.to_bytes())
    error = {"flipped": CorruptError, "gone": NotFoundError, "not files": FormatError}[how]
    with pytest.raises(error):
        restore(feed.store, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [3, 10**9])
def test_a_version_that_is_not_there(tmp_path: Path, version: int) -> None:
    with pytest.raises(NotFoundError, match=f"version {version}"):
        restore(Feed.of(3).store, tmp_path / "out", version=version)


def test_plan_restore_fetches_no_payload() -> None:
    feed = Feed.of(4)
    assert isinstance(feed.store, SpyStore)
    feed.store.took()
    target, chosen = plan_restore(feed.store, version=2)
    assert target.version == 2
    assert [e.end for e in chosen.edges] == [0, 1, 2]
    assert not [key for _, key in feed.store.took() if key.startswith(keys.PAYLOADS)]


CODE = ("modeling_x.py", "pytorch_model.bin", "a/x.pth", "optimizer.pt", "x.pkl", "pytorch_model.bin.index.json")


@pytest.mark.parametrize("trust_code", [False, True])
def test_files_that_can_run_code_are_written_only_on_request(
    tmp_path: Path, trust_code: bool, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Feed.of(2)
    published(feed, {"config.json": b"{}", **dict.fromkeys(CODE, b"code")})
    restore(feed.store, tmp_path / "out", trust_code=trust_code)
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"config.json", "model.safetensors", *(CODE if trust_code else ())}
    assert ("leaving out files that can run code" in caplog.text) == (not trust_code)


def files_key(manifest: Manifest) -> str:
    assert manifest.files is not None
    return keys.payload_key(manifest.files.sha256)


@pytest.mark.parametrize("damage", ["missing", "flipped"])
@pytest.mark.parametrize(("version", "used"), [(1, 3), (2, 3), (3, 1), (4, 3)])  # of two that are as near: the older
def test_damaged_files_are_replaced_by_those_of_the_nearest_version(
    tmp_path: Path, damage: str, version: int, used: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions 1 and 2 share one object, 3 and 4 have one each."""
    feed = Feed.of(1)
    manifests = [published(feed, {"config.json": b"%d" % number}) for number in (1, 1, 3, 4)]
    key = files_key(manifests[version - 1])
    if damage == "missing":
        feed.store.delete(key)
    else:
        flip(feed.store, key)
    restore(feed.store, tmp_path / "out", version=version)
    assert same_weights(open_checkpoint(tmp_path / "out").weights, feed.states[version])
    found = int((tmp_path / "out" / "config.json").read_bytes())
    assert found == used
    assert f"the files beside the weights of version {version} cannot be read, those of version" in caplog.text
    assert key in caplog.text


def test_weights_come_back_without_files(tmp_path: Path) -> None:
    """No other version has files that could be used: that is an error, which says how to get the weights."""
    feed = Feed.of(1)
    flip(feed.store, files_key(published(feed, FILES)))
    flip(feed.store, files_key(published(feed, {"config.json": b"other"})))
    with pytest.raises(CorruptError, match="--no-files") as caught:
        restore(feed.store, tmp_path / "out")
    assert caught.value.rule == "payload.sha256"
    assert not (tmp_path / "out").exists()
    restore(feed.store, tmp_path / "out", files=False)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert same_weights(open_checkpoint(tmp_path / "out").weights, feed.states[2])
