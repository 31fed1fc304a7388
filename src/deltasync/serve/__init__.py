"""Targets: what a replica serves its weights from."""
