"""Which version made an answer: headers of real responses, from the versions that vLLM notes for tokens."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from deltasync.vllm.labels import Labels, label_middleware, note_versions


@dataclass
class Span:
    version: str
    start: int
    end: int


@dataclass
class Completion:
    """Some tokens. vLLM reports the versions with the last of them."""

    index: int = 0
    weight_versions: list[Span] | None = None


@dataclass
class PlainCompletion:
    """Some tokens, from a release of vLLM that does not record versions."""

    index: int = 0


@dataclass
class Output:
    request_id: str
    outputs: Sequence[Completion | PlainCompletion] = field(default_factory=list)
    lora_request: Any = None


def done(*versions: str, index: int = 0, tokens: int = 4) -> Completion:
    """The last output of a completion with so many tokens of each version."""
    return Completion(index, [Span(version, i * tokens, (i + 1) * tokens) for i, version in enumerate(versions)])


@dataclass
class Switch:
    """Between two outputs another version goes live."""

    version: str


Script = Sequence[Output | Switch]


class Client:
    """An engine client that yields a script of outputs; `is_closed` once the caller has closed the generator."""

    def __init__(self, script: Script, labels: Labels) -> None:
        self._script = script
        self._labels = labels
        self.is_closed = False

    async def generate(self, prompt: str, *, request_id: str = "") -> AsyncGenerator[Output, None]:
        try:
            for item in self._script:
                if isinstance(item, Switch):
                    self._labels.current = item.version
                elif not request_id or item.request_id == request_id:
                    yield item
        finally:
            self.is_closed = True


def served(script: Script, *, root: str = "") -> tuple[TestClient, Client]:
    """A server whose first version is 3."""
    labels = Labels()
    labels.current = "3"
    client, app = Client(script, labels), FastAPI(root_path=root)
    note_versions(client, labels)
    app.add_middleware(label_middleware, labels=labels)

    @app.post("/v1/completions")
    async def complete() -> dict[str, int]:
        return {"outputs": len([output async for output in client.generate("hello")])}

    @app.post("/v1/stream")
    async def stream() -> StreamingResponse:
        async def events() -> AsyncIterator[str]:
            async for output in client.generate("hello"):
                yield f"data: {output.request_id}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> list[str]:
        return ["one"]

    @app.get("/v1/broken")
    async def broken() -> None:
        raise RuntimeError("broken")

    @app.post("/health")
    async def health() -> dict[str, int]:
        return await complete()

    return TestClient(app, raise_server_exceptions=False), client


def headers(response: Any) -> tuple[str | None, str | None, str | None]:
    names = ("x-deltasync-version", "x-deltasync-first-version", "x-deltasync-last-version")
    return tuple(response.headers.get(name) for name in names)  # type: ignore[return-value]


WHOLE: dict[str, tuple[Script, tuple[str | None, str | None, str | None]]] = {
    "one version": ([Output("a", [done("3")])], ("3", None, None)),
    "tokens count, not what is live when they are sent": (
        [Output("a", [done("3")]), Switch("4")],
        ("3", None, None),
    ),
    "a span": ([Output("a", [Completion()]), Switch("4"), Output("a", [done("3", "4")])], ("3", "3", "4")),
    "a span over many": ([Output("a", [done("3", "4", "12")])], ("3", "3", "12")),
    "numbers, not letters": ([Output("a", [done("9", "10")])], ("9", "9", "10")),
    "back to an older one": ([Output("a", [done("4", "2")])], ("2", "2", "4")),
    "some of the weights of the start": ([Output("a", [done("default", "0")])], ("none", "none", "0")),
    "all of the weights of the start": ([Output("a", [done("default")])], ("none", None, None)),
    "two completions": ([Output("a", [done("3"), done("4", index=1)])], ("3", "3", "4")),
    "two completions that end apart": (
        [Output("a", [done("3")]), Output("a", [done("4", index=1)])],
        ("3", "3", "4"),
    ),
    "two prompts": ([Output("a", [done("3")]), Output("b", [done("5")])], ("3", "3", "5")),
    "what was said first is replaced by what vLLM noted": (
        [Output("a", [Completion()]), Output("a", [done("2")])],
        ("2", None, None),
    ),
    "ended without its versions": (
        [Output("a", [Completion()]), Switch("4"), Output("a", [Completion()])],
        ("3", None, None),
    ),
    "no tokens": ([Output("a", [])], ("3", None, None)),
    "nothing at all": ([Switch("4")], ("4", None, None)),
}


@pytest.mark.parametrize(("script", "wanted"), WHOLE.values(), ids=WHOLE.keys())
def test_whole_answers(script: Script, wanted: tuple[str | None, str | None, str | None]) -> None:
    http, client = served(script)
    response = http.post("/v1/completions")
    assert response.status_code == 200
    assert headers(response) == wanted
    assert response.json() == {"outputs": sum(isinstance(item, Output) for item in script)}
    assert client.is_closed


SPANS: dict[str, tuple[Script, str | None]] = {
    "one version": ([Output("a", [done("3")])], "0-3=3"),
    "one token": ([Output("a", [done("3", tokens=1)])], "0-0=3"),
    "a switch": ([Output("a", [Completion()]), Switch("4"), Output("a", [done("3", "4")])], "0-3=3,4-7=4"),
    "there and back": ([Output("a", [done("default", "0", "3", "0")])], "0-3=none,4-7=0,8-11=3,12-15=0"),
    "completions in the order of the answer": (
        [Output("a", [done("4", index=1)]), Output("a", [done("3", "4")])],
        "0-3=3,4-7=4;0-3=4",
    ),
    "prompts in the order of the request": (
        [Output(f"cmpl-7f-{i}", [done(str(i))]) for i in (10, 2, 0)],
        "0-3=0;0-3=2;0-3=10",
    ),
    "one without tokens": ([Output("a", [done()]), Output("a", [done("3", index=1)])], ";0-3=3"),
    "no tokens": ([Output("a", [done()])], None),
    "no answer": ([], None),
    "one that vLLM does not know": ([Output("a", [Completion()]), Output("a", [done("3", index=1)])], None),
    "tokens of a beam search are not those of the answer": ([Output("cmpl-7f-0-beam-1", [done("3")])], None),
    "too many": ([Output("a", [done(*("3", "4") * 300)])], None),
}


@pytest.mark.parametrize(("script", "wanted"), SPANS.values(), ids=SPANS.keys())
def test_versions_of_each_token(script: Script, wanted: str | None) -> None:
    http, _ = served(script)
    assert http.post("/v1/completions").headers.get("x-deltasync-versions") == wanted
    # Those of a stream are not known when its headers are sent.
    assert "x-deltasync-versions" not in http.post("/v1/stream").headers


PLAIN = Output("a", [PlainCompletion()])
UNRECORDED: dict[str, tuple[Script, tuple[str | None, str | None, str | None]]] = {
    "no switch": ([PLAIN, PLAIN], ("3", None, None)),
    "a switch after the last token": ([PLAIN, Switch("4")], ("3", None, None)),
    "a switch between tokens": ([PLAIN, Switch("4"), PLAIN], ("3", "3", "4")),
    # The first token may be from either version: it may have been on its way when the switch was done.
    "a switch before the first token": ([Switch("4"), PLAIN], ("3", "3", "4")),
    "two switches between tokens, there and back": (
        [PLAIN, Switch("9"), Switch("3"), PLAIN],
        ("3", "3", "9"),
    ),
    "two prompts": ([Output("a", [PlainCompletion()]), Switch("4"), Output("b", [PlainCompletion()])], ("3", "3", "4")),
}


@pytest.mark.parametrize(("script", "wanted"), UNRECORDED.values(), ids=UNRECORDED.keys())
def test_without_a_record_of_vllm_an_answer_has_all_versions_that_were_live_while_it_ran(
    script: Script, wanted: tuple[str | None, str | None, str | None]
) -> None:
    http, _ = served(script)
    assert headers(http.post("/v1/completions")) == wanted


def test_a_stream_without_a_record_of_vllm_ends_with_the_last_version() -> None:
    http, _ = served([PLAIN, Switch("4"), PLAIN])
    response = http.post("/v1/stream")
    assert headers(response) == ("3", None, None)
    assert response.text.endswith("data: [DONE]\n\n: x-deltasync-last-version: 4\n\n")


TOKEN = Output("a", [Completion()])
STREAMS: dict[str, tuple[Script, tuple[str | None, str | None, str | None], str]] = {
    "one version": ([TOKEN, Output("a", [done("3")])], ("3", None, None), ""),
    # The header waits for the first token: what was live when the request came does not matter.
    "a switch before the first token": ([Switch("4"), TOKEN, Output("a", [done("4")])], ("4", None, None), ""),
    "a switch after it": (
        [TOKEN, Switch("4"), Output("a", [done("3", "4")])],
        ("3", None, None),
        ": x-deltasync-last-version: 4\n: x-deltasync-versions: 0-3=3,4-7=4\n\n",
    ),
    "two completions": (
        [
            TOKEN,
            Output("a", [Completion(1)]),
            Output("a", [done("3")]),
            Switch("4"),
            Output("a", [done("3", "4", index=1)]),
        ],
        ("3", None, None),
        ": x-deltasync-last-version: 4\n: x-deltasync-versions: 0-3=3;0-3=3,4-7=4\n\n",
    ),
    "the last one is of one version only": (
        [TOKEN, Output("a", [done("3", "4")]), Output("a", [done("3", index=1)])],
        ("3", None, None),
        ": x-deltasync-last-version: 4\n: x-deltasync-versions: 0-3=3,4-7=4;0-3=3\n\n",
    ),
    "an end without its versions": (
        [TOKEN, Switch("4"), Output("a", [Completion(1)])],
        ("3", None, None),
        ": x-deltasync-last-version: 4\n\n",
    ),
    "no tokens": ([], ("3", None, None), ""),
}


@pytest.mark.parametrize(("script", "wanted", "comment"), STREAMS.values(), ids=STREAMS.keys())
def test_streams(script: Script, wanted: tuple[str | None, str | None, str | None], comment: str) -> None:
    http, client = served(script)
    response = http.post("/v1/stream")
    assert headers(response) == wanted
    sent = "".join(f"data: {item.request_id}\n\n" for item in script if isinstance(item, Output))
    assert response.text == sent + "data: [DONE]\n\n" + comment
    assert client.is_closed


def test_answers_without_the_engine_have_what_is_live() -> None:
    http, _ = served([])
    assert headers(http.get("/v1/models")) == ("3", None, None)
    assert headers(http.get("/v1/nothing")) == ("3", None, None)


def test_other_routes_are_left_alone() -> None:
    http, _ = served([Output("a", [done("3")])])
    assert headers(http.post("/health")) == (None, None, None)
    assert http.get("/v1/broken").status_code == 500


def test_a_server_behind_a_prefix() -> None:
    http, _ = served([Output("a", [done("5")])], root="/api")
    for path in ("/v1/completions", "/api/v1/completions"):
        assert headers(http.post(path)) == ("5", None, None)


def test_answers_at_the_same_time_have_each_their_own() -> None:
    """The same engine client serves both."""
    script = [Output("a", [done("3")]), Output("b", [done("7")])]
    labels = Labels()
    client, app = Client(script, labels), FastAPI()
    note_versions(client, labels)
    app.add_middleware(label_middleware, labels=labels)

    @app.post("/v1/{request}")
    async def complete(request: str) -> int:
        return len([output async for output in client.generate("", request_id=request)])

    http = TestClient(app)
    assert headers(http.post("/v1/a")) == ("3", None, None)
    assert headers(http.post("/v1/b")) == ("7", None, None)
    assert headers(http.post("/v1/c")) == ("none", None, None)
