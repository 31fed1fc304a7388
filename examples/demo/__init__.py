"""The demo, `make demo`: real steps of SmolLM2-135M, then a small policy that learns Wordle, both through feeds."""
