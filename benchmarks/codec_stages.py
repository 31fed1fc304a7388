"""The stages that are timed: each a function of the number of threads, on data that is there before the clock runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.data.pair import Pair
from benchmarks.report import say
from benchmarks.states import States, anchor_blocks, copy_of, last_tensors, restore, states_of
from deltasync import blocks
from deltasync.blocks import detect, layout_runs, overwrite
from deltasync.codecs import coo, exp
from deltasync.format.payload import Block
from deltasync.format.weights import Changes, Weights
from deltasync.parallel import each

DETECT_ENCODE = "detect + encode"
DECODE_APPLY = "decode all, then apply in place"
DECODE_INTO = "decode + apply block by block, to a copy"
TORCH = "torch.ne + nonzero + zstd-1"
ANCHOR_BYTES = 150_000_000  # of weights that the stages of an anchor pass over: they take long

Group = tuple[str, list["Stage"]]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: it passes over a model of `nbytes`, and has to read at least `arrays` of that size."""

    name: str
    run: Callable[[int], object]
    nbytes: int
    arrays: int = 1
    prepare: Callable[[], object] | None = None


def groups(pair: Pair) -> Iterator[Group]:
    """Yield the stages in groups that are timed together; what a group holds is dropped before the next."""
    states = states_of(pair)
    yield "detect and encode", [*_encode_stages(states), *_torch_stage(pair)]
    yield "decode and apply", _decode_stages(states)
    yield "coo/1", _coo_stages(states)
    yield "digest and anchor", [_digest_stage(states.old), *_anchor_stages(states.new)]


def _encode_stages(states: States) -> list[Stage]:
    old, new = states.old, states.new
    pieces = layout_runs(old.layout)
    found = [changes for piece in pieces for changes in detect(old, new, piece)]
    nbytes = old.layout.nbytes
    return [
        Stage("detect", lambda n: list(each(lambda p: list(detect(old, new, p)), pieces)), nbytes, 2),
        Stage("encode", lambda n: list(each(lambda c: exp.encode(old, c), found)), nbytes),
        Stage(DETECT_ENCODE, lambda n: blocks.encode_delta(old, new), nbytes, 2),
    ]


def _torch_stage(pair: Pair) -> list[Stage]:
    try:
        from benchmarks.torch_baseline import encode_pair
    except ModuleNotFoundError as error:
        say(f"speed: {TORCH} is left out: the package {error.name} is missing")
        return []
    return [Stage(TORCH, lambda n: encode_pair(pair, threads=n), pair.nbytes, 2)]


def _decode_stages(states: States) -> list[Stage]:
    old = states.old
    delta = blocks.encode_delta(old, states.new)
    found = list(blocks.decode(old, delta))
    target = copy_of(old)
    nbytes = old.layout.nbytes
    reset = partial(restore, target, old)
    return [
        Stage("decode", lambda n: list(blocks.decode(old, delta)), nbytes),
        Stage("apply", lambda n: _overwrite_all(target, found), nbytes, prepare=reset),
        Stage(DECODE_APPLY, lambda n: _decode_then_apply(target, delta), nbytes, prepare=reset),
        Stage(DECODE_INTO, lambda n: blocks.decode_into(target, old, delta), nbytes, prepare=reset),
    ]


def _coo_stages(states: States) -> list[Stage]:
    old, new = states.old, states.new
    delta = blocks.encode_delta(old, new, codec=coo.COO)
    target = copy_of(old)
    nbytes = old.layout.nbytes
    return [
        Stage(
            "coo/1 detect + encode",
            lambda n: blocks.encode_delta(old, new, codec=coo.COO),
            nbytes,
            2,
        ),
        Stage(
            "coo/1 decode all, then apply in place",
            lambda n: _decode_then_apply(target, delta),
            nbytes,
            prepare=partial(restore, target, old),
        ),
    ]


def _digest_stage(weights: Weights) -> Stage:
    return Stage("state digest", lambda n: blocks.digest(weights), weights.layout.nbytes)


def _anchor_stages(weights: Weights) -> list[Stage]:
    part = last_tensors(weights, nbytes=ANCHOR_BYTES)
    anchor = anchor_blocks(part)
    nbytes = part.layout.nbytes
    label = f"(on {nbytes / 1e6:.0f} MB)"
    return [
        Stage(f"planes/1 anchor encode {label}", lambda n: anchor_blocks(part), nbytes),
        Stage(
            f"planes/1 anchor decode {label}",
            lambda n: list(blocks.decode(part, anchor, relative=False)),
            nbytes,
        ),
    ]


def _overwrite_all(target: Weights, found: list[Changes]) -> None:
    for _ in each(lambda changes: overwrite(target, changes), found):
        pass


def _decode_then_apply(target: Weights, delta: list[Block]) -> None:
    """Do what a replica does: nothing is written before everything is decoded and verified."""
    _overwrite_all(target, list(blocks.decode(target, delta)))
