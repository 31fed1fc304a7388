"""Fuzzing of everything that reads bytes of others: `python -m fuzz` runs all targets."""
