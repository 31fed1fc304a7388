"""The demo, `make demo`: a small policy learns Wordle, and its replicas follow every step through a feed."""
