"""In the API server: the control routes, and the token that they require."""

import asyncio
import hmac
from collections.abc import Callable
from typing import Any

from fastapi import Body, FastAPI
from starlette.responses import JSONResponse

from deltasync.errors import DeltasyncError, EngineError
from deltasync.replica.follower import Follower
from deltasync.vllm.labels import App, Message, Receive, Send, route_path
from deltasync.vllm.replica import Replicas

PREFIX = "/deltasync"
READY = f"{PREFIX}/ready"
_STATUS_CODES = {"not_found": 404, "invalid_input": 400, "mismatch": 409, "store": 502, "engine": 503}


def is_control(scope: Message) -> bool:
    """Whether a request is for a path under the prefix."""
    path = route_path(scope)
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def error_response(error: DeltasyncError) -> JSONResponse:
    """The answer to a request that fails with this error."""
    fields = {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}
    return JSONResponse({"error": fields}, status_code=_STATUS_CODES.get(error.kind, 500))


def add_routes(app: FastAPI, get_replicas: Callable[[], Replicas | None]) -> None:
    """Add the control routes. `get_replicas` returns None until the engine is up.

    The query parameter `adapter` of a route names an adapter; without it, the route is about the weights.
    """

    async def answer(work: Callable[[Replicas], dict[str, Any]]) -> JSONResponse:
        try:
            replicas = get_replicas()
            if replicas is None:
                raise EngineError("the server is not up yet", hint="try again")
            return JSONResponse(await asyncio.to_thread(work, replicas))
        except DeltasyncError as error:
            return error_response(error)

    async def act(adapter: str | None, work: Callable[[Follower], None]) -> JSONResponse:
        def act_and_report(replicas: Replicas) -> dict[str, Any]:
            replica = replicas.named(adapter)
            work(replica.follower)
            return replica.status()

        return await answer(act_and_report)

    @app.get(READY)
    async def ready() -> JSONResponse:
        replicas = get_replicas()
        is_ready = replicas is not None and replicas.is_ready
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

    @app.get(f"{PREFIX}/status")
    async def status() -> JSONResponse:
        return await answer(Replicas.status)

    @app.post(f"{PREFIX}/advance")
    async def advance(to: int | None = Body(None, embed=True), adapter: str | None = None) -> JSONResponse:
        return await answer(lambda replicas: replicas.named(adapter).advance(to))

    @app.post(f"{PREFIX}/scrub")
    async def scrub(repair: bool = Body(True, embed=True), adapter: str | None = None) -> JSONResponse:
        return await answer(lambda replicas: replicas.named(adapter).scrub(repair=repair))

    @app.post(f"{PREFIX}/pin")
    async def pin(version: int | None = Body(None, embed=True), adapter: str | None = None) -> JSONResponse:
        return await act(adapter, lambda follower: follower.pin(version))

    @app.post(f"{PREFIX}/pause")
    async def pause(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.pause)

    @app.post(f"{PREFIX}/resume")
    async def resume(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.resume)

    @app.post(f"{PREFIX}/nudge")
    async def nudge(adapter: str | None = None) -> JSONResponse:
        return await act(adapter, Follower.nudge)


class TokenMiddleware:
    """ASGI middleware: without the token, every path under the prefix is 401, whether it exists or not.

    Only readiness needs none: load balancers have no token.
    """

    def __init__(self, app: App, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        is_open = route_path(scope) == READY and scope.get("method") == "GET"
        if scope["type"] in ("http", "websocket") and is_control(scope) and not (is_open or self._is_allowed(scope)):
            answer = JSONResponse(
                {"error": {"kind": "unauthorized"}}, status_code=401, headers={"www-authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Message) -> bool:
        given = b"".join(value for key, value in scope["headers"] if key == b"authorization")
        return self._token is not None and hmac.compare_digest(given, b"Bearer " + self._token.encode())
