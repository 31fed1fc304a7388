"""Large objects in ranges: the same bytes, or an error."""

import threading

import pytest

from deltasync.errors import CorruptError, NotFoundError, StoreError
from deltasync.feed import fetch
from deltasync.feed.fetch import get_whole
from deltasync.store.memory import MemoryStore

PART = 1000


class Watched(MemoryStore):
    """Notes each range, and from which thread it was asked for; fails at one offset if one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self.fail_at = -1

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges.append((offset, length))
        self.threads.add(threading.get_ident())
        if offset == self.fail_at:
            raise StoreError("failed", transient=True)
        return super().get_range(key, offset, length)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(fetch, "PART_BYTES", PART)
    monkeypatch.setattr(fetch, "SPLIT_BYTES", PART // 4)
    return Watched()


def pattern(size: int) -> bytes:
    return bytes(n * 7 % 251 for n in range(size))


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7])
def test_the_same_bytes(store: Watched, size: int) -> None:
    store.put("key", pattern(size))
    assert get_whole(store, "key", size) == pattern(size)
    assert len(store.ranges) == max(1, -(-size // PART))
    # One byte more than all, once: that is how a longer object is found.
    assert sum(length for _, length in store.ranges) == size + 1


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 2 * PART, 5 * PART + 7, 100 * PART])
def test_parts_come_in_order_while_others_are_fetched(store: Watched, size: int) -> None:
    store.put("key", pattern(size))
    parts: list[bytes] = []
    asked: list[int] = []

    def on_part(part: memoryview) -> None:
        parts.append(bytes(part))
        asked.append(len(store.ranges))

    assert get_whole(store, "key", size, on_part=on_part) == pattern(size)
    assert b"".join(parts) == pattern(size)
    assert asked[0] < 100, "the first part was not held back until all had come"


@pytest.mark.parametrize(
    ("size", "ranges", "expected"),
    [(0, 9, 1), (1, 9, 1), (250, 9, 1), (251, 9, 2), (PART, 9, 4), (PART, 3, 3), (PART, 1, 1)],
)
def test_a_small_object_in_several_ranges(store: Watched, size: int, ranges: int, expected: int) -> None:
    store.put("key", pattern(size))
    parts: list[bytes] = []
    assert get_whole(store, "key", size, ranges=ranges, on_part=lambda part: parts.append(bytes(part))) == pattern(size)
    assert b"".join(parts) == pattern(size)
    assert len(store.ranges) == expected
    assert sum(length for _, length in store.ranges) == size + 1


@pytest.mark.parametrize("ranges", [1, 4])
@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 3 * PART])
@pytest.mark.parametrize("off_by", [-PART - 1, -1, 1, PART, 10 * PART])
def test_another_size_is_corrupt(store: Watched, size: int, off_by: int, ranges: int) -> None:
    if size + off_by < 0:
        off_by = -size if size else 1
    store.put("key", pattern(size + off_by))
    with pytest.raises(CorruptError, match=r"^key has .* bytes, not") as caught:
        get_whole(store, "key", size, ranges=ranges)
    assert caught.value.key == "key"


@pytest.mark.parametrize("size", [10, 10 * PART])
def test_missing(store: Watched, size: int) -> None:
    with pytest.raises(NotFoundError):
        get_whole(store, "key", size)


def test_an_error_of_one_range_is_raised_and_ends_the_rest(store: Watched) -> None:
    store.put("key", pattern(100 * PART))
    store.fail_at = 2 * PART
    with pytest.raises(StoreError, match="failed"):
        get_whole(store, "key", 100 * PART)
    assert len(store.ranges) < 100
