"""In the API server: response headers that say which version produced an answer, on every OpenAI-compatible route.

The versions come from vLLM itself, which records the one that each token was sampled under.
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
    """The path that routes are matched by: without the prefix that `--root-path` adds."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Labels:
    """The label of the live version; `none` before the first one."""

    def __init__(self) -> None:
        self.current = _NONE


class Answer:
    """The versions of the tokens of one response."""

    def __init__(self) -> None:
        self._labels: dict[tuple[str, int], list[str]] = {}

    def note(self, output: Any, current: str) -> None:
        """Read an output of vLLM. The last one of each completion has the versions of all its tokens."""
        for completion in output.outputs:
            key = output.request_id, completion.index
            if completion.weight_versions:
                self._labels[key] = [_label(span.version) for span in completion.weight_versions]
            else:
                self._labels.setdefault(key, [current])

    def versions(self, current: str) -> tuple[str, str]:
        """The oldest and the newest version; `current` twice if there is no token."""
        ordered = sorted({label for labels in self._labels.values() for label in labels}, key=_number)
        return (ordered[0], ordered[-1]) if ordered else (current, current)


_answer: ContextVar[Answer | None] = ContextVar("deltasync_answer", default=None)


def note_versions(client: Any, labels: Labels) -> None:
    """Wrap `generate` of an engine client, so that each output is noted for the response that it belongs to."""
    generate = client.generate

    async def generate_and_note(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        answer = _answer.get()
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if answer is not None:
                    answer.note(output, labels.current)
                yield output

    client.generate = generate_and_note


class LabelMiddleware:
    """ASGI middleware that adds the headers to the answers of `/v1/`."""

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
    """One response. Its headers are held back until its first token, whose version they contain."""

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
            # The headers are sent by now. A line that starts with a colon is a comment, which clients ignore.
            message = {**message, "body": message.get("body", b"") + b": %s: %s\n\n" % (LAST, last.encode())}
        await self._send(message)


def _headers(first: str, last: str) -> list[tuple[bytes, bytes]]:
    headers = [(VERSION, first.encode())]
    if first != last:
        headers += [(FIRST, first.encode()), (LAST, last.encode())]
    return headers


def _label(weight_version: str) -> str:
    """vLLM's name for a version as a label. It calls the weights that it was started with `default`."""
    return weight_version if weight_version.isdecimal() else _NONE


def _number(label: str) -> int:
    return -1 if label == _NONE else int(label)
