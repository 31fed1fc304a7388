import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.helpers import LAYOUT

from deltasync.errors import FormatError
from deltasync.format.digest import StateDigest, layout_digest
from deltasync.format.layout import Layout, TensorSpec, tensor_seed

lanes = st.integers(0, 2**64 - 1)
digests = st.builds(StateDigest, lanes, lanes)


@given(digests, digests, digests)
def test_digests_form_a_group(a: StateDigest, b: StateDigest, c: StateDigest) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + b - b == a
    assert a - a == StateDigest.ZERO
    assert a + StateDigest.ZERO == a


@given(digests)
def test_hex_round_trip(a: StateDigest) -> None:
    assert len(a.hex) == 32
    assert StateDigest.from_hex(a.hex) == a


def test_hex_has_lane_0_first() -> None:
    assert StateDigest(1, 0xABC).hex == "0000000000000001" + "0000000000000abc"


def test_lanes_wrap() -> None:
    assert StateDigest(2**64 - 1, 5) + StateDigest(2, 0) == StateDigest(1, 5)
    assert StateDigest.of((-1, 2**64)) == StateDigest(2**64 - 1, 0)


@pytest.mark.parametrize(
    "text", ["", "0" * 31, "0" * 33, "A" * 32, "g" * 32, " " + "0" * 31, "0" * 31 + "\n", "\u0660" * 32, None, 7]
)
def test_bad_hex_is_refused(text: object) -> None:
    with pytest.raises(FormatError) as caught:
        StateDigest.from_hex(text)
    assert caught.value.rule == "digest.hex"


def test_layout_digest_adds_the_seeds_of_all_tensors() -> None:
    seeds = [tensor_seed(t) for t in LAYOUT.tensors]
    assert layout_digest(LAYOUT) == StateDigest(sum(s[0] for s in seeds) % 2**64, sum(s[1] for s in seeds) % 2**64)
    assert layout_digest(Layout.of([])) == StateDigest.ZERO


def test_layout_digest_binds_empty_tensors() -> None:
    dtype = LAYOUT.tensors[0].dtype
    one, other = (Layout.of([TensorSpec("x", dtype, shape)]) for shape in ((0, 2), (2, 0)))
    assert layout_digest(one) != layout_digest(other)
