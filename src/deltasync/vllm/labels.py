"""In the API server: response headers that say which version produced an answer, on every OpenAI-compatible route.

The versions come from vLLM itself, which records the one that each token was sampled under. With a release that does
not, they are all versions that were live while the request ran.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing, suppress
from contextvars import ContextVar
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


class Labels:
    """The label of the live version; `none` before the first one. `is_switching`: another one is being written."""

    def __init__(self) -> None:
        self.history = [_NONE]
        """All labels that have been live, the current one last."""
        self.is_switching = False
        self._switched = asyncio.Condition()

    @property
    def current(self) -> str:
        return self.history[-1]

    @current.setter
    def current(self, label: str) -> None:
        self.history.append(label)

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


class Answer:
    """The versions of the tokens of one response."""

    def __init__(self) -> None:
        self._started: dict[tuple[str, int], str] = {}
        """By request and completion: the version that was live at the first output."""
        self._ended: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        """The label of the version that produced tokens, the first of these tokens, and the one after the last."""
        self._live: dict[tuple[str, int], list[str]] = {}
        """With a release of vLLM that records no versions: those that were live since the request was sent."""
        self.adapter: str | None = None
        """The version of the adapter that the request names; None if that follows no feed."""

    def note(self, output: Any, live: list[str]) -> None:
        """Read an output of vLLM. The last one of each completion has the versions of all its tokens.

        `live`: the labels that were live since the request was sent. An output may arrive after the next switch, so
        that without vLLM's record a token is from any of these versions.
        """
        folder = _ADAPTER_FOLDER.fullmatch(getattr(output.lora_request, "lora_path", ""))
        self.adapter = None if folder is None else folder[1]
        for completion in output.outputs:
            key = output.request_id, completion.index
            self._started.setdefault(key, live[-1])
            if not has_weight_versions(completion):
                self._live[key] = live
            elif completion.weight_versions is not None:
                spans = completion.weight_versions
                # vLLM calls the weights that it was started with `default`.
                self._ended[key] = [
                    (span.version if span.version.isdecimal() else _NONE, span.start, span.end) for span in spans
                ]

    def versions(self, current: str) -> tuple[str, str]:
        """The oldest and the newest version; `current` twice if there is no token."""
        labels = {label for key, label in self._started.items() if not self._ended.get(key)}
        labels |= {label for spans in self._ended.values() for label, _, _ in spans}
        labels |= {label for live in self._live.values() for label in live}
        ordered = sorted(labels, key=lambda label: -1 if label == _NONE else int(label))
        return (ordered[0], ordered[-1]) if ordered else (current, current)

    def spans(self) -> str | None:
        """The versions of all tokens, such as `0-11=3,12-15=4`, with `;` between the completions in their order.

        None if vLLM has not reported them all, if they are not those of the answer (beam search), or for too many.
        """
        is_known = self._started.keys() == self._ended.keys()
        if not is_known or not any(self._ended.values()) or any(_BEAM.search(request) for request, _ in self._ended):
            return None
        ended = [self._ended[key] for key in sorted(self._ended, key=_ordinal)]
        text = ";".join(",".join(f"{start}-{end - 1}={label}" for label, start, end in spans) for spans in ended)
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
        answer, begun = _answer.get(), len(labels.history) - 1
        async with aclosing(generate(*args, **kwargs)) as outputs:
            async for output in outputs:
                if answer is not None:
                    answer.note(output, labels.history[begun:])
                yield output

    client.generate = generate_and_note


def label_middleware(app: App, labels: Labels) -> App:
    """ASGI middleware that adds the headers to the answers of `/v1/`.

    They are held back until the first token, whose version they contain.
    """

    async def labelled(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not route_path(scope).startswith(_API):
            await app(scope, receive, send)
            return
        answer = Answer()
        _answer.set(answer)
        start: Message | None = None
        is_stream = False

        async def send_labelled(message: Message) -> None:
            nonlocal start, is_stream
            if message["type"] == "http.response.start":
                start = message
                return
            first, last = answer.versions(labels.current)
            text = answer.spans()
            spans = [] if text is None else [(SPANS, text.encode())]
            if start is not None:
                headers = [*start.get("headers", ()), (VERSION, first.encode())]
                if answer.adapter is not None:
                    headers.append((ADAPTER, answer.adapter.encode()))
                if first != last:
                    headers += [(FIRST, first.encode()), (LAST, last.encode())]
                is_stream = any(key == b"content-type" and value.startswith(_EVENTS) for key, value in headers)
                begun, start = {**start, "headers": headers if is_stream else headers + spans}, None
                await send(begun)
            if is_stream and not message.get("more_body", False) and first != last:
                # The headers are sent by now. A line that starts with a colon is a comment, which clients ignore.
                lines = [b": %s: %s\n" % header for header in [(LAST, last.encode()), *spans]]
                message = {**message, "body": message.get("body", b"") + b"".join(lines) + b"\n"}
            await send(message)

        await app(scope, receive, send_labelled)

    return labelled
