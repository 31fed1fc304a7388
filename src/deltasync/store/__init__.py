"""Where a feed lives: objects under keys, in a folder, in memory, or in a bucket."""
