import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.feeds import SpyStore, paper, store_of
from support.helpers import resealed

from deltasync.errors import NotFoundError
from deltasync.feed.log import Log, manifest_key
from deltasync.feed.plan import Edge, Plan, cheapest, cheapest_paths, collect, plan
from deltasync.format import keys
from deltasync.format.digest import StateDigest
from deltasync.format.manifest import Manifest


def edge(manifest: Manifest) -> Edge:
    return Edge(manifest_key(manifest), manifest)


def steps(found: Plan) -> list[tuple[str, int | None, int]]:
    return [(e.manifest.kind, e.start, e.end) for e in found.edges]


def deltas(start: int, end: int, nbytes: int = 10) -> list[Manifest]:
    return [paper("delta", v, nbytes) for v in range(start + 1, end + 1)]


def planned(store: SpyStore, target: int, **options: object) -> Plan:
    log = Log(store)
    return plan(log, log.read(target), **options)  # type: ignore[arg-type]


# --- cheapest ---------------------------------------------------------------------------------------------------------

VERSIONS = 6
_SIZES = st.integers(0, 3)  # Few, so that paths of equal bytes are common.


@st.composite
def edge_sets(draw: st.DrawFn) -> list[Edge]:
    ends = st.integers(0, VERSIONS - 1)
    pairs = draw(st.lists(st.tuples(ends, ends).filter(lambda p: p[0] < p[1]), unique=True, max_size=9))
    found = [
        edge(paper("delta" if b - a == 1 else "skip", b, draw(_SIZES), start=None if b - a == 1 else a))
        for a, b in pairs
    ]
    for version in draw(st.lists(ends, max_size=3)):
        found.append(edge(paper(draw(st.sampled_from(["anchor", "base"])), version, draw(_SIZES))))
    return draw(st.permutations(found))


def every_path(edges: Sequence[Edge], start: int | None, end: int) -> list[tuple[Edge, ...]]:
    """All paths by trying every order of every few edges: slow, and plainly right."""
    paths = []
    for count in range(len(edges) + 1):
        for path in itertools.permutations(edges, count):
            at = start
            for taken in path:
                if taken.start is not None and taken.start != at:
                    break
                at = taken.end
            else:
                if at == end:
                    paths.append(path)
    return paths


@given(edges=edge_sets().filter(lambda e: len(e) <= 6), start=st.none() | st.integers(0, VERSIONS - 1))
def test_cheapest_is_what_trying_everything_finds(edges: list[Edge], start: int | None) -> None:
    for end in range(VERSIONS):
        paths = every_path(edges, start, end)
        found = cheapest(edges, start=start, end=end)
        if not paths:
            assert found is None
            continue
        assert found in paths
        assert (sum(e.nbytes for e in found), len(found)) == min((sum(e.nbytes for e in w), len(w)) for w in paths)


@given(edges=edge_sets(), start=st.none() | st.integers(0, VERSIONS - 1))
def test_paths_to_many_versions_are_those_to_each(edges: list[Edge], start: int | None) -> None:
    found = cheapest_paths(edges, start=start, ends=range(VERSIONS))

    def cost(path: tuple[Edge, ...]) -> tuple[int, int]:
        return sum(e.nbytes for e in path), len(path)

    for end in range(VERSIONS):
        alone = cheapest(edges, start=start, end=end)
        assert (end in found) == (alone is not None)
        if alone is not None:
            assert cost(found[end]) == cost(alone)


@given(edges=edge_sets(), start=st.none() | st.integers(0, VERSIONS - 1), end=st.integers(0, VERSIONS - 1))
def test_a_path_leads_from_start_to_end(edges: list[Edge], start: int | None, end: int) -> None:
    found = cheapest(edges, start=start, end=end)
    if found is None:
        return
    at = start
    for i, taken in enumerate(found):
        assert taken.start == at or (taken.start is None and i == 0)
        at = taken.end
    assert at == end


# --- which path -------------------------------------------------------------------------------------------------------

ANCHOR0 = ("anchor", None, 0)


def delta_steps(start: int, end: int) -> list[tuple[str, int | None, int]]:
    return [("delta", v - 1, v) for v in range(start + 1, end + 1)]


def test_from_nothing_by_the_anchor_and_the_deltas() -> None:
    found = planned(store_of(paper("anchor", 0, 1000), *deltas(0, 5)), 5)
    assert steps(found) == [ANCHOR0, *delta_steps(0, 5)]
    assert (found.nbytes, sum(len(edge.manifest.payloads) for edge in found.edges)) == (1050, 6)


def test_from_a_version_that_is_held_by_deltas_alone() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 5))
    assert steps(planned(store, 5, start=3)) == delta_steps(3, 5)
    assert planned(store, 5, start=5) == Plan(())


@pytest.mark.parametrize(
    ("late_bytes", "first"),
    [(1000, ("anchor", None, 3)), (1029, ("anchor", None, 3)), (1031, ANCHOR0), (5000, ANCHOR0)],
)
def test_the_anchor_of_least_bytes(late_bytes: int, first: tuple[str, int | None, int]) -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 5), late=[paper("anchor", 3, late_bytes)])
    assert steps(planned(store, 5))[0] == first


def test_a_late_anchor_is_recognised_by_its_key() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 2), late=[paper("anchor", 2, 1001)])
    assert [e.key for e in planned(store, 2).edges] == [keys.anchor_key(2)]


def test_of_equal_bytes_the_fewest_edges() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 4, 10), paper("skip", 4, 40, start=0))
    assert steps(planned(store, 4, start=0)) == [("skip", 0, 4)]


def test_the_fewest_edges_even_if_others_are_met_first() -> None:
    cheap_first = [paper("delta", 1, 0), paper("skip", 3, 0, start=1), paper("delta", 4, 5)]
    cheap_last = [paper("skip", 2, 3, start=0), paper("skip", 4, 2, start=2)]
    found = cheapest([edge(m) for m in (*cheap_first, *cheap_last)], start=0, end=4)
    assert found is not None
    assert [e.end for e in found] == [2, 4]


@pytest.mark.parametrize(("skip_bytes", "taken"), [(25, True), (35, False)])
def test_a_skip_where_it_is_smaller_than_its_deltas(skip_bytes: int, taken: bool) -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 5), paper("skip", 4, skip_bytes, start=1))
    path = [("delta", 0, 1), ("skip", 1, 4), ("delta", 4, 5)] if taken else delta_steps(0, 5)
    assert steps(planned(store, 5, start=0)) == path
    assert steps(planned(store, 5)) == [ANCHOR0, *path]


def test_a_skip_past_the_target_is_no_use() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 5), paper("skip", 5, 1, start=0))
    assert steps(planned(store, 4, start=0)) == delta_steps(0, 4)


def test_a_base_costs_nothing() -> None:
    store = store_of(paper("base", 0), *deltas(0, 5), late=[paper("anchor", 4, 1000)])
    assert steps(planned(store, 5)) == [("base", None, 0), *delta_steps(0, 5)]
    cheap = store_of(paper("base", 0), *deltas(0, 5, 300), late=[paper("anchor", 4, 1000)])
    assert steps(planned(cheap, 5)) == [("anchor", None, 4), ("delta", 4, 5)]
    assert steps(planned(cheap, 5, avoid={keys.anchor_key(4)}))[0] == ("base", None, 0)


def test_an_anchor_of_another_layout_begins_anew() -> None:
    other = "cd" * 32
    anchor = paper("anchor", 3, 50, layout_sha256=other, parent=2, parent_digest=StateDigest(2, 2))
    store = store_of(paper("anchor", 0, 10), *deltas(0, 2, 1), anchor, paper("delta", 4, 1, layout_sha256=other))
    assert steps(planned(store, 4)) == steps(planned(store, 4, start=2)) == [("anchor", None, 3), ("delta", 3, 4)]


@pytest.mark.parametrize("levels", [(), (8,), (8, 64)])
def test_200_versions_late(levels: tuple[int, ...]) -> None:
    """Skips of 8 and 64 versions, each much smaller than what it stands for, and an anchor that is larger still."""
    skips = [
        paper("skip", b, 10 * width // 4, start=b - width)
        for width in levels
        for b in range(width, 201)
        if b % width == 0
    ]
    store = store_of(paper("anchor", 0, 10_000), *deltas(0, 200), *skips, late=[paper("anchor", 192, 10_000)])
    found = planned(store, 200, start=0)
    assert found.edges[0].start == 0
    assert found.nbytes == (500 if levels else 2000)
    assert len(found.edges) == {(): 200, (8,): 25, (8, 64): 4}[levels]


def test_a_replica_so_late_that_an_anchor_is_cheaper() -> None:
    store = store_of(paper("anchor", 0, 500), *deltas(0, 200), late=[paper("anchor", 190, 500)])
    assert steps(planned(store, 200, start=0)) == [("anchor", None, 190), *delta_steps(190, 200)]


def test_reading_stops_where_nothing_cheaper_can_come() -> None:
    """A path of 100 bytes is known at once; manifests that lie 16 times as many bytes back are not read."""
    store = store_of(paper("anchor", 0, 100), *deltas(0, 999, 100), late=[paper("anchor", 999, 100)])
    assert steps(planned(store, 999)) == [("anchor", None, 999)]
    assert len([call for call in store.took() if call[0] == "get"]) < 100


def test_a_cheap_path_that_turns_out_unusable() -> None:
    """The delta behind a cheap anchor is of no use; what leads around it begins much further back."""
    store = store_of(
        paper("anchor", 0, 5000), *deltas(0, 99, 100), paper("skip", 99, 10, start=2), late=[paper("anchor", 98, 1)]
    )
    assert steps(planned(store, 99))[0] == ("anchor", None, 98)
    found = planned(store, 99, avoid={keys.version_key(99)})
    assert steps(found) == [ANCHOR0, *delta_steps(0, 2), ("skip", 2, 99)]


def test_going_back() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 9), paper("skip", 3, 5, start=0))
    assert steps(planned(store, 3, start=9)) == [ANCHOR0, ("skip", 0, 3)]


# --- edges to avoid ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("avoid", "path"),
    [
        ([], [("anchor", None, 3), ("delta", 3, 4)]),
        ([keys.anchor_key(3)], [ANCHOR0, ("skip", 0, 3), ("delta", 3, 4)]),
        ([keys.anchor_key(3), keys.skip_key(0, 3)], [ANCHOR0, *delta_steps(0, 4)]),
        ([keys.version_key(2), keys.anchor_key(3)], [ANCHOR0, ("skip", 0, 3), ("delta", 3, 4)]),
        ([keys.version_key(2), keys.anchor_key(3), keys.skip_key(0, 3)], None),
        ([keys.version_key(4)], None),
    ],
)
def test_avoid(avoid: list[str], path: list[tuple[str, int | None, int]] | None) -> None:
    store = store_of(
        paper("anchor", 0, 1000), *deltas(0, 4), paper("skip", 3, 15, start=0), late=[paper("anchor", 3, 1000)]
    )
    if path is not None:
        assert steps(planned(store, 4, avoid=avoid)) == path
        return
    with pytest.raises(NotFoundError, match="version 4 cannot be rebuilt") as caught:
        planned(store, 4, avoid=avoid)
    assert caught.value.version == 4
    assert caught.value.hint


DAMAGES = {
    "gone": lambda s: s.delete(keys.version_key(5)),
    "not JSON": lambda s: s.put(keys.version_key(5), b"{"),
    "a later format": lambda s: s.put(
        keys.version_key(5), resealed(s.get(keys.version_key(5)), {"format": "deltasync/9"})
    ),
    "in the wrong place": lambda s: s.put(keys.version_key(5), paper("delta", 6, 10).to_bytes()),
    "from another digest": lambda s: s.put(
        keys.version_key(5), paper("delta", 5, 10, parent_digest=StateDigest(9, 9)).to_bytes()
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_in_the_middle(damage: object) -> None:
    """Version 5 is damaged: an anchor after it, or a skip over it, still leads on."""
    assert callable(damage)
    base = [paper("anchor", 0, 1000), *deltas(0, 9)]
    store = store_of(*base)
    damage(store)
    with pytest.raises(NotFoundError):
        planned(store, 9)
    assert steps(planned(store, 4)) == [ANCHOR0, *delta_steps(0, 4)]
    store = store_of(*base, late=[paper("anchor", 7, 9999)])
    damage(store)
    assert steps(planned(store, 9)) == [("anchor", None, 7), *delta_steps(7, 9)]
    store = store_of(*base, paper("skip", 8, 77, start=2))
    damage(store)
    assert steps(planned(store, 9)) == [ANCHOR0, *delta_steps(0, 2), ("skip", 2, 8), ("delta", 8, 9)]
    assert steps(planned(store, 9, start=1)) == [("delta", 1, 2), ("skip", 2, 8), ("delta", 8, 9)]


def test_a_long_hole_ends_the_walk() -> None:
    """A stray manifest far behind the head does not make a reader ask for all others."""
    store = store_of(paper("anchor", 0, 1000), paper("delta", 10_000, 10))
    with pytest.raises(NotFoundError):
        planned(store, 10_000)
    assert len(store.took()) < 200


@pytest.mark.parametrize(
    "stray",
    [
        {"late": [paper("anchor", 3, 1, digest=StateDigest(9, 9))]},
        {"skip": paper("skip", 3, 1, start=0, digest=StateDigest(9, 9))},
    ],
    ids=["anchor", "skip"],
)
def test_shortcuts_to_another_digest_are_passed_over(stray: dict[str, object]) -> None:
    extra = [m for m in (stray.get("skip"),) if isinstance(m, Manifest)]
    late = stray.get("late", [])
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 4), *extra, late=late)  # type: ignore[arg-type]
    assert steps(planned(store, 4)) == [ANCHOR0, *delta_steps(0, 4)]


@pytest.mark.parametrize("kind", ["anchor", "skip"])
def test_damaged_shortcuts_are_passed_over(kind: str) -> None:
    store = store_of(
        paper("anchor", 0, 1000), *deltas(0, 4), paper("skip", 3, 1, start=0), late=[paper("anchor", 3, 1)]
    )
    store.put(keys.anchor_key(3) if kind == "anchor" else keys.skip_key(0, 3), b"{")
    path = [ANCHOR0, ("skip", 0, 3)] if kind == "anchor" else [("anchor", None, 3)]
    assert steps(planned(store, 4)) == [*path, ("delta", 3, 4)]


def test_a_version_from_nothing_where_the_start_leads_nowhere() -> None:
    """The deltas behind a replica were pruned and are avoided: it begins again at an anchor."""
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 8), late=[paper("anchor", 5, 1000)])
    assert steps(planned(store, 8, start=2)) == delta_steps(2, 8)
    found = planned(store, 8, start=2, avoid={keys.version_key(3)})
    assert steps(found) == [("anchor", None, 5), *delta_steps(5, 8)]


def test_an_older_anchor_and_a_skip_where_the_start_leads_nowhere() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 8), paper("skip", 6, 30, start=1))
    found = planned(store, 8, start=2, avoid={keys.version_key(3)})
    assert steps(found) == [ANCHOR0, ("delta", 0, 1), ("skip", 1, 6), *delta_steps(6, 8)]


def test_collect_reads_no_further_than_the_start() -> None:
    store = store_of(paper("anchor", 0, 1000), *deltas(0, 50))
    log = Log(store)
    assert {e.end for e in collect(log, log.read(50), [], start=45, avoid=())} == set(range(46, 51))


@pytest.mark.parametrize("missing", [1, 40])
def test_one_warning_for_all_manifests_that_are_passed_over(missing: int, caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(paper("anchor", 0, 1), *deltas(0, 60), late=[paper("anchor", 59, 100)])
    for version in range(50 - missing, 50):
        store.delete(keys.version_key(version))
    assert steps(planned(store, 60)) == [("anchor", None, 59), ("delta", 59, 60)]
    (record,) = caplog.records
    assert "version 49 is not in" in record.getMessage()
    assert (f"{missing} manifests" in record.getMessage()) == (missing > 1)


def test_no_warning_in_front_of_the_error(caplog: pytest.LogCaptureFixture) -> None:
    store = store_of(*deltas(0, 9))
    store.delete(keys.version_key(5))
    with pytest.raises(NotFoundError, match="cannot be rebuilt"):
        planned(store, 9)
    assert caplog.text == ""


# --- long feeds -------------------------------------------------------------------------------------------------------


def read_versions(store: SpyStore) -> list[str]:
    return [key for verb, key in store.took() if verb == "get" and key.startswith(keys.VERSIONS)]


@pytest.mark.parametrize("versions", [200, 2000])
def test_without_skips_little_more_than_the_plan_is_read(versions: int) -> None:
    """However long the feed is: deltas alone make no older anchor cheaper."""
    anchors = [paper("anchor", v, 100) for v in range(10, versions, 10)]
    store = store_of(paper("anchor", 0, 100), *deltas(0, versions + 5), late=[*anchors, paper("anchor", versions, 100)])
    found = planned(store, versions + 5)
    assert steps(found)[0] == ("anchor", None, versions)
    assert len(found.edges) == 6
    # 15 deltas are as large as the anchor and 5 deltas; some more are read ahead.
    assert len(read_versions(store)) < 50


def test_with_skips_an_older_anchor_can_be_cheaper() -> None:
    skips = [paper("skip", v, 1, start=v - 10) for v in range(10, 201, 10)]
    store = store_of(paper("anchor", 0, 10), *deltas(0, 200), *skips, late=[paper("anchor", 190, 1000)])
    found = planned(store, 200)
    assert steps(found)[0] == ("anchor", None, 0)
    assert found.nbytes == 30


def test_a_late_replica_lists_no_anchors_of_versions_before_its_own() -> None:
    store = store_of(paper("anchor", 0, 100), *deltas(0, 50), late=[paper("anchor", 20, 100), paper("anchor", 45, 1)])
    assert steps(planned(store, 50, start=40))[0] == ("anchor", None, 45)
    assert steps(planned(store, 50, start=46))[0] == ("delta", 46, 47)
    assert keys.anchor_key(20) not in [key for _, key in store.took()]
