"""Whether a round trip is exact: every element type, odd shapes, no and all changes, signed zeros, NaN payloads."""

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.codec_plan import Plan
from benchmarks.report import say
from benchmarks.sections import Section, at_most
from deltasync import apply, diff
from deltasync.codecs.coo import COO
from deltasync.codecs.exp import EXP

FLOATS = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool", "float8_e8m0fnu")
SHAPE = (300, 1000)

State = Mapping[str, NDArray[np.generic]]
Case = tuple[str, State, State]


def run(plan: Plan) -> Section:
    """Take every case through both codecs."""
    del plan
    say("exact: round trips of every type")
    cases = list(_cases())
    codecs = (EXP, COO)
    failed = [f"{name}, {codec}" for name, old, new in cases for codec in codecs if not _is_exact(old, new, codec)]
    for name in failed:
        say(f"exact: NOT restored: {name}")
    claim = f"special cases not restored exactly, of {len(cases) * len(codecs)}"
    return Section(targets=[at_most(claim, len(failed), 0)])


def _is_exact(old: State, new: State, codec: str) -> bool:
    restored = apply(old, diff(old, new, codec=codec))
    return restored.keys() == new.keys() and all(
        restored[name].dtype == array.dtype
        and restored[name].shape == array.shape
        and restored[name].tobytes() == array.tobytes()
        for name, array in new.items()
    )


def _cases() -> Iterator[Case]:
    random = np.random.default_rng(0)
    for type_name in (*FLOATS, *INTEGERS):
        dtype = np.dtype(getattr(ml_dtypes, type_name, None) or type_name)
        old = _random(dtype, random)
        for label, density in (("no change", 0.0), ("few changes", 0.01), ("many", 0.5), ("all changed", 1.0)):
            yield f"{type_name}, {label}", old, _moved(old, density, random)
        if type_name in FLOATS:
            yield f"{type_name}, special values", *_special(dtype)


def _random(dtype: np.dtype[np.generic], random: np.random.Generator) -> State:
    """A matrix, a scalar and an empty tensor of any bits that the type can hold."""
    top = 2 if dtype == np.bool_ else 256

    def tensor(shape: tuple[int, ...]) -> NDArray[np.generic]:
        count = int(np.prod(shape)) * dtype.itemsize
        return random.integers(0, top, count, np.uint8).view(dtype).reshape(shape)

    return {"matrix": tensor(SHAPE), "scalar": tensor(()), "empty": tensor((0, 4)), "row": tensor((1, 7))}


def _moved(old: State, density: float, random: np.random.Generator) -> State:
    """Flip the lowest bit of some elements."""
    new = {}
    for name, array in old.items():
        chosen = random.random(array.size) < density
        raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize).copy()
        raw[chosen, 0] ^= 1
        new[name] = raw.reshape(-1).view(array.dtype).reshape(array.shape)
    return new


def _special(dtype: np.dtype[np.generic]) -> tuple[State, State]:
    """Zeros that change sign, NaN that change payload, NaN that stay, and the ends of the order of the bits."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    ones = np.iinfo(unsigned).max
    sign = 1 << (8 * dtype.itemsize - 1)
    bits = np.array([0, sign, sign - 1, ones, sign - 2, ones - 1, 0, ones, sign - 1], unsigned)
    moved = np.array([sign, 0, sign - 2, ones - 1, sign - 1, ones, ones, 0, sign - 1], unsigned)
    return {"special": bits.view(dtype)}, {"special": moved.view(dtype)}
