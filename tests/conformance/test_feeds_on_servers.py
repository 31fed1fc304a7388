"""What a user does with a feed, where it is hardest: a bucket without create-if-absent, and real servers."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support import servers
from support.helpers import State, changed, same_bits, state, write_sharded
from support.hub import Hub

import deltasync
from deltasync import ConflictError, NotFoundError, Retention, Store, StoreError
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.sealed import LeaseRecord

VERSIONS = 5


def states() -> list[State]:
    """Versions of a small model, without the types that safetensors' NumPy reader cannot give back."""
    first = {name: array for name, array in state().items() if array.dtype.kind in "fiu"}
    found = [first]
    for seed in range(VERSIONS - 1):
        found.append(changed(found[-1], seed=seed))
    return found


def published(store: Store, folder: Path) -> list[State]:
    """All versions, the fourth with an anchor."""
    found = states()
    for step, each in enumerate(found):
        checkpoint = folder / f"checkpoint-{step}"
        write_sharded(checkpoint, each)
        manifest = deltasync.publish(store, checkpoint, step=step, anchor=step == 3)
        assert manifest.version == step
    return found


def restored(store: Store, version: int, folder: Path) -> State:
    out = folder / f"restored-{version}"
    deltasync.restore(store, out, version=version)
    assert (out / "config.json").read_text() == '{"model_type": "test"}'
    return load_file(out / "model.safetensors")


def use(store: Store, folder: Path) -> None:
    """Publish, look, verify, restore, prune, go on."""
    known = published(store, folder)
    assert [m.step for m in Log(store).read_many(range(1, VERSIONS))] == [1, 2, 3, 4]
    assert deltasync.verify(store, deep=True).is_clean
    for version in (0, 2, 4):
        assert same_bits(restored(store, version, folder), known[version])
    deltasync.prune(store, deltasync.plan_prune(store, Retention(anchors=1, versions=2)))
    found = deltasync.verify(store, deep=True)
    assert (found.is_clean, found.restorable, found.pruned) == (True, (3, 4), (0, 1, 2))
    with pytest.raises(NotFoundError):
        deltasync.restore(store, folder / "gone", version=1)
    following = changed(known[-1], seed=77)
    write_sharded(folder / "following", following)
    assert deltasync.publish(store, folder / "following").version == VERSIONS
    assert same_bits(restored(store, VERSIONS, folder), following)


@pytest.fixture
def bucket(standin: Hub) -> Store:
    return deltasync.open_store(f"hf://buckets/{standin.create_bucket()}/run-1")


def test_a_feed_in_a_bucket_of_the_hub(bucket: Store, tmp_path: Path) -> None:
    use(bucket, tmp_path)
    assert [item.key for item in bucket.list(keys.LEASE)] == [], "the lease is given back"


def test_the_bucket_must_exist(standin: Hub, tmp_path: Path) -> None:
    store = deltasync.open_store("hf://buckets/user/none/run-1")
    write_sharded(tmp_path / "checkpoint", states()[0])
    with pytest.raises(StoreError) as caught:
        deltasync.publish(store, tmp_path / "checkpoint")
    assert caught.value.hint is not None


def test_a_batch_that_fails_half_way(bucket: Store, standin: Hub, tmp_path: Path) -> None:
    """The manifest is refused after its payload was taken: no version, and the next attempt goes through."""
    known = published(bucket, tmp_path)
    following = changed(known[-1], seed=5)
    write_sharded(tmp_path / "following", following)
    refused = f"run-1/{keys.version_key(VERSIONS)}"
    standin.refused[refused] = "not today"
    with pytest.raises(StoreError, match="not today"):
        deltasync.publish(bucket, tmp_path / "following")
    assert Log(bucket).require_head().version == VERSIONS - 1
    assert deltasync.verify(bucket, deep=True).is_clean
    del standin.refused[refused]
    assert deltasync.publish(bucket, tmp_path / "following").version == VERSIONS
    assert same_bits(restored(bucket, VERSIONS, tmp_path), following)


def test_two_writers_on_a_bucket(bucket: Store) -> None:
    first, second = Upload(bucket), Upload(bucket)
    first.open()
    with pytest.raises(ConflictError, match=first.id):
        second.open()
    assert LeaseRecord.from_bytes(bucket.get(keys.LEASE)).writer == first.id
    first.close()
    second.open()
    second.close()


def test_a_bucket_is_refused_where_fencing_is_required(bucket: Store) -> None:
    with pytest.raises(StoreError, match="no create-if-absent"):
        Upload(bucket, require_fencing=True).open()


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["seaweed", "azurite"])
def test_a_feed_on_a_server(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: servers.Server = request.getfixturevalue(name)
    use(deltasync.open_store(server.url("a/feed")), tmp_path)


@pytest.mark.e2e
def test_a_server_that_ignores_conditions(
    rclone: servers.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used by one writer, with a loud warning; or refused."""
    open_store: Callable[[], Store] = lambda: deltasync.open_store(rclone.url("a-feed"))  # noqa: E731
    use(open_store(), tmp_path)
    assert "ignores create-if-absent" in caplog.text
    with pytest.raises(StoreError, match="ignores create-if-absent"):
        Upload(open_store(), require_fencing=True).open()
