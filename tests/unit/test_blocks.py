"""Blocks of a delta: never larger than the weights, and refused where they do not add up."""

from typing import Any

import numpy as np
import pytest
from support.changes import in_blocks
from support.helpers import anchor_blocks
from support.strategies import Move, state_pair

from deltasync import blocks
from deltasync.errors import CorruptError, FormatError, InvalidInputError, MismatchError
from deltasync.format.digest import StateDigest
from deltasync.format.layout import DTYPES, Layout, TensorSpec
from deltasync.format.payload import Block
from deltasync.format.weights import Weights

CODECS = ["exp/1", "coo/1"]


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3", "I8"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("move", ["replace", "special", "ulp"])
def test_no_density_loses_to_sending_the_weights(dtype: str, share: float, move: Move) -> None:
    old, new = state_pair(dtype, 40_000, share, move=move)
    delta = sum(len(b.data) for b in blocks.encode_delta(old, new))
    dense = sum(len(b.data) for b in anchor_blocks(new))
    assert delta <= 1.005 * dense


def test_what_did_not_change_is_refused() -> None:
    layout = Layout.of([TensorSpec("w", DTYPES["BF16"], (1000,))])
    old = Weights(layout, (np.zeros(1000, np.uint16),))
    unchanged = in_blocks(layout, {"w": (np.array([3]), np.array([0], np.uint16))})
    with pytest.raises(InvalidInputError) as caught:
        list(blocks.encode_changes(old, unchanged))
    assert caught.value.rule == "changes.unchanged"


def one_block(codec: str) -> tuple[Weights, Block]:
    old, new = state_pair("BF16", 300, 0.1, move="ulp")
    [found] = blocks.encode_delta(old, new, codec="coo/1" if codec == "coo/1" else "exp/1")
    return old, found


def altered(block: Block, **fields: Any) -> Block:
    names = ("codec", "runs", "changed", "digest", "data")
    return Block(**{name: fields.get(name, getattr(block, name)) for name in names})


@pytest.mark.parametrize("codec", CODECS)
def test_blocks_that_do_not_add_up_are_refused(codec: str) -> None:
    old, found = one_block(codec)
    with pytest.raises(MismatchError) as mismatch:
        list(blocks.decode(old, [altered(found, digest=found.digest + StateDigest(1, 0))]))
    assert mismatch.value.rule == "block.digest"
    with pytest.raises(CorruptError) as corrupt:
        list(blocks.decode(old, [altered(found, changed=found.changed - 1)]))
    assert corrupt.value.rule == ("coo.size" if codec == "coo/1" else "block.changed")
    for rule, relative, wrong in (("block.codec", True, "exp/9"), ("anchor.codec", False, codec)):
        with pytest.raises(FormatError) as unknown:
            list(blocks.decode(old, [altered(found, codec=wrong)], relative=relative))
        assert unknown.value.rule == rule


@pytest.mark.parametrize(("place", "bad"), [(0, -1), (-1, 300), (1, 0), (0, 2**31 - 1)])
def test_bad_plain_indices_are_refused(place: int, bad: int) -> None:
    old, found = one_block("coo/1")
    indices = np.frombuffer(found.data, "<i4", found.changed).copy()
    indices[place] = bad
    data = indices.tobytes() + found.data[4 * found.changed :]
    with pytest.raises(CorruptError) as caught:
        list(blocks.decode(old, [altered(found, data=data)]))
    assert caught.value.rule == "coo.indices"
