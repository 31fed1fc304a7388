"""What changed in a version: cells by layer and kind, and the steps of elements."""

import numpy as np
import pytest
from support.feeds import Feed, SpyStore

from deltasync.blocks import encode_delta
from deltasync.errors import NotFoundError
from deltasync.format import keys
from deltasync.format.weights import Weights
from deltasync.oneshot import inspect
from deltasync.ui import index
from deltasync.ui.index import kind_name, version_json


def test_the_cells_of_a_version() -> None:
    feed = Feed.of(1)
    old = feed.states[0]
    arrays = {spec.name: array.copy() for spec, array in zip(old.layout.tensors, old.arrays, strict=True)}
    ordinal = next(i for i, spec in enumerate(old.layout.tensors) if spec.name == "layer.0.bias")
    new = Weights(old.layout, tuple(a.copy() for a in old.arrays))
    new.arrays[ordinal].reshape(-1)[:5] ^= np.array(1, new.arrays[ordinal].dtype)
    feed.delta(new)
    detail = version_json(feed.log, 1)
    cells = {(cell["layer"], cell["kind"]): cell for cell in detail["cells"]}
    bias = cells["layer.0", "bias"]
    assert (bias["changed"], bias["elements"], bias["exact"]) == (5, arrays["layer.0.bias"].size, True)
    assert sum(cell["changed"] for cell in detail["cells"]) == detail["manifest"]["changed"] == 5
    assert sum(cell["elements"] for cell in detail["cells"]) == old.layout.elements
    assert detail["full_bytes"] == old.layout.nbytes
    assert sum(codec["blocks"] for codec in detail["codecs"]) == len(encode_delta(old, new))


def test_changes_of_a_shared_block_are_marked_as_shared_out() -> None:
    feed = Feed.of(2)
    detail = version_json(feed.log, 1)
    exact = {
        t.spec.name: t.changed
        for t in inspect(feed.store.get(keys.payload_key(feed.log.read(1).payloads[0].sha256))).tensors
    }
    for cell in detail["cells"]:
        where = cell["layer"], cell["kind"]
        name = next(name for name in exact if where in ((name, name), tuple(name.rsplit(".", 1))))
        assert cell["exact"] == (exact[name] is not None)
        if exact[name] is not None:
            assert cell["changed"] == exact[name]
    # Each share is rounded.
    changed = sum(cell["changed"] for cell in detail["cells"])
    assert changed == pytest.approx(detail["manifest"]["changed"], abs=0.001 * len(detail["cells"]))


def test_the_steps_of_a_version() -> None:
    """Moves by 1, 3 and 40 units in the last place: few enough of each that the tables count them exactly."""
    feed = Feed.of(1)
    old = feed.states[0]
    new = Weights(old.layout, tuple(a.copy() for a in old.arrays))
    ordinal = next(i for i, spec in enumerate(old.layout.tensors) if spec.name == "layer.0.bias")
    bits = new.arrays[ordinal].reshape(-1)
    bits[:14] = np.arange(0x3F00, 0x3F00 + 14)
    first = Weights(old.layout, tuple(a.copy() for a in new.arrays))
    feed.delta(first)
    bits[:14] += np.array([1] * 8 + [3] * 4 + [40] * 2, bits.dtype)
    feed.delta(new)
    detail = version_json(feed.log, 2)
    assert detail["manifest"]["changed"] == 14
    (moved,) = [cell for cell in detail["cells"] if cell["changed"]]
    assert (moved["layer"], moved["kind"]) == ("layer.0", "bias")
    assert [round(number, 1) for number in moved["steps"]] == [8, 0, 4, 0, 0, 0, 2]
    assert detail["steps"] == moved["steps"]
    assert detail["cells"][0].keys() >= {"steps"}


def test_the_steps_of_many_blocks_take_a_bounded_number_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Feed.of(2, SpyStore())
    assert isinstance(feed.store, SpyStore)
    monkeypatch.setattr(index, "STEPS_BLOCKS_MAX", 0)
    feed.store.took()
    unread = version_json(feed.log, 1)
    few = len(feed.store.took())
    assert unread["steps"] == []
    assert all(cell["steps"] == [] for cell in unread["cells"])
    monkeypatch.setattr(index, "STEPS_BLOCKS_MAX", 1)
    known = version_json(feed.log, 1)
    assert len(feed.store.took()) <= few + 3
    assert 0 < sum(known["steps"]) <= known["manifest"]["changed"]
    # Each share is rounded.
    shares = [share for cell in known["cells"] for share in cell["steps"]]
    assert sum(shares) == pytest.approx(sum(known["steps"]), abs=0.001 * len(shares))


def test_an_anchor_has_no_cells_and_an_unknown_version_is_an_error() -> None:
    feed = Feed.of(1)
    assert version_json(feed.log, 0)["cells"] == []
    with pytest.raises(NotFoundError, match="version 7"):
        version_json(feed.log, 7)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "self_attn.q_proj.weight"),
        ("model.layers.3.mlp.experts.17.up_proj.weight", "mlp.experts.*.up_proj.weight"),
        ("model.embed_tokens.weight", "weight"),
        ("counter", "counter"),
        ("layers.0", "*"),
    ],
)
def test_the_kind_of_a_tensor(name: str, kind: str) -> None:
    assert kind_name(name) == kind
