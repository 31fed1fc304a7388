"""In the API server: response headers that say which version produced an answer, on every OpenAI-compatible route.

The versions come from vLLM itself, which records the one that each token was sampled under. With a release that does
not, they are all versions that were live while the request ran.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from deltasync.vllm.releases import has_weight_versions

VERSION = b"x-deltasync-version"
FIRST = b"x-deltasync-first-version"
LAST = b"x-deltasync-last-version"
SPANS = b"x-deltasync-versions"
ADAPTER = b"x-deltasync-adapter-version"

_NONE = "none"
_API = "/v1/"
_EVENTS = b"text/event-stream"
_SPANS_MOST_BYTES = 4096
"""Longer headers are left out: many clients and proxies refuse a response with more than 8 kB of headers."""
_ADAPTER_FOLDER = re.compile(r".*/v(\d{1,18})-[0-9a-f]{16}")
"""The folders of `adapters`."""
_BEAM = re.compile(r"-beam-\d+$")
_ORDINAL = re.compile(r"[-_](\d{1,9})$")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


def route_path(scope: Message) -> str:
    """The path that routes are matched by: without the prefix that `--root-path` adds."""
    path, root = str(scope.get("path", "")), str(scope.get("root_path", ""))
    return path.removeprefix(root) if path.startswith(f"{root}/") else path


class Live:
    """A label that was live, and the one that came after it. Old ones are freed when no request refers to them."""

    __slots__ = ("label", "next")

    def __init__(self, label: str) -> None:
        self.label = label
        self.next: Live | None = None

    def labels(self) -> list[str]:
        """This label and all that have been live since."""
        labels, live = [self.label], self.next
        while live is not None:
            labels.append(live.label)
            live = live.next
        return labels


class Labels:
    """The label of the live version; `none` before the first one. `is_switching`: another one is being written."""

    def __init__(self) -> None:
        self.live = Live(_NONE)
        self.is_switching = False
        self._switched = asyncio.Condition()

    @property
    def current(self) -> str:
        return self.live.label

    @current.setter
    def current(self, label: str) -> None:
        self.live.next = Live(label)
        self.live = self.live.next

    @property
    def version(self) -> int | None:
        """The live version; None before the first one, and while another one is being written."""
        return None if self.is_switching or self.current == _NONE else int(self.current)

    async def end_switch(self) -> None:
        """Wake up those who wait for a version."""
        async with self._switched:
            self.is_switching = False
            self._switched.notify_all()

    async def wait_for(self, is_met: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until a switch ends after which `is_met` returns true; false if there is none in this time."""
        if not is_met():
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s), self._switched:
                    await self._switched.wait_for(is_met)
        return is_met()


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens from `start` to before `end` of a completion, and the label of the version that produced them."""

    label: str
    start: int
    end: int

    def __str__(self) -> str:
        return f"{self.start}-{self.end - 1}={self.label}"


class Answer:
    """The versions of the tokens of one response."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, int], str] = {}
        """By request and completion: the version that was live at the first output."""
        self._ended: dict[tuple[str, int], list[Span]] = {}
        self._live: dict[tuple[str, int], list[str]] = {}
        """With a release of vLLM that records no versions: those that were live since the request was sent."""
        self.adapter: str | None = None
        """The version of the adapter that the request names; None if that follows no feed."""

    def note(self, output: Any, current: str, begun: Live) -> None:
        """Read an output of vLLM. The last one of each completion has the versions of all its tokens.

        `begun` was live when the request was sent. An output may arrive after the next switch, so that without vLLM's
        record a token is from any version since then.
        """
        folder = _ADAPTER_FOLDER.fullmatch(getattr(output.lora_request, "lora_path", ""))
        self.adapter = None if folder is None else folder[1]
        for completion in output.outputs:
            key = output.request_id, completion.index
            self._started.setdefault(key, current)
            if not has_weight_versions(completion):
                self._live[key] = begun.labels()
            elif completion.weight_versions is not None:
                spans = completion.weight_versions
                self._ended[key] = [Span(_label(span.version), span.start, span.end) for span in spans]

    def versions(self, current: str) -> tuple[str, str]:
        """The oldest and the newest version; `current` twice if there is no token."""
        labels = {label for key, label in self._started.items() if not self._ended.get(key)}
        labels |= {span.label for spans in self._ended.values() for span in spans}
        labels |= {label for live in self._live.values() for label in live}
        ordered = sorted(labels, key=_number)
        return (ordered[0], ordered[-1]) if ordered else (current, current)

    def spans(self) -> str | None:
        """The versions of all tokens, such as `0-11=3,12-15=4`, with `;` between the completions in their order.

        None if vLLM has not reported them all, if they are not those of the answer (beam search), or for too many.
        """
        is_known = self._started.keys() == self._ended.keys()
        if not is_known or not any(self._ended.values()) or any(_BEAM.search(request) for request, _ in self._ended):
            return None
        text = ";".join(",".join(map(str, self._ended[key])) for key in sorted(self._ended, key=_ordinal))
        return text if len(text) <= _SPANS_MOST_BYTES else None


def _ordinal(key: tuple[str, int]) -> tuple[int, int]:
    """The place of a completion in its answer. vLLM numbers the requests of an answer with several prompts."""
    request, completion = key
    match = _ORDINAL.search(request)
    return 0 if match is None else int(match[1]), completion


_answer: ContextVar[Answer | None] = ContextVar("deltasync_answer", default=None)


def note_versions(client: Any, labels: Labels) -> None:
    """Wrap `generate` of an engine client, so that each output is noted for the response that it belongs to."""
    generate = client.generate

    async def generate_and_note(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        answer, begun = _answer.get(), labels.live
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if answer is not None:
                    answer.note(output, labels.current, begun)
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
            headers = [*start.get("headers", ()), (VERSION, first.encode())]
            if self._answer.adapter is not None:
                headers.append((ADAPTER, self._answer.adapter.encode()))
            if first != last:
                headers += [(FIRST, first.encode()), (LAST, last.encode())]
            self._is_stream = any(key == b"content-type" and value.startswith(_EVENTS) for key, value in headers)
            if not self._is_stream:
                headers += self._spans()
            await self._send({**start, "headers": headers})
        if self._is_stream and not message.get("more_body", False) and first != last:
            # The headers are sent by now. A line that starts with a colon is a comment, which clients ignore.
            lines = [b": %s: %s\n" % header for header in [(LAST, last.encode()), *self._spans()]]
            message = {**message, "body": message.get("body", b"") + b"".join(lines) + b"\n"}
        await self._send(message)

    def _spans(self) -> list[tuple[bytes, bytes]]:
        spans = self._answer.spans()
        return [] if spans is None else [(SPANS, spans.encode())]


def _label(weight_version: str) -> str:
    """vLLM's name for a version as a label. It calls the weights that it was started with `default`."""
    return weight_version if weight_version.isdecimal() else _NONE


def _number(label: str) -> int:
    return -1 if label == _NONE else int(label)
