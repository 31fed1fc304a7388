"""Who may write weights that come from a feed: refuse vLLM's own ways to replace them, label them and resume.

vLLM can reload weights, discard them in its sleep, or take them through its weight transfer while a server follows a
feed. The label would then name a version whose weights are no longer there, and the next version would be applied to
other weights. Such calls are refused with what to do instead, before they change anything.

A function of the user that runs inside a worker (`apply_model`) cannot be judged: it may only read.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from deltasync.errors import InvalidInputError
from deltasync.vllm.labels import Labels
from deltasync.vllm.plugin import is_used

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
    """In the process of the engine core: check the calls of its class that reach weights."""
    call, sleep = engine_core.collective_rpc, engine_core.sleep

    @wraps(call)
    def checked_call(core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        if is_used(core.vllm_config):
            _check_call(core, method)
        return call(core, method, *args, **kwargs)

    @wraps(sleep)
    def checked_sleep(core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= _DISCARDING_LEVEL:
            _require_unowned(core, f"a sleep of level {level}")
        return sleep(core, level, *args, **kwargs)

    engine_core.collective_rpc, engine_core.sleep = checked_call, checked_sleep


def _check_call(core: Any, method: Any) -> None:
    """InvalidInputError for a call that would make a label wrong, or that needs weights which are not in memory."""
    if method == CALL:
        if core.model_executor.is_sleeping:
            raise InvalidInputError("the engine is asleep, and has no weights in memory", hint="wake it up")
        setattr(core, _OWNER, _SERVER)
    elif method in _WRITES or (method in _PROTOCOL and _owner(core) == _SERVER):
        _require_unowned(core, f"{method!r:.80}")
    elif method == "update_weights":
        # Already before the call: one that fails may have written something.
        setattr(core, _OWNER, _PROGRAM)


def _owner(core: Any) -> str | None:
    owner: str | None = getattr(core, _OWNER, None)
    return owner


def _require_unowned(core: Any, what: str) -> None:
    owner = _owner(core)
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

    replaced: dict[str, Callable[..., Any]] = {
        "sleep": sleep_outside_a_switch,
        "wake_up": wake_up_outside_a_switch,
        "resume_generation": resume_outside_a_switch,
        "update_weight_version": refuse_label,
    }
    for name, method in replaced.items():
        setattr(client, name, method)
