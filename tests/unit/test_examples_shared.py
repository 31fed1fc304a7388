"""What the examples share, and the projection of the README."""

import pytest
import torch
from shared import published, ratio_text, same_bits

from benchmarks.projection import Measured, measured_steps
from deltasync import PublishEvent

ZEROS = torch.zeros(4)
NAN = torch.full((4,), torch.nan)


@pytest.mark.parametrize(
    ("found", "wanted", "is_same"),
    [
        ({"a": ZEROS}, {"a": ZEROS.clone()}, True),
        ({"a": NAN}, {"a": NAN.clone()}, True),
        ({"a": ZEROS}, {"a": -ZEROS}, False),
        ({"a": ZEROS}, {"a": ZEROS.bfloat16()}, False),
        ({"a": ZEROS}, {"b": ZEROS}, False),
        ({"a": ZEROS, "b": ZEROS}, {"a": ZEROS}, False),
        ({"a": torch.tensor(1.0)}, {"a": torch.tensor(1.0)}, True),
        ({"a": torch.ones(2, 3).T}, {"a": torch.ones(3, 2)}, True),
    ],
)
def test_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], is_same: bool) -> None:
    assert same_bits(found, wanted) == is_same


def test_published() -> None:
    assert {tensor.dtype for tensor in published(torch.nn.Linear(2, 2)).values()} == {torch.bfloat16}


def test_ratio_counts_deltas_only() -> None:
    times = {"held_s": 0.0, "encode_s": 0.0, "put_s": 0.0, "commit_s": 0.0, "coalesced": 0, "retries": 0}
    anchor = PublishEvent("anchor", 0, 0, 1000, None, 1500, **times)  # type: ignore[arg-type]
    delta = PublishEvent("delta", 1, 1, 1000, 10, 20, **times)  # type: ignore[arg-type]
    assert ratio_text([anchor, delta, delta]) == "2 deltas: 40 bytes instead of 4,000, 100.0 times less"
    assert ratio_text([anchor]) == "0 deltas: 0 bytes instead of 0, 0.0 times less"


def test_uploads_count_the_first_version_and_the_anchors_on_the_way() -> None:
    step = Measured("", density=0.01, bits=8.0, anchor_share=0.5)
    assert step.delta_factor == pytest.approx(200)
    # An anchor is as large as 100 deltas.
    assert step.upload_factor(50) == pytest.approx(51 / (0.5 + 50 / 200))
    assert step.upload_factor(100) == pytest.approx(101 / (0.5 + 0.5 + 0.5))
    assert step.upload_factor(10_000) == pytest.approx(100, rel=0.02)


def test_steps_were_measured() -> None:
    found = measured_steps()
    assert [round(100 * step.density, 2) for step in found] == [0.2, 0.52, 1.0]
    assert all(0.6 < step.anchor_share < 0.7 for step in found)
