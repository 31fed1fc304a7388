"""The replica's side without any engine: follow a feed, prove it, hand it to a target."""
