"""A plugin for vLLM: a server that follows a feed.

The modules belong to processes of vLLM. Every process loads `plugin` and `ownership`, which acts in the engine core and
in the API server. The workers run `engine` and `worker`, which find each element with `twins` and `deltasync.engines`.
The API server runs `server`, with `replica`, `target` and `adapters` for what follows a feed, and `routes`,
`admission`, `labels` and `caches` for requests. It hands changes to the workers in files of `engines.stage`. A
trainer's process runs `trainer`. `bootstrap` prepares a server without a checkpoint. `releases` knows what differs
between the releases of vLLM.
"""
