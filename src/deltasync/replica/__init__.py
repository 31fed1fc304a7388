"""Take versions: follow a feed, prove it, and hand it to a target. No torch."""
