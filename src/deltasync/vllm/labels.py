"""Which version made an answer: response headers of every OpenAI-compatible route.

The versions come from vLLM itself, which notes the one that each token was sampled under.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from contextvars import ContextVar
from typing import Any

VERSION = b"x-deltasync-version"
FIRST = b"x-deltasync-first-version"
LAST = b"x-deltasync-last-version"

_NONE = "none"
_API = "/v1/"
_EVENTS = b"text/event-stream"

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def route_path(scope: Message) -> str:
    """The path that routes are found by: without the prefix that `--root-path` adds."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Labels:
    """The version that is live; `none` before the first one."""

    def __init__(self) -> None:
        self.current = _NONE


class Answer:
    """The versions of the tokens of one response."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], list[str]] = {}

    def note(self, output: Any, current: str) -> None:
        """Look at an output of vLLM. The last one of each completion has the versions of all its tokens."""
        for completion in output.outputs:
            key = output.request_id, completion.index
            if completion.weight_versions:
                self._found[key] = [_label(span.version) for span in completion.weight_versions]
            else:
                self._found.setdefault(key, [current])

    def versions(self, current: str) -> tuple[str, str]:
        """The oldest and the newest version; `current` twice if there is no token."""
        found = sorted({v for versions in self._found.values() for v in versions}, key=_number)
        return (found[0], found[-1]) if found else (current, current)


_answer: ContextVar[Answer | None] = ContextVar("deltasync_answer", default=None)


def note_versions(client: Any, labels: Labels) -> None:
    """Let every request that an engine client serves be noted for the response that it belongs to."""
    generate = client.generate

    async def noted(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        answer = _answer.get()
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if answer is not None:
                    answer.note(output, labels.current)
                yield output

    client.generate = noted


class Labelling:
    """ASGI middleware that adds the headers to answers of `/v1/`."""

    def __init__(self, app: App, labels: Labels) -> None:
        self._app = app
        self._labels = labels

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not route_path(scope).startswith(_API):
            await self._app(scope, receive, send)
            return
        answer = Answer()
        _answer.set(answer)
        response = _Response(send, answer, self._labels)
        await self._app(scope, receive, response.send)


class _Response:
    """One response. Its first bytes wait for its first token, whose version the header tells."""

    def __init__(self, send: Send, answer: Answer, labels: Labels) -> None:
        self._send = send
        self._answer = answer
        self._labels = labels
        self._start: Message | None = None
        self._is_stream = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        first, last = self._answer.versions(self._labels.current)
        if self._start is not None:
            start, self._start = self._start, None
            headers = [*start.get("headers", ()), *_headers(first, last)]
            self._is_stream = any(key == b"content-type" and value.startswith(_EVENTS) for key, value in headers)
            await self._send({**start, "headers": headers})
        if self._is_stream and not message.get("more_body", False) and first != last:
            # Headers are gone by now. A line that begins with a colon is a comment, which clients pass over.
            message = {**message, "body": message.get("body", b"") + b": %s: %s\n\n" % (LAST, last.encode())}
        await self._send(message)


def _headers(first: str, last: str) -> list[tuple[bytes, bytes]]:
    found = [(VERSION, first.encode())]
    if first != last:
        found += [(FIRST, first.encode()), (LAST, last.encode())]
    return found


def _label(weight_version: str) -> str:
    """vLLM says `default` for the weights that it was started with."""
    return weight_version if weight_version.isdecimal() else _NONE


def _number(label: str) -> int:
    return -1 if label == _NONE else int(label)
