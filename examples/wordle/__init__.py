"""A policy that learns Wordle by GRPO, and the replicas that play for it."""
