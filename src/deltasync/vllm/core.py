"""What the plugin changes in vLLM's engine core and in the client of it: who may write weights, and which KV is reused.

**Ownership.** vLLM can reload weights, discard them in its sleep, or take them through its weight transfer while a
server follows a feed. The label would then name a version whose weights are no longer there, and the next version would
be applied to other weights. Such calls are refused with what to do instead, before they change anything.

A function of the user that runs inside a worker (`apply_model`) cannot be judged: it may only read.

**`DELTASYNC_CACHE=keep`.** Requests in flight keep their KV over a switch, and no later request reuses it. vLLM finds a
block of its prefix cache by a hash of the tokens up to it and of the request's salt. Every request gets a salt of ours
before its own one, and every switch draws a new one. A request has the current salt only if all its KV was computed
since the last switch:

- A request that arrives after a switch has the new salt.
- A request that holds no KV at the switch gets the new salt, and one that has no token yet is started again.
- A request that has tokens goes on with its KV and its old salt, with which no later request looks for blocks.

So a block with the current salt was computed with the current weights, and an answer of one version is one that a fresh
server of this version would give.
"""

import inspect
import secrets
import time
from functools import wraps
from typing import Any

from deltasync.errors import InvalidInputError
from deltasync.vllm.labels import Labels
from deltasync.vllm.plugin import is_used
from deltasync.vllm.releases import waiting_requests

CALL = "deltasync"
"""The method of vLLM's workers by which a server writes and compares weights."""

_OWNER = "deltasync_owner"
"""The attribute of an engine core whose weights come from a feed: a server follows it, or a program updates them."""
_SERVER, _PROGRAM = "server", "program"
_WRITES = frozenset({"load_model", "reload_weights", "reset_weights", "sleep"})
"""Methods of vLLM's workers that replace or discard weights."""
_PROTOCOL = frozenset({"init_weight_transfer_engine", "start_weight_update", "update_weights"})
"""Methods of vLLM's workers by which a program updates weights."""
_DISCARDING_LEVEL = 2
"""The level of sleep that does not keep the weights."""
_HINTS = {
    _SERVER: "move the server with POST /deltasync/advance, and repair its weights with POST /deltasync/scrub",
    _PROGRAM: "update the weights with `update_weights` and a version; a sleep of level 1 keeps them",
}


def install(engine_core: Any) -> None:
    """In the process of the engine core: check the calls of its class that reach weights, and add `renew_salt`."""
    setattr(engine_core, RENEW, renew_salt)
    call, sleep = engine_core.collective_rpc, engine_core.sleep

    @wraps(call)
    def checked_call(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_used(core.vllm_config):
            return call(core, method, *args, **kwargs)
        if method == CALL:
            if core.model_executor.is_sleeping:
                raise InvalidInputError("the engine is asleep, and has no weights in memory", hint="wake it up")
            setattr(core, _OWNER, _SERVER)
        elif method in _WRITES or (method in _PROTOCOL and getattr(core, _OWNER, None) == _SERVER):
            _require_unowned(core, f"{method!r:.80}")
        elif method == "update_weights":
            # Already before the call: one that fails may have written something.
            setattr(core, _OWNER, _PROGRAM)
        return call(core, method, *args, **kwargs)

    @wraps(sleep)
    def checked_sleep(core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= _DISCARDING_LEVEL:
            _require_unowned(core, f"a sleep of level {level}")
        return sleep(core, level, *args, **kwargs)

    engine_core.collective_rpc, engine_core.sleep = checked_call, checked_sleep


def _require_unowned(core: Any, what: str) -> None:
    owner = getattr(core, _OWNER, None)
    if owner is not None:
        raise InvalidInputError(
            f"{what} is refused: the weights of this engine come from a feed, and their version would no longer be "
            "known",
            hint=_HINTS[owner],
        )


def own_client(client: Any, labels: Labels) -> None:
    """In an API server that follows a feed: keep others from setting the label, and from resuming during a switch.

    A switch whose write has failed leaves the engine paused, with weights of two versions, until it is repeated.
    """
    sleep, wake_up, resume = client.sleep, client.wake_up, client.resume_generation
    is_asleep = False

    def require_no_switch(what: str) -> None:
        if labels.is_switching:
            raise InvalidInputError(f"{what} is refused while a version is being written", hint="try again")

    async def sleep_outside_a_switch(level: int = 1, *args: Any, **kwargs: Any) -> None:
        nonlocal is_asleep
        require_no_switch("sleep")
        await sleep(level, *args, **kwargs)
        is_asleep = level > 0

    async def wake_up_outside_a_switch(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_asleep
        # A switch cannot go on while the engine sleeps. It has written nothing then.
        if not is_asleep:
            require_no_switch("wake_up")
        answer = await wake_up(*args, **kwargs)
        is_asleep = False
        return answer

    async def resume_outside_a_switch() -> None:
        require_no_switch("resume")
        await resume()

    async def refuse_label(*_: Any, **__: Any) -> None:
        raise InvalidInputError(
            "the weight version of this server is the version of the feed that is live", hint=_HINTS[_SERVER]
        )

    client.sleep = sleep_outside_a_switch
    client.wake_up = wake_up_outside_a_switch
    client.resume_generation = resume_outside_a_switch
    client.update_weight_version = refuse_label


RENEW = "deltasync_renew_salt"
"""The method of vLLM's engine core. The API server calls methods of the core by their names."""


class CacheSalts:
    """In the API server: salts every request that goes to the engine core. Used in the event loop only."""

    def __init__(self, client: Any) -> None:
        self._core = client.engine_core
        self._salt = secrets.token_hex(8)
        add = self._core.add_request_async

        async def add_salted(request: Any) -> None:
            request.cache_salt = _salted(self._salt, request.cache_salt)
            await add(request)

        self._core.add_request_async = add_salted

    async def renew(self) -> None:
        """Draw a new salt. The engine must be paused."""
        # The core takes requests and calls from one queue. Those sent before this call have the old salt and are in the
        # scheduler when the call runs, which salts them anew; those sent after it have the new salt.
        self._salt = secrets.token_hex(8)
        await self._core.call_utility_async(RENEW, self._salt)


def renew_salt(core: Any, salt: str) -> None:
    """Salt all requests of a paused engine core that hold no KV, and start those anew that have no token yet."""
    scheduler, now_s = core.scheduler, time.monotonic()
    # The first call is at the start of the server. A release with another scheduler is refused then, not at a switch.
    inspect.signature(scheduler._preempt_request).bind(None, now_s, drop_stale_output=True)
    started = scheduler.prev_step_scheduled_req_ids
    for request in [request for request in reversed(scheduler.running) if request.num_output_tokens == 0]:
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s, drop_stale_output=True)
        started.discard(request.request_id)
    for request in waiting_requests(scheduler):
        request.cache_salt = _salted(salt, (request.cache_salt or "").partition(":")[2])
        request.block_hashes.clear()
        request.update_block_hashes()
    # Embeddings of images are found by their content alone. Requests that go on have read theirs.
    scheduler.reset_encoder_cache()
    core.model_executor.reset_encoder_cache()


def _salted(salt: str, own: str | None) -> str:
    """Our salt and the one of the request. Ours has no colon, so that two requests are equal only if both are."""
    return f"{salt}:{own or ''}"
