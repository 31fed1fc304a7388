"""Read and maintain a feed."""
