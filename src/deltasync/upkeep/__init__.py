"""Look after a feed: verify it, prune it, write skips, copy it."""
