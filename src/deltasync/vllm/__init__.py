"""A plugin for vLLM: a server that follows a feed.

The modules belong to processes of vLLM. Every process loads `plugin` and `core`, which acts in the engine core and in
the API server. The workers run `engine` and `worker`, which finds each element with `deltasync.engines`. The API server
runs `server`, with `target` for what follows a feed, and `routes` and `labels` for requests. It hands
changes to the workers in stages (`engines.memory`). A trainer's process runs `trainer`. `bootstrap` prepares a
server without a checkpoint. `releases` knows what differs between the releases of vLLM.
"""
