"""Leads a vLLM server that moves only when it is told: watches the feed, and calls the server's control routes."""

import json
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from deltasync.errors import (
    DeltasyncError,
    EngineError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from deltasync.following.events import Advance, Observer, Seconds
from deltasync.following.heartbeat import BEAT_S
from deltasync.following.loop import Loop
from deltasync.following.nudging import watching
from deltasync.log.log import Log
from deltasync.store.protocol import Store

_STATUS_TIMEOUT_S = 30.0
_ADVANCE_TIMEOUT_S = 1800.0
"""A move may load all weights of a large model from a slow store."""
_ANSWER_BYTES_MAX = 1 << 20


class Controller:
    """Brings one server to the newest version of a feed, and to each one after it. Methods are for any thread.

    The server fetches by itself: it must follow the same feed, with `DELTASYNC_WAY=push`. A server that is pinned to a
    version is brought there; one whose following is paused is left alone.
    """

    def __init__(
        self,
        store: Store,
        server: "Server",
        *,
        observer: Observer | None = None,
        beat_s: float = BEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._log = Log(store)
        self._server = server
        self._observer = observer
        self._beat_s = beat_s
        self._clock = clock
        self._loop = Loop()
        self._head: int | None = None
        self._served: int | None = None
        self._told_at: float | None = None
        self._error: str | None = None

    def advance(self) -> Advance | None:
        """One move of the server, to where it should be; None if it is there, or paused."""
        newer = self._log.head(after=self._head)
        if newer is None and self._head is None:
            newer = self._log.require_head()
        if newer is not None:
            self._head = newer.version
        found = self._server.status()
        if found.get("way") != "push":
            raise InvalidInputError(
                f"{self._server.url} follows by itself", hint="start it with `deltasync serve --push`"
            )
        self._served = found.get("version")
        if found.get("is_paused"):
            return None
        goal = self._head if found.get("pinned") is None else found["pinned"]
        # One that is told nothing gives no sign of life, and would soon count as gone.
        if self._served == goal and self._told_at is not None and self._clock() - self._told_at < self._beat_s:
            return None
        moved = self._server.advance(goal)
        self._served, self._told_at = goal, self._clock()
        if moved is not None and self._observer is not None:
            self._observer(moved)
        return moved

    def follow(self) -> None:
        """Go on until `stop`. A store or a server that fails is tried again for ever, with back-off, and told once.

        Raises what trying again cannot help: a wrong token, a feed of another model, a store that refuses.
        """
        with watching(self._store, self._loop.nudge):
            self._loop.run(lambda: self.advance() is not None, self._note)

    def stop(self) -> None:
        """Let `follow` return after the move that is under way, for good."""
        self._loop.stop()

    def nudge(self) -> None:
        """Let `follow` look at once."""
        self._loop.nudge()

    def status(self) -> dict[str, Any]:
        """How things stand, as far as this controller was told."""
        return {
            "server": self._server.url,
            "version": self._served,
            "head": self._head,
            "is_following": self._loop.is_running,
            "error": self._error,
        }

    def _note(self, error: Exception | None) -> None:
        self._error = None if error is None else f"{type(error).__name__}: {error}"


class Server:
    """The control routes of a vLLM server at `url`, which may have a path. No redirect is followed, with the token."""

    def __init__(self, url: str, *, token: str | None) -> None:
        parts = urlsplit(url.rstrip("/"))
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
            raise InvalidInputError(f"{url!r:.200} is not the URL of a server", hint="use http://host:port")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidInputError("the token has characters that HTTP cannot carry", hint="look at DELTASYNC_TOKEN")
        self.url = url.rstrip("/")
        self._parts = parts
        self._token = token

    def status(self) -> Mapping[str, Any]:
        """What `GET /deltasync/status` tells."""
        return self._ask("GET", "status", None, _STATUS_TIMEOUT_S)

    def advance(self, to: int | None) -> Advance | None:
        """Let the server become a version, and wait for it; None if it was there."""
        told = self._ask("POST", "advance", {"to": to}, _ADVANCE_TIMEOUT_S)
        moved = told.get("moved")
        try:
            return None if moved is None else _parsed(moved)
        except (KeyError, TypeError) as error:
            raise self._strange() from error

    def _ask(self, method: str, verb: str, body: Mapping[str, Any] | None, timeout_s: float) -> Mapping[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        content = None if body is None else json.dumps(body)
        connect = HTTPSConnection if self._parts.scheme == "https" else HTTPConnection
        try:
            with closing(connect(self._parts.netloc, timeout=timeout_s)) as connection:
                connection.request(method, f"{self._parts.path}/deltasync/{verb}", content, headers)
                response = connection.getresponse()
                status, data = response.status, response.read(_ANSWER_BYTES_MAX)
        except (OSError, HTTPException) as error:
            reason = str(error) if str(error) else type(error).__name__
            raise EngineError(f"{self.url} cannot be reached: {reason}", hint="is the server up?") from error
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if status != 200:
            raise self._failure(status, found.get("error") if isinstance(found, dict) else None)
        if not isinstance(found, dict):
            raise self._strange()
        return found

    def _failure(self, status: int, told: Any) -> DeltasyncError:
        """What a status other than 200 means."""
        if status == 401:
            what = "asks for a token" if self._token is None else "refuses the token"
            return InvalidInputError(f"{self.url} {what} (401)", hint="set DELTASYNC_TOKEN to that of the server")
        known = told if isinstance(told, dict) else {}
        kind, hint = known.get("kind"), known.get("hint")
        hint = "look at the server's log" if hint is None else hint
        message = f"{self.url}: {known.get('message', 'no reason given')} ({status})"
        if kind == "not_found":
            return NotFoundError(message, hint="does the server follow the same feed?")
        if kind == "mismatch":
            return MismatchError(message, hint=hint, rule=known.get("rule"))
        if kind == "store":
            return StoreError(message, transient=True, hint=hint)
        if status == 404:
            return InvalidInputError(
                f"{self.url} has no routes of deltasync (404)", hint="start it with `deltasync serve --push`"
            )
        return EngineError(message, hint=hint)

    def _strange(self) -> EngineError:
        return EngineError(
            f"{self.url} answers, but not as deltasync does", hint="is it the same release of deltasync?"
        )


def _parsed(moved: Mapping[str, Any]) -> Advance:
    return Advance(
        from_version=moved["from_version"],
        version=moved["version"],
        edges=tuple(moved["edges"]),
        nbytes=moved["nbytes"],
        changed=moved["changed"],
        seconds=Seconds(**moved["seconds"]),
    )
