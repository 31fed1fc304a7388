"""The control routes under `/deltasync/`, and the token that they ask for."""

import asyncio
import hmac
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Protocol

from fastapi import Body, FastAPI
from starlette.responses import JSONResponse

from deltasync.errors import DeltasyncError, EngineError
from deltasync.following.follower import Follower
from deltasync.following.target import Target
from deltasync.serve.vllm.labels import App, Message, Receive, Send, route_path

PREFIX = "/deltasync"

_STATUS = {"not_found": 404, "invalid_input": 400, "mismatch": 409, "store": 502, "engine": 503}


class Controlled(Protocol):
    """What the routes control."""

    @property
    def follower(self) -> Follower: ...

    @property
    def target(self) -> Target: ...

    @property
    def way(self) -> str: ...


class Guard:
    """ASGI middleware: nothing under the prefix is answered without the token, not even whether it exists."""

    def __init__(self, app: App, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        is_ours = path == PREFIX or path.startswith(f"{PREFIX}/")
        if scope["type"] in ("http", "websocket") and is_ours and not self._is_allowed(scope):
            answer = JSONResponse(
                {"error": {"kind": "unauthorized"}}, status_code=401, headers={"www-authenticate": "Bearer"}
            )
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Message) -> bool:
        given = b"".join(value for key, value in scope["headers"] if key == b"authorization")
        return self._token is not None and hmac.compare_digest(given, b"Bearer " + self._token.encode())


def add_routes(app: FastAPI, controlled: Callable[[], Controlled | None]) -> None:
    """Add the routes. `controlled` gives None until the server is up."""

    async def run(work: Callable[[Controlled], Any]) -> JSONResponse:
        found = controlled()
        try:
            if found is None:
                raise EngineError("the server is not up yet", hint="try again")
            return JSONResponse(await asyncio.to_thread(work, found))
        except DeltasyncError as error:
            return JSONResponse({"error": _told(error)}, status_code=_STATUS.get(error.kind, 500))

    @app.get(f"{PREFIX}/status")
    async def status() -> JSONResponse:
        return await run(_status)

    @app.post(f"{PREFIX}/advance")
    async def advance(to: int | None = Body(None, embed=True)) -> JSONResponse:
        return await run(lambda c: _advance(c, to))

    @app.post(f"{PREFIX}/pin")
    async def pin(version: int | None = Body(None, embed=True)) -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.pin(version)))

    @app.post(f"{PREFIX}/pause")
    async def pause() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.pause()))

    @app.post(f"{PREFIX}/resume")
    async def resume() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.resume()))

    @app.post(f"{PREFIX}/nudge")
    async def nudge() -> JSONResponse:
        return await run(_then_status(lambda c: c.follower.nudge()))

    @app.post(f"{PREFIX}/scrub")
    async def scrub(repair: bool = Body(True, embed=True)) -> JSONResponse:
        return await run(lambda c: _scrub(c, repair=repair))


def _status(found: Controlled) -> dict[str, Any]:
    return {**asdict(found.follower.status()), "engine": found.target.engine, "way": found.way}


def _then_status(act: Callable[[Controlled], None]) -> Callable[[Controlled], dict[str, Any]]:
    def work(found: Controlled) -> dict[str, Any]:
        act(found)
        return _status(found)

    return work


def _advance(found: Controlled, to: int | None) -> dict[str, Any]:
    moved = found.follower.advance(found.target, to=to)
    return {"version": found.target.version, "moved": None if moved is None else asdict(moved)}


def _scrub(found: Controlled, *, repair: bool) -> dict[str, Any]:
    damages = found.follower.scrub(found.target, repair=repair)
    return {"version": found.target.version, "damaged": [asdict(damage) for damage in damages]}


def _told(error: DeltasyncError) -> Mapping[str, Any]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}
