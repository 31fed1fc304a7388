"""Test whether a store keeps the contract of `deltasync.store.protocol`: a test class for any store.

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return MyStore(...)  # empty, and used by this test only

It needs pytest (extra `test`). Every test checks one promise; some write many objects, and one writes 20 MB.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from deltasync.errors import NotFoundError, StoreError
from deltasync.store.protocol import Store

RACERS = 16
RACES = 5
LARGE_BYTES = 20_000_000

# Keys that sort differently by folder, and names that are odd but allowed. None is a folder of another.
KEYS = tuple(
    sorted([
        "a-b", "a.b", "a/b", "a/b-c", "a/b.c", "a0", "aB", "a_b", "a.b-c", "b/c-d", "b/c/d", "b/c.d", "b/c/-", "b/c/_",
        "0", "-", "_", "x..y", "deep/er/and/deep.er", "long/" + "n" * 200, "versions/00000000000000000009.json",
        "versions/00000000000000000010.json", "versions/00000000000000000011.json",
    ])
)  # fmt: skip
PREFIXES = (
    "",
    "a",
    "a/",
    "a/b",
    "a-",
    "a.",
    "b/c",
    "b/c/",
    "b/c-",
    "versions/",
    "versions/0000000000000000001",
    "none/",
)
AFTERS = (None, "a", "a-b", "a.b", "a/", "a/b", "a0", "b/c", "b/c-d", "versions/00000000000000000010.json", "zz")


class StoreConformance:
    """Subclass it with a name that begins with Test, and give it a fixture `store`."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError("give your subclass a fixture `store` that returns an empty store")

    @pytest.mark.parametrize("size", [0, 1, 4096, 100_001])
    def test_what_was_put_comes_back(self, store: Store, size: int) -> None:
        store.put("some/key", _bytes(size))
        assert store.get("some/key") == _bytes(size)

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(data).cast("I")])
    @pytest.mark.parametrize("verb", ["put", "create"])
    def test_any_buffer_is_taken_and_not_kept(self, store: Store, kind: Callable[[bytes], object], verb: str) -> None:
        if verb == "create" and not store.capabilities.create_if_absent:
            pytest.skip("the store does not claim create-if-absent")
        mutable = bytearray(_bytes(64))
        data = mutable if kind is bytearray else kind(_bytes(64))
        getattr(store, verb)("key", data)
        mutable[:] = bytes(64)
        assert store.get("key") == _bytes(64)

    def test_put_replaces(self, store: Store) -> None:
        for data in (b"first", b"", b"the third is longer", b"4"):
            store.put("key", data)
            assert store.get("key") == data
            assert [(info.key, info.nbytes) for info in store.list()] == [("key", len(data))]

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put("folder/other", b"1")
        for key in ("key", "folder", "folder/key", "folder/othe", "folder/other.x", "other/folder/key"):
            for read in (store.get, lambda k: store.get_range(k, 0, 1), lambda k: store.get_range(k, 0, 0)):
                with pytest.raises(NotFoundError) as caught:
                    read(key)
                assert caught.value.key == key

    @pytest.mark.parametrize(
        ("offset", "length"),
        [
            (0, 10),
            (0, 1),
            (9, 1),
            (3, 4),
            (0, 0),
            (5, 0),
            (10, 0),
            (0, 11),
            (5, 100),
            (9, 2),
            (10, 1),
            (11, 1),
            (99, 9),
        ],
    )
    def test_ranges_end_where_the_object_ends(self, store: Store, offset: int, length: int) -> None:
        store.put("key", b"0123456789")
        assert store.get_range("key", offset, length) == b"0123456789"[offset : offset + length]

    def test_objects_may_be_empty(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.get_range("empty", 0, 5) == b""
        assert [info.nbytes for info in store.list()] == [0]

    def test_objects_may_be_large(self, store: Store) -> None:
        data = _bytes(LARGE_BYTES)
        store.put("large", data)
        assert store.get("large") == data
        assert store.get_range("large", LARGE_BYTES - 5, 10) == data[-5:]
        assert store.get_range("large", 1_000_001, 9_000_000) == data[1_000_001:10_000_001]
        assert [info.nbytes for info in store.list("lar")] == [LARGE_BYTES]

    def test_listing_is_in_order_for_every_prefix_and_start(self, store: Store) -> None:
        assert list(store.list()) == []
        for key in KEYS:
            store.put(key, key.encode())
        assert [store.get(key) for key in KEYS] == [key.encode() for key in KEYS]
        for prefix in PREFIXES:
            for after in AFTERS:
                wanted = [k for k in KEYS if k.startswith(prefix) and (after is None or k > after)]
                assert [info.key for info in store.list(prefix, after=after)] == wanted, (prefix, after)

    def test_listing_has_many_pages(self, store: Store) -> None:
        keys = [f"many/{n:05d}" for n in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: store.put(key, b"1"), keys))
        assert [info.key for info in store.list("many/")] == keys
        assert [info.key for info in store.list("many/", after=keys[1049])] == keys[1050:]
        assert [info.key for info in store.list("many/007")] == keys[700:800]

    def test_listing_shows_at_once_what_was_done(self, store: Store) -> None:
        for n in range(10):
            store.put(f"k/{n}", bytes(n))
            assert [info.nbytes for info in store.list("k/")] == list(range(n + 1))
        for n in range(10):
            store.delete(f"k/{n}")
            assert [info.nbytes for info in store.list("k/")] == list(range(n + 1, 10))

    def test_listing_misses_nothing_while_others_write(self, store: Store) -> None:
        stable = [f"k/{n:02d}-stable" for n in range(40)]
        for key in stable:
            store.put(key, b"1")

        def churn(stop: threading.Event) -> None:
            n = 0
            while not stop.is_set():
                n = (n + 1) % 40
                store.put(f"k/{n:02d}-other", b"2")
                store.put(stable[n], b"3")
                store.delete(f"k/{(n + 20) % 40:02d}-other")

        def look() -> None:
            for _ in range(20):
                assert [info.key for info in store.list("k/") if info.key.endswith("stable")] == stable

        _while(churn, look)

    def test_times_are_the_last_puts(self, store: Store) -> None:
        day_s = 86_400.0
        store.put("key", b"1")
        first = next(store.list()).modified_unix_s
        store.put("key", b"2")
        second = next(store.list()).modified_unix_s
        assert abs(first - time.time()) < day_s
        assert first <= second

    def test_delete_takes_one_object_and_may_be_repeated(self, store: Store) -> None:
        for key in ("a/b", "a/b-c", "a/bc", "c"):
            store.put(key, b"1")
        for _ in range(2):
            store.delete("a/b")
            store.delete("never/was/there")
            store.delete("a")
            assert [info.key for info in store.list()] == ["a/b-c", "a/bc", "c"]
        with pytest.raises(NotFoundError):
            store.get("a/b")
        store.put("a/b", b"again")
        assert store.get("a/b") == b"again"

    def test_readers_see_only_whole_objects(self, store: Store) -> None:
        sizes = (1, 70_000, 300_000)
        patterns = {bytes([n + 1]) * size for n, size in enumerate(sizes)}
        store.put("key", bytes([1]))

        def rewrite(stop: threading.Event) -> None:
            while not stop.is_set():
                for pattern in patterns:
                    store.put("key", pattern)

        def look() -> None:
            for _ in range(30):
                assert store.get("key") in patterns
                assert [info.nbytes in sizes for info in store.list()] == [True]

        _while(rewrite, look)

    def test_many_threads_at_once(self, store: Store) -> None:
        def work(worker: int) -> None:
            for n in range(10):
                key, data = f"of/{worker}/{n}", _bytes(1000 * worker + n)
                store.put(key, data)
                assert store.get(key) == data
                assert [info.key for info in store.list(f"of/{worker}/", after=f"of/{worker}/{n - 1}")][-1:] == [key]
                if n % 2:
                    store.delete(key)

        _together(work, range(8))
        assert [info.key for info in store.list()] == [f"of/{w}/{n}" for w in range(8) for n in range(0, 10, 2)]

    def test_create_takes_a_free_key_only(self, store: Store) -> None:
        _require_create(store)
        assert store.create("key", b"first") is True
        assert store.create("key", b"second") is False
        assert store.get("key") == b"first"
        store.put("key", b"put")
        assert store.create("key", b"third") is False
        store.delete("key")
        assert store.create("key", b"") is True
        assert store.create("key", b"fifth") is False
        assert store.get("key") == b""

    def test_of_many_creates_one_wins(self, store: Store) -> None:
        _require_create(store)
        for race in range(RACES):
            key, won = f"race/{race}", [False] * RACERS
            barrier = threading.Barrier(RACERS)

            def run(racer: int, key: str = key, won: list[bool] = won, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                won[racer] = store.create(key, _racer_data(racer))

            _together(run, range(RACERS))
            assert won.count(True) == 1, f"{won.count(True)} winners"
            assert store.get(key) == _racer_data(won.index(True))

    def test_without_the_capability_create_is_refused(self, store: Store) -> None:
        if store.capabilities.create_if_absent:
            pytest.skip("the store claims create-if-absent")
        with pytest.raises(StoreError):
            store.create("key", b"1")
        assert list(store.list()) == []

    def test_url_says_where(self, store: Store) -> None:
        assert store.url
        assert "\n" not in store.url


def _require_create(store: Store) -> None:
    if not store.capabilities.create_if_absent:
        pytest.skip("the store does not claim create-if-absent")


def _bytes(size: int) -> bytes:
    """Always the same bytes, without a short period."""
    return b"".join(n.to_bytes(4, "little") for n in range(-(-size // 4)))[:size]


def _racer_data(racer: int) -> bytes:
    return f"racer {racer} ".encode() * 500


def _together(work: Callable[[int], None], workers: Iterable[int]) -> None:
    """Run `work` for all workers at once, in one thread each, and raise the first error."""
    each = list(workers)
    with ThreadPoolExecutor(len(each)) as pool:
        for _ in pool.map(work, each):
            pass


def _while(busy: Callable[[threading.Event], None], look: Callable[[], None]) -> None:
    """Run `look` while `busy` runs in another thread, and raise an error of either."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(busy, stop)
        try:
            look()
        finally:
            stop.set()
        working.result()
