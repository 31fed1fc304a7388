"""In the API server: requests that ask for a version are answered only if that version is live."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from starlette.responses import JSONResponse

from deltasync.errors import InvalidInputError
from deltasync.vllm.labels import VERSION, App, Labels, Message, Receive, Send
from deltasync.vllm.routes import error_response, is_control

MIN_VERSION = b"x-deltasync-min-version"
WAIT_S = b"x-deltasync-wait-s"
_HEADERS = (VERSION, MIN_VERSION, WAIT_S)

WAIT_MOST_S = 60.0
"""Longer waits are cut to this: proxies give up on a silent connection after about a minute."""
_SWITCH_S = 5.0
"""How long every such request waits for the end of a switch. The engine would hold it, too."""
_CLOSING_S = 1.0
"""How often a waiting request looks whether the server shuts down, which waits for all requests."""
_RETRY_AFTER_S = 1
_VERSION_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Wanted:
    """The version that a request asks for, or the oldest one that it takes, and how long it waits for it."""

    version: int | None = None
    min_version: int | None = None
    wait_s: float = 0.0

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[bytes, bytes]]) -> "Wanted":
        """Parse the headers of a request. InvalidInputError names the header that is wrong."""
        values: dict[bytes, str] = {}
        for key, value in headers:
            if key in _HEADERS:
                if key in values:
                    raise _wrong(key, "is given twice", "send it once")
                values[key] = value.decode("latin-1").strip()
        return cls(version=_version(values, VERSION), min_version=_version(values, MIN_VERSION), wait_s=_wait_s(values))

    def is_met_by(self, live: int | None) -> bool:
        """Whether the request can start under this version."""
        if self.version is None and self.min_version is None:
            return True
        return live is not None and self.version in (None, live) and (self.min_version or 0) <= live

    def __str__(self) -> str:
        exact = [] if self.version is None else [f"version {self.version}"]
        least = [] if self.min_version is None else [f"at least version {self.min_version}"]
        return " and ".join(exact + least)


def _version(values: dict[bytes, str], key: bytes) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _VERSION_DIGITS):
        raise _wrong(key, f"is {text!r:.80}", f"send a version, a decimal number of at most {_VERSION_DIGITS} digits")
    return int(text)


def _wait_s(values: dict[bytes, str]) -> float:
    text = values.get(WAIT_S, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 <= seconds < math.inf:
        raise _wrong(WAIT_S, f"is {text!r:.80}", "send a number of seconds, at least 0")
    return min(seconds, WAIT_MOST_S)


def _wrong(key: bytes, what: str, hint: str) -> InvalidInputError:
    return InvalidInputError(f"the header {key.decode()} {what}", hint=hint)


class VersionMiddleware:
    """ASGI middleware: a request that asks for a version which is not live is 409, after the time that it waits.

    `is_closing` returns whether the server shuts down.
    """

    def __init__(self, app: App, labels: Labels, is_closing: Callable[[], bool]) -> None:
        self._app = app
        self._labels = labels
        self._is_closing = is_closing

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        answer = None
        if scope["type"] == "http" and not is_control(scope):
            answer = await self._refusal(scope["headers"])
        await (self._app if answer is None else answer)(scope, receive, send)

    async def _refusal(self, headers: Iterable[tuple[bytes, bytes]]) -> JSONResponse | None:
        """The answer to a request that cannot start; None if it can."""
        try:
            wanted = Wanted.from_headers(headers)
        except InvalidInputError as error:
            return error_response(error)
        if wanted.is_met_by(self._labels.version) or await self._waits_for(wanted):
            return None
        live = self._labels.version
        fields = {
            "kind": "version",
            "message": f"the request asks for {wanted}, but {'none' if live is None else f'version {live}'} is live",
            "hint": f"try again, or let the request wait with the header {WAIT_S.decode()}",
            "rule": None,
        }
        return JSONResponse(
            {"error": fields, "version": live}, status_code=409, headers={"retry-after": str(_RETRY_AFTER_S)}
        )

    async def _waits_for(self, wanted: Wanted) -> bool:
        labels = self._labels
        await labels.wait_for(lambda: not labels.is_switching, _SWITCH_S)
        deadline_s = time.monotonic() + wanted.wait_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not self._is_closing():
            if await labels.wait_for(lambda: wanted.is_met_by(labels.version), min(left_s, _CLOSING_S)):
                return True
        return wanted.is_met_by(labels.version)
