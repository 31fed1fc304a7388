"""The layout of a model: its order and identity, what it refuses, and what it says about another one."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltasync.errors import FormatError, MismatchError
from deltasync.format import limits
from deltasync.format.layout import DTYPES, Layout, TensorSpec, dtype_of

BF16 = DTYPES["BF16"]
LAYOUT = Layout.of([TensorSpec("b", BF16, ()), TensorSpec("ä", DTYPES["F32"], (0, 3)), TensorSpec("a", BF16, (2, 2))])


def test_tensors_are_in_the_order_of_their_names() -> None:
    assert [spec.name for spec in LAYOUT.tensors] == ["a", "b", "ä"]
    assert LAYOUT.ordinals == {"a": 0, "b": 1, "ä": 2}
    assert (LAYOUT.elements, LAYOUT.nbytes) == (5, 10)


def test_a_layout_comes_back_from_json() -> None:
    assert Layout.from_json(LAYOUT.to_json()) == LAYOUT
    assert Layout.from_json([]) == Layout.of([])


def test_name_type_shape_and_number_of_tensors_are_its_identity() -> None:
    one = TensorSpec("a", BF16, (6,))
    others = ((one, TensorSpec("b", BF16, ())), (TensorSpec("b", BF16, (6,)),), (TensorSpec("a", DTYPES["F16"], (6,)),))
    layouts = [Layout.of(specs) for specs in (LAYOUT.tensors, (), (one,), (TensorSpec("a", BF16, (2, 3)),), *others)]
    assert len({layout.sha256 for layout in layouts}) == len(layouts)
    assert Layout.of(reversed(LAYOUT.tensors)).sha256 == LAYOUT.sha256


REFUSED: dict[str, tuple[list[tuple[str, tuple[int, ...]]], str]] = {
    "no name": ([("", (1,))], "layout.name"),
    "a long name": ([("ä" * (limits.NAME_BYTES_MAX // 2) + "a", (1,))], "layout.name"),
    "dimensions": ([("a", (1,) * (limits.DIMENSIONS_MAX + 1))], "layout.dimensions"),
    "elements": ([("a", (limits.ELEMENTS_MAX, 2))], "layout.elements"),
    "a dimension of a tensor without elements": ([("a", (limits.ELEMENTS_MAX + 1, 0))], "layout.elements"),
    "twice": ([("a", (1,)), ("b", (1,)), ("a", (2,))], "layout.duplicate"),
    "many": ([(f"{number}", ()) for number in range(6)], "layout.count"),
}


@pytest.mark.parametrize(("tensors", "rule"), REFUSED.values(), ids=REFUSED.keys())
def test_tensors_outside_the_limits_are_refused(
    monkeypatch: pytest.MonkeyPatch, tensors: list[tuple[str, tuple[int, ...]]], rule: str
) -> None:
    monkeypatch.setattr(limits, "TENSORS_MAX", 5)
    specs = [TensorSpec(name, BF16, shape) for name, shape in tensors]
    with pytest.raises(FormatError) as caught:
        Layout.of(specs)
    assert caught.value.rule == rule


def test_tensors_at_the_limits_are_accepted() -> None:
    name = "a" * limits.NAME_BYTES_MAX
    shape = (limits.ELEMENTS_MAX, *[1] * (limits.DIMENSIONS_MAX - 1))
    assert Layout.of([TensorSpec(name, BF16, shape)]).elements == limits.ELEMENTS_MAX


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ({}, "layout.type"),
        ([["a", "BF16"]], "layout.entry"),
        ([["a", "BF16", [True]]], "layout.entry"),
        ([["a", "BF16", [-1]]], "layout.entry"),
        ([["a", "BF16", [1.0]]], "layout.entry"),
        ([[1, "BF16", []]], "layout.entry"),
        ([["a", "F4", []]], "dtype"),
        ([["b", "BF16", []], ["a", "BF16", []]], "layout.order"),
    ],
)
def test_json_that_is_no_layout(value: Any, rule: str) -> None:
    with pytest.raises(FormatError) as caught:
        Layout.from_json(value)
    assert caught.value.rule == rule


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([("a", (2, 2))], "tensor 'b' differs: b: BF16[] in this one but not in that one"),
        ([("a", (4,)), ("b", ())], "tensor 'a' differs: a: BF16[2, 2] in this one but a: BF16[4] in that one"),
        ([("a", (2, 2)), ("aa", ()), ("b", ())], "tensor 'aa' differs: not in this one but aa: BF16[] in that one"),
    ],
)
def test_the_first_tensor_that_differs_is_named(other: list[tuple[str, tuple[int, ...]]], message: str) -> None:
    ours = Layout.of([TensorSpec("a", BF16, (2, 2)), TensorSpec("b", BF16, ())])
    ours.require_equal(Layout.of(reversed(ours.tensors)), ours="this one", theirs="that one")
    theirs = Layout.of([TensorSpec(name, BF16, shape) for name, shape in other])
    with pytest.raises(MismatchError) as caught:
        ours.require_equal(theirs, ours="this one", theirs="that one")
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("numpy_type", "name"),
    [
        (ml_dtypes.bfloat16, "BF16"),
        (ml_dtypes.float8_e8m0fnu, "F8_E8M0"),
        (np.float64, "F64"),
        (np.bool_, "BOOL"),
        (np.uint16, "U16"),
    ],
)
def test_types_of_numpy(numpy_type: Any, name: str) -> None:
    assert dtype_of(np.zeros(1, numpy_type)).name == name


@pytest.mark.parametrize("numpy_type", [np.complex64, "S4", object, ml_dtypes.float8_e4m3b11fnuz])
def test_types_of_numpy_that_are_refused(numpy_type: Any) -> None:
    with pytest.raises(FormatError) as caught:
        dtype_of(np.zeros(1, numpy_type))
    assert caught.value.rule == "dtype"
