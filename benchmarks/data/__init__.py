"""Weights to measure on: real steps of a small language model, and synthetic ones of any size and density."""
