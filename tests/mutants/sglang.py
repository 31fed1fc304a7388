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
        killers=("tests/unit/test_sglang_loader.py::test_a_worker_compares_what_it_maps",),
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
    Mutant(
        name="sglang-goes-on-half-written",
        harm="A server with weights that are written in part answers with them, under the name of the old version.",
        path="src/deltasync/sglang/target.py",
        old='            if self._held == "torn":\n                logger.error(',
        new="            if self._held is None:\n                logger.error(",
        killers=(
            "tests/unit/test_sglang_loader.py::test_a_server_whose_weights_are_written_in_part_generates_nothing",
        ),
    ),
    Mutant(
        name="sglang-failed-load-keeps-its-name",
        harm="A server that has loaded a version, and then failed, calls it by the name of the old one.",
        path="src/deltasync/sglang/target.py",
        old='                if self._held == "unknown":\n                    self._server.name_weights(UNKNOWN)\n',
        new='                if self._held == "unknown":\n',
        killers=("tests/unit/test_sglang_target.py::test_a_server_that_fails_is_reported_and_generates_on",),
    ),
    Mutant(
        name="sglang-changes-over-other-weights",
        harm="Changes are written over weights that something else has put into the server.",
        path="src/deltasync/sglang/target.py",
        old="        if label != str(staged.start):\n",
        new="        if label is None:\n",
        killers=("tests/unit/test_sglang_in_place.py::test_a_server_that_has_other_weights_loads_the_folder",),
    ),
    Mutant(
        name="sglang-tracing-keeps-what-it-registers",
        harm="A loader that registers a parameter anew leaves a model without its weights, only because it was traced.",
        path="src/deltasync/sglang/loader.py",
        old="                held.clear()\n                held.update(items)\n",
        new="                pass\n",
        killers=("tests/unit/test_sglang_loader.py::test_tracing_leaves_the_model_as_it_was",),
    ),
)
