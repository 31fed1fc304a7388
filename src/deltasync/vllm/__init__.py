"""A plugin for vLLM: a server that follows a feed.

The modules belong to processes of vLLM. Every process loads `plugin`. The workers run `engine`, `worker` and `tracing`.
The API server runs `server`, `target`, `labels` and `settings`, and hands changes to the workers in files of `stage`.
"""
