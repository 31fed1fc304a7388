"""Objects that are altered, cut or gone: found and named by `verify --deep`, never restored as other bits."""

from collections.abc import Callable, Iterator

import pytest
from known import add_skip, change, copy_of, holds, manifests, nth, publish
from support.helpers import State

from deltasync.errors import CorruptError, DeltasyncError, FormatError, MismatchError, NotFoundError
from deltasync.feed.fetch import fetch_files
from deltasync.feed.log import Log
from deltasync.feed.upload import Upload
from deltasync.format import keys
from deltasync.format.manifest import Manifest, PayloadRef
from deltasync.format.weights import Weights
from deltasync.state import load
from deltasync.store.memory import MemoryStore
from deltasync.store.protocol import Store
from deltasync.testing.faulty import Fault, FaultyStore, at
from deltasync.trainer import versions as anchors
from deltasync.upkeep.prune import Pruning, Retention, plan_prune, prune
from deltasync.upkeep.verify import Verification, verify

pytestmark = pytest.mark.usefixtures("one_thread")

STATES: dict[int, State] = {n: nth(n) for n in range(8)}
REFUSED = (CorruptError, FormatError, MismatchError, NotFoundError)


@pytest.fixture(scope="module")
def feed() -> Iterator[MemoryStore]:
    """Version 0 is pruned; 1 to 6 are there, with anchors at 1 and 4, and a skip from 2 to 5."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(anchors, "SHARD_ELEMENTS", 1)
        store = MemoryStore()
        for n in range(7):
            publish(store, n, anchor=n in (1, 4))
        add_skip(store, 2, 5, STATES)
        prune(store, plan_prune(store, Retention(anchors=2, versions=3)))
        assert verify(store, deep=True).restorable == tuple(range(1, 7))
        yield store


def first_payload(store: Store, manifest: Manifest | None) -> str:
    assert manifest is not None
    return keys.payload_key(manifest.payloads[-1].sha256)


def files_of(store: Store) -> str:
    ref: PayloadRef | None = Log(store).read(3).files
    assert ref is not None
    return keys.payload_key(ref.sha256)


OBJECTS: dict[str, Callable[[Store], str]] = {
    "manifest of the head": lambda store: keys.version_key(6),
    "manifest in the middle": lambda store: keys.version_key(3),
    "manifest of a late anchor": lambda store: keys.anchor_key(4),
    "manifest of a skip": lambda store: keys.skip_key(2, 5),
    "payload of the head": lambda store: first_payload(store, Log(store).read(6)),
    "payload in the middle": lambda store: first_payload(store, Log(store).read(3)),
    "shard of the first anchor": lambda store: first_payload(store, Log(store).anchor(1)),
    "shard of the late anchor": lambda store: first_payload(store, Log(store).anchor(4)),
    "payload of a skip": lambda store: first_payload(store, Log(store).skip(2, 5)),
    "files beside the weights": files_of,
    "floor": lambda store: keys.FLOOR,
    "feed": lambda store: keys.FEED,
}


def flipped(part: float) -> Callable[[bytes], bytes]:
    def flip(data: bytes) -> bytes:
        place = min(len(data) - 1, int(part * len(data)))
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    return flip


ALTERED: dict[str, Callable[[bytes], bytes]] = {
    "first byte": flipped(0),
    "last byte": flipped(1),
    "cut by one": lambda data: data[:-1],
    "cut in half": lambda data: data[: len(data) // 2],
    "emptied": lambda data: b"",
    "longer by one": lambda data: data + b"x",
}
ALTERED_PAYLOAD = {f"byte at {part}": flipped(part) for part in (0.003, 0.1, 0.4, 0.6, 0.8, 0.95)}


def names(found: Verification, key: str) -> bool:
    return any(key in (damage.key, damage.error.key) or key in damage.error.message for damage in found.damages)


def require_refused_or_exact(store: Store, found: Verification) -> set[int]:
    """The versions that can be loaded; they are those that `verify` calls restorable, and have the right bits."""
    exact = set()
    log = Log(store)
    for version in range(1, 7):
        try:
            target = log.read(version)
            weights = load(log, target)
            fetch_files(store, target)
        except REFUSED:
            continue
        assert holds(weights, STATES[version]), f"version {version} has other bits"
        exact.add(version)
    assert found.head is not None
    assert set(found.restorable) == exact
    assert set(found.lost) - {0} == set(range(1, found.head + 1)) - exact
    return exact


def require_not_worse(store: Store, exact: set[int]) -> None:
    """A publication is refused and leaves everything as it is, or makes one more version that can be restored."""
    before, versions = manifests(store), Log(store).versions()
    try:
        published = publish(store, 7)
    except DeltasyncError:
        assert manifests(store) == before
    else:
        assert published.version == max(versions) + 1
        assert holds(load(Log(store), published), STATES[7])
    assert before.items() <= manifests(store).items()
    log = Log(store)
    for version in exact:
        assert holds(load(log, log.read(version)), STATES[version])


def cases() -> Iterator[tuple[str, str]]:
    for kind in OBJECTS:
        for how in ALTERED:
            yield kind, how
        if "payload" in kind or "shard" in kind or "files" in kind:
            for how in ALTERED_PAYLOAD:
                yield kind, how
        yield kind, "deleted"


@pytest.mark.parametrize(("kind", "how"), list(cases()))
def test_damage_is_found_and_refused(feed: MemoryStore, kind: str, how: str) -> None:
    store = copy_of(feed)
    key = OBJECTS[kind](store)
    if how == "deleted":
        store.delete(key)
    else:
        store.put(key, (ALTERED | ALTERED_PAYLOAD)[how](store.get(key)))
    found = verify(store, deep=True)
    if how != "deleted" or kind in DELETION_IS_DAMAGE:
        assert not found.is_clean
        assert names(found, key)
    exact = require_refused_or_exact(store, found)
    assert exact >= SURVIVORS.get(kind, set(range(1, 7)))
    require_not_worse(store, exact)


# A head or a shortcut that is gone looks as if it had never been there; a floor and a feed are mere records.
DELETION_IS_DAMAGE = OBJECTS.keys() - {
    "manifest of the head",
    "manifest of a late anchor",
    "manifest of a skip",
    "floor",
    "feed",
}
# Versions that another plan leads to. Where nothing is said, all of them.
SURVIVORS = {
    "manifest of the head": {1, 2, 3, 4, 5},
    "manifest in the middle": {1, 2, 4, 5, 6},
    "payload of the head": {1, 2, 3, 4, 5},
    "payload in the middle": {1, 2, 4, 5, 6},
    "shard of the first anchor": {4, 5, 6},
    "files beside the weights": set(),
}

STRIDE = 11


@pytest.mark.parametrize("kind", ["manifest in the middle", "manifest of a late anchor", "manifest of a skip"])
def test_every_byte_of_a_manifest(feed: MemoryStore, kind: str) -> None:
    """A byte that is altered is found, and the manifest named."""
    key = OBJECTS[kind](feed)
    data = feed.get(key)
    for place in range(0, len(data), STRIDE):
        store = copy_of(feed)
        store.put(key, data[:place] + bytes([data[place] ^ (1 << place % 7)]) + data[place + 1 :])
        found = verify(store, deep=True)
        assert not found.is_clean, f"byte {place} of {key}"
        assert names(found, key)
        if place % (5 * STRIDE) == 0:
            require_refused_or_exact(store, found)


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_gap_is_named(feed: MemoryStore, version: int) -> None:
    store = copy_of(feed)
    store.delete(keys.version_key(version))
    found = verify(store)
    assert [damage.key for damage in found.damages if damage.error.rule == "chain.gap"] == [keys.version_key(version)]
    with pytest.raises(NotFoundError, match=f"version {version}"):
        Log(store).read(version)


def test_bytes_that_flip_in_transmission(feed: MemoryStore) -> None:
    """Whatever is read wrong once is read again: exact bits."""
    counting = FaultyStore(copy_of(feed))
    log = Log(counting)
    load(log, log.require_head())
    for k in range(1, len(counting.operations) + 1):
        log = Log(FaultyStore(feed, at(k, Fault("flip"))))
        assert holds(load(log, log.require_head()), STATES[6]), counting.operations[k - 1]


def test_flips_while_publishing_are_read_again(feed: MemoryStore) -> None:
    counting = FaultyStore(copy_of(feed))
    publish(counting, 7)
    for k in range(1, len(counting.operations) + 1):
        store = copy_of(feed)
        publish(FaultyStore(store, at(k, Fault("flip"))), 7)
        assert verify(store, deep=True).is_clean
        assert holds(load(Log(store), Log(store).require_head()), STATES[7])


def test_a_flip_after_a_lost_answer_is_no_other_writer(feed: MemoryStore) -> None:
    """A commit happened and its answer was lost; of the next attempt, what is read back is damaged."""
    store = FaultyStore(copy_of(feed), lambda op: Fault("flip") if op.number == flipped_number else None)
    flipped_number = 0
    upload = Upload(store)
    head = upload.log.require_head()
    manifest = change(upload, head, Weights.of(STATES[6]), 7, Weights.of(STATES[7]))
    assert store.create(keys.version_key(7), manifest.to_bytes())
    flipped_number = len(store.operations) + 2
    upload.commit(manifest)
    assert [op.verb for op in store.operations[-3:]] == ["create", "get_range", "get_range"]


def test_flips_in_what_prune_and_verify_read(feed: MemoryStore) -> None:
    """Nothing counts as damaged that is sound in the store, and nothing is pruned that would not be otherwise."""

    def use(store: Store) -> tuple[Pruning, bool]:
        return plan_prune(store, Retention(anchors=1, versions=1)), verify(store, deep=True).is_clean

    counting = FaultyStore(copy_of(feed))
    expected = use(counting)
    assert expected[1]
    for k in range(1, len(counting.operations) + 1):
        assert use(FaultyStore(feed, at(k, Fault("flip")))) == expected, counting.operations[k - 1]
