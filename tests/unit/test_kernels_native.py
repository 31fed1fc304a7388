"""The binding of the native kernels: what it holds, what it refuses, and the constants that both sides share."""

import sys
import weakref

import numpy as np
import pytest
from support import processes

native = pytest.importorskip("deltasync.kernels.native", exc_type=ImportError)

from deltasync.format.layout import DTYPES  # noqa: E402
from deltasync.kernels import _native  # noqa: E402

KIND = _native.Kind(2, DTYPES["BF16"].exponent_shift, DTYPES["BF16"].exponent_mask)
RUNS = np.array([[0, 0, 100]], np.int64)
KEYS = np.array([[1, 2, 0]], np.uint64)
ISA = _native.instruction_sets()[0]


def array() -> np.ndarray:
    return np.arange(100, dtype=np.uint16)


@pytest.mark.parametrize("writable", [False, True])
def test_a_region_holds_its_arrays(writable: bool) -> None:
    bits = array()
    alive = weakref.ref(bits)
    region = _native.WritableRegion(KIND, (bits,), RUNS) if writable else _native.Region(KIND, (bits,), RUNS, KEYS)
    del bits
    assert alive() is not None
    del region
    assert alive() is None


def test_a_writable_region_refuses_read_only_arrays() -> None:
    bits = array()
    bits.flags.writeable = False
    _native.Region(KIND, (bits,), RUNS, KEYS)
    with pytest.raises(ValueError, match="writable"):
        _native.WritableRegion(KIND, (bits,), RUNS)


def test_a_readable_region_cannot_be_overwritten() -> None:
    bits = array()
    changes = np.array([3], np.uint32), np.array([7], np.uint16)
    with pytest.raises(TypeError):
        _native.overwrite(_native.Region(KIND, (bits,), RUNS, KEYS), *changes)  # type: ignore[arg-type]
    assert (bits == array()).all()
    _native.overwrite(_native.WritableRegion(KIND, (bits,), RUNS), *changes)
    assert bits[3] == 7


@pytest.mark.parametrize("wrong", [np.zeros(200, np.uint16)[::2], np.zeros((10, 10), np.uint16)], ids=["gaps", "2-D"])
def test_arrays_are_never_copied(wrong: np.ndarray) -> None:
    """What is written to a copy would be lost."""
    with pytest.raises(ValueError, match="contiguous"):
        _native.Region(KIND, (wrong,), RUNS, KEYS)
    with pytest.raises(ValueError, match="contiguous"):
        _native.WritableRegion(KIND, (wrong,), RUNS)


@pytest.mark.parametrize(
    ("bits", "runs", "message"),
    [
        (np.zeros(100, np.uint32), RUNS, "wide"),
        (np.zeros(201, np.uint8)[1:].view(np.uint16), RUNS, "aligned"),
        (np.zeros(99, np.uint16), RUNS, "inside"),
        (np.zeros(100, np.uint16), np.array([[1, 0, 1]]), "name an array"),
        (np.zeros(100, np.uint16), np.array([[0, -1, 1]]), "name an array"),
        (np.zeros(100, np.uint16), np.array([[0, 101, 0]]), "inside"),
    ],
    ids=["width", "alignment", "length", "array", "negative", "offset"],
)
def test_wrong_regions_are_refused(bits: np.ndarray, runs: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _native.Region(KIND, (bits,), runs, KEYS)
    with pytest.raises(ValueError, match=message):
        _native.WritableRegion(KIND, (bits,), runs)


def test_regions_of_different_widths_are_not_compared() -> None:
    narrow = _native.Region(KIND, (array(),), RUNS, KEYS)
    wide = _native.Region(_native.Kind(4, 23, 0xFF), (array().astype(np.uint32),), RUNS, KEYS)
    for kernel in (_native.detect, _native.encode_difference):
        with pytest.raises(ValueError, match="width"):
            kernel(ISA, narrow, wide, 0, 10, 10)
    with pytest.raises(ValueError, match="width"):
        _native.detect_rounded(ISA, wide, narrow, 0, 10, 10, 0)


@pytest.mark.parametrize("name", native.CONSTANTS)
def test_a_wrong_constant_is_noticed(name: str) -> None:
    built = dict(_native.CONSTANTS)
    native.require_same_constants(built)
    built[name] += 1
    with pytest.raises(RuntimeError, match=f"{name} is {built[name]} and must be {built[name] - 1}"):
        native.require_same_constants(built)


def test_constants_of_one_side_only_are_noticed() -> None:
    with pytest.raises(RuntimeError, match="columns is missing and must be 1024"):
        native.require_same_constants({n: v for n, v in _native.CONSTANTS.items() if n != "columns"})
    with pytest.raises(RuntimeError, match="rows is 3 and must be absent"):
        native.require_same_constants({**_native.CONSTANTS, "rows": 3})


def test_kernels_with_other_constants_do_not_load() -> None:
    """A build that does not fit is an error, not a reason to fall back to NumPy."""
    program = (
        "from deltasync.kernels import _native, available; _native.CONSTANTS['classes_max'] = 15; print(available())"
    )
    done = processes.run([sys.executable, "-c", program])
    assert done.returncode != 0
    assert "classes_max is 15 and must be 16" in done.stderr
    assert "Reinstall deltasync" in done.stderr
