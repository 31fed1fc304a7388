"""deltasync as a plugin of vLLM: a server that follows a feed by itself."""
