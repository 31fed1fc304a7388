"""From the weights of a running trainer to versions of a feed, behind its back."""
