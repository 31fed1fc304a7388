"""A soak of the whole system: real processes and a real S3 server, under faults that a seed chooses."""
