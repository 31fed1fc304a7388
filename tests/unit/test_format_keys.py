from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.errors import InvalidInputError
from deltasync.format import keys
from deltasync.format.limits import VERSION_MAX

SHA = "0123456789abcdef" * 4
versions = st.integers(0, VERSION_MAX)


@given(versions, versions)
def test_keys_sort_like_versions(a: int, b: int) -> None:
    assert (keys.version_key(a) < keys.version_key(b)) == (a < b)
    assert keys.parse_version_key(keys.version_key(a)) == a


@given(versions, st.integers(2, 1000))
def test_skip_round_trip(start: int, length: int) -> None:
    if start + length <= VERSION_MAX:
        assert keys.parse_skip_key(keys.skip_key(start, start + length)) == (start, start + length)


def test_the_keys_of_the_protocol() -> None:
    assert keys.FEED == "feed.json"
    assert keys.version_key(42) == "versions/00000000000000000042.json"
    assert keys.anchor_key(42) == "anchors/00000000000000000042.json"
    assert keys.parse_anchor_key(keys.anchor_key(42)) == 42
    assert keys.skip_key(1, 33) == "skips/00000000000000000001-00000000000000000033.json"
    assert keys.payload_key(SHA) == f"payloads/{SHA}.safetensors"
    assert keys.replica_key("host-1.a_b") == "replicas/host-1.a_b.json"
    assert keys.parse_payload_key(keys.payload_key(SHA)) == SHA
    assert keys.parse_replica_key("replicas/host-1.json") == "host-1"


@pytest.mark.parametrize(
    "build",
    [
        lambda: keys.version_key(-1),
        lambda: keys.version_key(VERSION_MAX + 1),
        lambda: keys.skip_key(3, 4),
        lambda: keys.skip_key(4, 3),
        lambda: keys.payload_key(SHA.upper()),
        lambda: keys.payload_key("../../etc/passwd"),
        lambda: keys.replica_key(""),
        lambda: keys.replica_key("../x"),
        lambda: keys.replica_key("a/b"),
        lambda: keys.replica_key(".hidden"),
        lambda: keys.replica_key("a\n"),
        lambda: keys.replica_key("a" * 129),
    ],
)
def test_bad_parts_are_refused(build: Callable[[], str]) -> None:
    with pytest.raises(InvalidInputError):
        build()


STRAYS = [
    (keys.parse_version_key, "versions/42.json"),
    (keys.parse_version_key, "versions/00000000000000000042.json.tmp"),
    (keys.parse_version_key, "versions/00000000000000000042.json\n"),
    (keys.parse_version_key, "versions/\u06600000000000000000042.json"),
    (keys.parse_version_key, "versions/99999999999999999999.json"),
    (keys.parse_version_key, "x/versions/00000000000000000042.json"),
    (keys.parse_version_key, "feed.json"),
    (keys.parse_anchor_key, "anchors/42.json"),
    (keys.parse_anchor_key, "anchors/99999999999999999999.json"),
    (keys.parse_anchor_key, "versions/00000000000000000042.json"),
    (keys.parse_skip_key, "skips/00000000000000000001-00000000000000000002.json"),
    (keys.parse_skip_key, "skips/00000000000000000009-00000000000000000002.json"),
    (keys.parse_skip_key, "skips/00000000000000000001-99999999999999999999.json"),
    (keys.parse_skip_key, "skips/1-5.json"),
    (keys.parse_payload_key, f"payloads/{SHA.upper()}.safetensors"),
    (keys.parse_payload_key, f"payloads/{SHA}"),
    (keys.parse_replica_key, "replicas/.json"),
    (keys.parse_replica_key, "replicas/a/b.json"),
    (keys.parse_replica_key, "a.json"),
    (keys.parse_replica_key, "replicas/a"),
]


@pytest.mark.parametrize(("parse", "key"), STRAYS)
def test_stray_keys_are_passed_over(parse: Callable[[str], object], key: str) -> None:
    assert parse(key) is None
