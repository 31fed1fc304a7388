"""For users' own tests: does a store keep its promises, and what happens when it fails. Needs pytest."""

from deltasync.testing.conformance import StoreConformance
from deltasync.testing.faulty import Crash, Fault, FaultyStore, Operation, at, at_random, never

__all__ = ["Crash", "Fault", "FaultyStore", "Operation", "StoreConformance", "at", "at_random", "never"]
