"""Benchmarks of deltasync: one module per measurement, run from the root of the repository."""
