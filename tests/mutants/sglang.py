"""Mutants of what writes into the workers of SGLang. Their killers run without SGLang."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        name="sglang-without-read-back",
        harm="Weights in a worker that are not those of the version get its name.",
        path="src/deltasync/sglang/loader.py",
        old="        if not torch.equal(bits[places], values):\n",
        new="        if bits is None:\n",
        killers=("tests/unit/test_sglang_loader.py::test_bits_that_are_not_those_written_are_damage",),
    ),
    Mutant(
        name="sglang-map-without-proof",
        harm="Changes are written into weights that SGLang has packed, and it answers nonsense.",
        path="src/deltasync/sglang/loader.py",
        old="    _require_equal(live, weights)\n    live.version",
        new="    live.version",
        killers=("tests/unit/test_sglang_loader.py::test_weights_in_another_form_than_the_checkpoint_are_refused",),
    ),
    Mutant(
        name="sglang-tensor-without-a-place",
        harm="A tensor that no worker holds is never updated, and nothing says so.",
        path="src/deltasync/sglang/in_place.py",
        old="            if not is_covered(spec.elements, [rank.get(spec.name, []) for rank in ranks]):\n",
        new="            if spec.elements < 0:\n",
        killers=("tests/unit/test_sglang_loader.py::test_what_cannot_be_mapped_is_refused_by_name_at_the_start",),
    ),
    Mutant(
        name="sglang-changes-of-another-version",
        harm="Changes are written over a version that they do not lead from.",
        path="src/deltasync/sglang/loader.py",
        old="    if live.version is None or live.version != request.start:\n",
        new="    if live.layout is None:\n",
        killers=(
            "tests/unit/test_sglang_loader.py::test_changes_that_do_not_fit_are_refused_before_anything_is_written",
        ),
    ),
)
