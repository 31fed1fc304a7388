"""Mutants: deliberate faults in our own code, each with the tests that must notice it.

`python -m mutants` applies them one by one to a copy of the source tree and runs their killers there. To add one, add a
record to the file of its room; where no test kills it, write that test.
"""

from . import feed, native, replica, sglang, trainer, ui, vllm
from .mutant import Mutant

ROOMS = (feed, trainer, replica, vllm, sglang, ui, native)

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for room in ROOMS for mutant in room.MUTANTS}
"""All mutants by name."""
