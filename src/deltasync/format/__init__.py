"""The file format of docs/format.md: what is written, and what is refused. Needs NumPy and nothing else."""
