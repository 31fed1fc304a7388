"""Make versions: from the weights of a running trainer to a feed. No torch."""
