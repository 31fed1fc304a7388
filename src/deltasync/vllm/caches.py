"""`DELTASYNC_CACHE=keep`: requests in flight keep their KV over a switch, and no later request reuses it.

vLLM finds a block of its prefix cache by a hash of the tokens up to it and of the request's salt. Every request gets a
salt of ours before its own one, and every switch draws a new one. A request has the current salt only if all its KV was
computed since the last switch:

- A request that arrives after a switch has the new salt.
- A request that holds no KV at the switch gets the new salt, and one that has no token yet is started again.
- A request that has tokens goes on with its KV and its old salt, with which no later request looks for blocks.

So a block with the current salt was computed with the current weights, and an answer of one version is one that a fresh
server of this version would give.
"""

import inspect
import secrets
import time
from typing import Any

from deltasync.vllm.releases import waiting_requests

_RENEW = "deltasync_renew_salt"
"""The method of vLLM's engine core. The API server calls methods of the core by their names."""


class CacheSalts:
    """In the API server: salts every request that goes to the engine core. Used in the event loop only."""

    def __init__(self, client: Any) -> None:
        self._core = client.engine_core
        self._salt = _new_salt()
        add = self._core.add_request_async

        async def add_salted(request: Any) -> None:
            request.cache_salt = _salted(self._salt, request.cache_salt)
            await add(request)

        self._core.add_request_async = add_salted

    async def renew(self) -> None:
        """Draw a new salt. The engine must be paused."""
        # The core takes requests and calls from one queue. Those sent before this call have the old salt and are in the
        # scheduler when the call runs, which salts them anew; those sent after it have the new salt.
        self._salt = _new_salt()
        await self._core.call_utility_async(_RENEW, self._salt)


def install(engine_core: Any) -> None:
    """In the process of the engine core: add the method that `CacheSalts.renew` calls to its class."""
    setattr(engine_core, _RENEW, renew_salt)


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


def _new_salt() -> str:
    return secrets.token_hex(8)


def _salted(salt: str, own: str | None) -> str:
    """Our salt and the one of the request. Ours has no colon, so that two requests are equal only if both are."""
    return f"{salt}:{own or ''}"
