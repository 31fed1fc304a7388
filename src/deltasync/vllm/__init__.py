"""A plugin for vLLM: a server that follows a feed.

The modules belong to processes of vLLM. Every process loads `plugin` and `guard`, which acts in the engine core and in
the API server. The workers run `engine`, `worker` and what these need to find each element: `twins`, `probes`,
`memory`, `copies`. The API server runs `server`, with `replica`, `target` and `adapters` for what follows a feed, and
`routes`, `admission`, `labels` and `caches` for requests. It hands changes to the workers in files of `stage`. A
trainer's process runs `trainer`. `releases` knows what differs between the releases of vLLM.
"""
