"""Mutants of the native core, which is built again for each of them."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="native-change-at-the-tail-missed",
        harm="The last element of a tensor whose size is no multiple of 64 never changes on replicas.",
        path="native/scan.hpp",
        old="for (u64 i = g; i < old.count; ++i) mask |= u64{old.bits[i] != fresh[i]} << (i - g);",
        new="for (u64 i = g; i + 1 < old.count; ++i) mask |= u64{old.bits[i] != fresh[i]} << (i - g);",
        killers=("tests/property/test_kernels.py::test_every_tail",),
    ),
    Mutant(
        name="native-rounds-nan-like-a-number",
        harm="A NaN in float32 master weights is published as an infinity or as zero.",
        path="native/isa_shared.hpp",
        old="    return is_nan ? nan : static_cast<u16>(",
        new="    return is_nan && !nan ? nan : static_cast<u16>(",
        killers=("tests/property/test_kernels.py::test_rounding_is_that_of_bfloat16",),
    ),
    Mutant(
        name="native-digest-forgets-the-high-half",
        harm="Damage in the upper half of 8-byte elements has the digest of no damage.",
        path="native/digest.hpp",
        old="        add_one(index + 1, (after >> 32) - (before >> 32));\n",
        new="        add_one(index + 1, (after & before) >> 63 >> 1);\n",
        killers=("tests/property/test_kernels.py::test_any_change_of_any_runs",),
    ),
    Mutant(
        name="native-cell-offset-lost",
        harm="Changes after the first cell of a block are written to the beginning of the block.",
        path="native/detect.cpp",
        old="positions[i] += static_cast<u32>(at - start);",
        new="positions[i] += static_cast<u32>(at - at);",
        killers=("tests/property/test_kernels.py::test_detect_stops_where_enough_is_found",),
    ),
    Mutant(
        name="native-accepts-damaged-symbols",
        harm="Damaged bytes decode to other changes, and the error names the wrong cause or comes too late.",
        path="native/sequence.cpp",
        old="    if (!home) throw",
        new="    if (!home && lanes == 0) throw",
        killers=("tests/property/test_kernels.py::test_damaged_planes",),
    ),
    Mutant(
        name="native-step-off-by-one",
        harm="A step down of one unit in the last place is decoded as a step of two.",
        path="native/steps.hpp",
        old="    U magnitude = U((zigzag >> 1) + 1);\n",
        new="    U magnitude = U((zigzag >> 1) + 1 + (zigzag & 1));\n",
        killers=("tests/vectors/test_examples.py::test_steps",),
    ),
)
