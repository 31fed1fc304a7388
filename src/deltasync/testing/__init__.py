"""For tests of your own stores and of code that uses them: a conformance suite and a store that fails. Needs pytest."""

from deltasync.testing.conformance import StoreConformance
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at, at_random, never

__all__ = ["Crash", "Fault", "FaultyStore", "Operation", "StoreConformance", "at", "at_random", "never"]
