"""The records of mutants still fit the code and the tests. `make mutants` runs them."""

from collections import Counter
from dataclasses import replace

import pytest
from mutants import MUTANTS, ROOMS
from mutants.mutant import Mutant
from mutants.sandbox import ROOT

PLAIN = Mutant(
    name="plain",
    harm="None: it is an example.",
    path="src/deltasync/errors.py",
    old="import copy\n",
    new="import copy as copy\n",
    killers=("tests/unit/test_mutant_records.py::test_names_are_unique",),
)


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_mutant_applies_and_its_killers_exist(mutant: Mutant) -> None:
    mutant.applied_to((ROOT / mutant.path).read_text())
    assert mutant.killers
    assert mutant.missing_killers(ROOT) == []


def test_names_are_unique() -> None:
    names = Counter(mutant.name for room in ROOMS for mutant in room.MUTANTS)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (replace(PLAIN, old="import nothing\n"), "0 times"),
        (replace(PLAIN, old="import "), "3 times"),
        (replace(PLAIN, new=PLAIN.old), "the old one"),
        (replace(PLAIN, new="import\n"), "not Python"),
    ],
)
def test_a_record_that_does_not_fit(mutant: Mutant, message: str) -> None:
    text = (ROOT / PLAIN.path).read_text()
    assert PLAIN.applied_to(text) != text
    with pytest.raises(ValueError, match=message):
        mutant.applied_to(text)


@pytest.mark.parametrize(
    "killer",
    [
        "tests/unit/test_nothing.py::test_x",
        "tests/unit/test_mutant_records.py::test_x",
        "tests/unit/test_mutant_records.py",
    ],
)
def test_a_killer_that_is_no_test(killer: str) -> None:
    assert PLAIN.missing_killers(ROOT) == []
    assert replace(PLAIN, killers=(killer,)).missing_killers(ROOT) == [killer]
    assert replace(PLAIN, killers=(f"{PLAIN.killers[0]}[0]",)).missing_killers(ROOT) == []
