"""The trainer's side: weights of torch models become versions of a feed."""
