"""Ways to a version: feeds that begin with a checkpoint which replicas have."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.feeds import Feed, same_weights
from support.helpers import changed, state, write_sharded

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError, InvalidInputError, MismatchError, NotFoundError
from deltasync.feed.plan import Edge
from deltasync.feed.route import Route, open_base
from deltasync.format import keys
from deltasync.format.manifest import BaseRef
from deltasync.upkeep.restore import restore


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sharded(tmp_path / "base", state())
    write_sharded(tmp_path / "wrong", changed(state()))
    write_sharded(tmp_path / "other", {"x": np.zeros(3, np.float32)})
    return tmp_path


def based(name: str, revision: str | None = None) -> Feed:
    feed = Feed()
    feed.base(state(), BaseRef(name, revision))
    feed.delta()
    feed.delta()
    return feed


def test_a_base_by_the_folder_that_the_feed_names(folder: Path) -> None:
    feed = based(str(folder / "base"))
    for version in range(3):
        restore(feed.store, folder / f"out{version}", version=version)
        assert same_weights(open_checkpoint(folder / f"out{version}").weights, feed.states[version])
    assert same_weights(open_checkpoint(folder / "base").weights, feed.states[0]), "the base itself is only read"


def test_a_base_by_a_copy_of_it(folder: Path) -> None:
    feed = based("org/model", "main")
    restore(feed.store, folder / "out", base=folder / "base")
    assert same_weights(open_checkpoint(folder / "out").weights, feed.states[2])


@pytest.mark.parametrize(
    ("name", "given", "error", "rule"),
    [
        ("nowhere/at-all", "wrong", MismatchError, "base.digest"),
        ("nowhere/at-all", "other", MismatchError, "base.layout"),
        ("nowhere/at-all", "missing", NotFoundError, None),
        ("base", "wrong", MismatchError, "base.digest"),
        ("wrong", None, MismatchError, "base.digest"),
        ("other", None, MismatchError, "base.layout"),
    ],
)
def test_another_base(
    folder: Path, name: str, given: str | None, error: type[DeltasyncError], rule: str | None
) -> None:
    feed = based(str(folder / name))
    with pytest.raises(error) as caught:
        restore(feed.store, folder / "out", base=None if given is None else folder / given)
    assert caught.value.rule == rule
    assert not (folder / "out").exists()


def test_a_missing_base_where_an_anchor_is(folder: Path) -> None:
    feed = based(str(folder / "nowhere"))
    feed.late_anchor(1)
    restore(feed.store, folder / "out", base=folder / "no-such-copy")
    assert same_weights(open_checkpoint(folder / "out").weights, feed.states[2])
    with pytest.raises(NotFoundError):
        restore(feed.store, folder / "out0", version=0, base=folder / "no-such-copy")


@pytest.mark.parametrize("has_hub", [False, True])
def test_a_base_on_the_hub_that_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_hub: bool
) -> None:
    """Offline, or without the client: what it is, its revision, and what to do."""
    if has_hub:
        constants = pytest.importorskip("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    else:
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(NotFoundError) as caught:
        restore(based("org/model", "abc").store, tmp_path / "out")
    assert "'org/model' at revision 'abc'" in caught.value.message
    assert caught.value.hint is not None
    assert "--base" in caught.value.hint
    assert ("deltasync[hf]" in caught.value.hint) == (not has_hub)


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "not a name!", "x" * 300])
def test_a_base_that_is_neither_folder_nor_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotFoundError) as caught:
        restore(based(name).store, tmp_path / "out")
    assert len(str(caught.value)) < 1000


def test_open_base_of_another_kind() -> None:
    with pytest.raises(InvalidInputError):
        open_base(Edge(keys.version_key(0), Feed.of(1).log.read(0)))


# --- from the Hub -----------------------------------------------------------------------------------------------------


class FakeHub:
    """A repository on the Hub as a folder; `downloaded` has the files that were fetched from it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        hub = pytest.importorskip("huggingface_hub")
        self.folder = folder
        self.downloaded: list[str] = []
        self.sizes: dict[str, int] = {}
        monkeypatch.setattr(hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(hub, "hf_hub_download", self.hf_hub_download)

    def snapshot_download(self, repo_id: str, *, revision: str | None, dry_run: bool = False) -> object:
        assert (repo_id, revision) == ("org/model", "main")
        assert dry_run, "nothing is downloaded as a whole"
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        names = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in files} | self.sizes
        return [SimpleNamespace(filename=n, file_size=size, commit_hash="abc") for n, size in names.items()]

    def hf_hub_download(self, repo_id: str, name: str, *, revision: str) -> str:
        assert (repo_id, revision) == ("org/model", "abc"), "all files of one commit"
        self.downloaded.append(name)
        return str(self.folder / name)


def hub_folder(root: Path, *, shards: int) -> Path:
    """A checkpoint among many other files."""
    write_sharded(root / "hub", state(), shards=shards)
    if shards == 1:
        (root / "hub" / "model-00001-of-00001.safetensors").rename(root / "hub" / "model.safetensors")
        (root / "hub" / "model.safetensors.index.json").unlink()
    for name in ("pytorch_model.bin", "modeling.py", "consolidated.safetensors", "onnx/model.onnx"):
        (root / "hub" / name).parent.mkdir(exist_ok=True)
        (root / "hub" / name).write_bytes(b"not a checkpoint")
    return root / "hub"


@pytest.mark.parametrize("shards", [1, 2])
def test_only_weights_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    hub = FakeHub(hub_folder(tmp_path, shards=shards), monkeypatch)
    feed = based("org/model", "main")
    restore(feed.store, tmp_path / "out")
    assert same_weights(open_checkpoint(tmp_path / "out").weights, feed.states[2])
    names = {path.name for path in hub.folder.glob("model*.safetensors")}
    assert set(hub.downloaded) == names | ({"model.safetensors.index.json"} if shards > 1 else set())


@pytest.mark.parametrize(
    ("shards", "sizes", "downloaded"),
    [
        (1, {"model.safetensors": 1 << 50}, []),
        (1, {"model.safetensors": 10}, []),
        (2, {"model-00002-of-00002.safetensors": 1 << 50}, ["model.safetensors.index.json"]),
        (2, {"model.safetensors.index.json": 1 << 40}, []),
    ],
)
def test_a_repository_that_cannot_be_the_base_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, sizes: dict[str, int], downloaded: list[str]
) -> None:
    hub = FakeHub(hub_folder(tmp_path, shards=shards), monkeypatch)
    hub.sizes = sizes
    with pytest.raises(MismatchError) as caught:
        restore(based("org/model", "main").store, tmp_path / "out")
    assert caught.value.rule == "base.layout"
    assert hub.downloaded == downloaded


def test_a_repository_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "pytorch_model.bin").write_bytes(b"x")
    hub = FakeHub(tmp_path / "hub", monkeypatch)
    with pytest.raises(MismatchError, match="no safetensors files"):
        restore(based("org/model", "main").store, tmp_path / "out")
    assert hub.downloaded == []


def test_a_route_opens_each_start_once() -> None:
    feed = Feed.of(2)
    route = Route(feed.log, feed.log.read(1))
    assert route.layout() is route.layout()
    assert route.plan() is route.plan()
