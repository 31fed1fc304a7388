"""How large a delta is, in each codec and in each baseline, against the conditional entropy of the same data."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.baselines import BASELINES, Baseline, SizeOnly, self_check
from benchmarks.bits import Bits
from benchmarks.codec_plan import DENSITY, MODEL, REAL, Plan, data_sets
from benchmarks.data.pair import Pair
from benchmarks.entropy import Entropy, conditional_entropy
from benchmarks.report import Row, say
from benchmarks.sections import Section, Target, at_least, at_most
from benchmarks.states import States, anchor_file, delta_file, restores, states_of
from deltasync import blocks
from deltasync.codecs.coo import COO
from deltasync.codecs.exp import EXP
from deltasync.format.payload import Block

DENSE = "planes/1 (all weights)"
U16_GAPS = "u16 gaps + value"
GAPS_ZSTD = ("int32 gaps + value, zstd-1", "narrow gaps + value, zstd-1")
ENTROPY = "conditional entropy"
DENSE_FROM = 0.2  # changed share from which the dense form is the one to beat


@dataclass(frozen=True, slots=True)
class Sizes:
    """The bytes of one change in each form. Those of deltasync are whole files."""

    stands_for: str
    data: str
    elements: int
    entropy: Entropy
    nbytes: Mapping[str, int]
    overhead: int  # bytes of the `exp/1` file that are in no block
    block_codecs: str
    is_exact: bool

    @property
    def density(self) -> float:
        """The changed share of the elements."""
        return self.entropy.changed / self.elements

    @property
    def over_entropy(self) -> float:
        """The `exp/1` file as a multiple of the entropy."""
        return self.nbytes[EXP] / self.entropy.nbytes

    @property
    def over_dense(self) -> float:
        """The `exp/1` file as a multiple of all weights, compressed."""
        return self.nbytes[EXP] / self.nbytes[DENSE]

    def times_smaller(self, *others: str) -> float:
        """How many times smaller the `exp/1` file is than the smallest of some other forms."""
        return min(self.nbytes[other] for other in others) / self.nbytes[EXP]


def run(plan: Plan) -> Section:
    """Measure all data sets."""
    say("sizes: round trips of the baselines")
    self_check()
    found = [_measure(stands_for, pair, plan) for stands_for, pair in data_sets(plan)]
    tables: dict[str, list[Row]] = {f"sizes: {_title(sizes)}": list(_codec_rows(sizes)) for sizes in found}
    tables["sizes: exp/1 compared"] = [_summary_row(sizes) for sizes in found]
    return Section(tables=tables, targets=list(_targets(found)))


def _measure(stands_for: str, pair: Pair, plan: Plan) -> Sizes:
    say(f"sizes: {pair.name}, {pair.elements / 1e6:.0f} M elements")
    states = states_of(pair)
    found = blocks.encode_delta(states.old, states.new)
    file = delta_file(states, found)
    plain = delta_file(states, blocks.encode_delta(states.old, states.new, codec=COO))
    nbytes = {EXP: len(file), COO: len(plain), DENSE: len(anchor_file(states.new))}
    nbytes |= {baseline.name: baseline.pair_bytes(pair) for baseline in _baselines(plan)}
    codecs = Counter(block.codec for block in found)
    return Sizes(
        stands_for=stands_for,
        data=pair.name,
        elements=pair.elements,
        entropy=conditional_entropy(_block_bits(states, found), pair.kind),
        nbytes=nbytes,
        overhead=len(file) - sum(len(block.data) for block in found),
        block_codecs=", ".join(f"{count} {codec}" for codec, count in sorted(codecs.items())),
        is_exact=all(restores(states, one) for one in (file, plain)),
    )


def _baselines(plan: Plan) -> Iterator[Baseline | SizeOnly]:
    return (one for one in BASELINES if not (plan.quick and isinstance(one, SizeOnly)))


def _block_bits(states: States, found: list[Block]) -> Iterator[tuple[Bits, Bits]]:
    """Cut the states as the codec did. What is in no block has no change, and costs nothing."""
    for block in found:
        yield states.old.region(block.runs).gather(), states.new.region(block.runs).gather()


def _title(sizes: Sizes) -> str:
    return f"{sizes.data} ({sizes.elements / 1e6:.0f} M elements, {sizes.density:.3%} changed)"


def _codec_rows(sizes: Sizes) -> Iterator[Row]:
    for form, nbytes in ((ENTROPY, round(sizes.entropy.nbytes)), *sizes.nbytes.items()):
        yield {
            "codec": form,
            "bytes": nbytes,
            "bits per change": 8 * nbytes / sizes.entropy.changed,
            "times exp/1": nbytes / sizes.nbytes[EXP],
        }


def _summary_row(sizes: Sizes) -> Row:
    return {
        "data": sizes.data,
        "M": round(sizes.elements / 1e6),
        "changed %": 100 * sizes.density,
        "exp/1 bits": 8 * sizes.nbytes[EXP] / sizes.entropy.changed,
        "entropy bits": sizes.entropy.total,
        "of it change": sizes.entropy.change,
        "of it step": sizes.entropy.step,
        "exp/1 / entropy": sizes.over_entropy,
        "u16 gaps / exp/1": sizes.times_smaller(U16_GAPS),
        "gaps + zstd / exp/1": sizes.times_smaller(*GAPS_ZSTD),
        "exp/1 / dense": sizes.over_dense,
        "blocks": sizes.block_codecs,
        "overhead, bytes": sizes.overhead,
        "exact": sizes.is_exact,
    }


def _targets(found: list[Sizes]) -> Iterator[Target]:
    """Compare with what was promised; of several data sets the worst counts."""
    for stands_for in (REAL, MODEL):
        if group := [sizes for sizes in found if sizes.stands_for == stands_for]:
            yield at_most(f"exp/1 file / conditional entropy, {stands_for}", max(s.over_entropy for s in group), 1.04)
            smaller = min(s.times_smaller(U16_GAPS) for s in group)
            yield at_least(f"u16 gaps + bf16 / exp/1, {stands_for}", smaller, 4)
            smaller = min(s.times_smaller(*GAPS_ZSTD) for s in group)
            yield at_least(f"gaps + bf16 + zstd-1 / exp/1, {stands_for}", smaller, 3)
    for sizes in found:
        if sizes.stands_for == DENSITY and sizes.density > DENSE_FROM:
            yield at_most(f"exp/1 file / dense compressed, {sizes.density:.0%} changed", sizes.over_dense, 1.005)
    failed = sum(not sizes.is_exact for sizes in found)
    yield at_most("data sets whose round trip is not exact (exp/1 and coo/1)", failed, 0)
