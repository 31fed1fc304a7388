"""The control routes and their errors; requests that ask for a version are served, held back or refused."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse
from support import join
from support.feeds import Feed
from support.replicas import TorchTarget, follower

from deltasync.errors import (
    ConflictError,
    CorruptError,
    DeltasyncError,
    EngineError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    StoreError,
)
from deltasync.vllm import routes
from deltasync.vllm.labels import Labels, label_middleware
from deltasync.vllm.routes import Replica, Wanted, add_routes, token_middleware, version_middleware

TOKEN = "s3cret-täken"
ALLOWED = {"authorization": b"Bearer " + TOKEN.encode()}


class Server:
    """What an API server has: a follower of a real feed, with a target in this process."""

    def __init__(
        self,
        *,
        versions: int = 3,
        token: str | None = TOKEN,
        root: str = "",
        is_up: bool = True,
        has_weights: bool = True,
        has_adapter: bool = False,
    ) -> None:
        self.feed = Feed.of(versions)
        self.target = TorchTarget(self.feed.states[0].layout)
        self.follower = follower(self.feed.store, self.target, replica="me")
        replica = Replica(self.follower, self.target, way="push")
        self.adapter = TorchTarget(self.feed.states[0].layout)
        adapter = Replica(follower(self.feed.store, self.adapter), self.adapter, way="push", has_metrics=False)
        replicas = {**({None: replica} if has_weights else {}), **({"math": adapter} if has_adapter else {})}
        app = FastAPI(root_path=root)
        add_routes(app, lambda: replicas if is_up else None)
        app.add_middleware(token_middleware, token=token)

        @app.get("/v1/models")
        @app.get("/deltasyncs")
        async def others() -> str:
            return "others"

        self.http = TestClient(app, raise_server_exceptions=False)

    def post(self, verb: str, **fields: Any) -> Any:
        return self.http.post(f"/deltasync/{verb}", json=fields, headers=ALLOWED)

    def status(self) -> Any:
        return self.http.get("/deltasync/status", headers=ALLOWED).json()


VERBS = ("advance", "pin", "pause", "resume", "nudge", "scrub")
PATHS = [
    ("GET", "/deltasync"),
    ("GET", "/deltasync/"),
    ("GET", "/deltasync/status"),
    ("GET", "/deltasync/status/"),
    ("GET", "/deltasync/nothing/there"),
    ("DELETE", "/deltasync/status"),
    ("OPTIONS", "/deltasync/status"),
    ("POST", "/deltasync/ready"),
    ("GET", "/deltasync/ready/"),
    *(("POST", f"/deltasync/{verb}") for verb in VERBS),
]
WRONG: dict[str, dict[str, Any]] = {
    "none": {},
    "empty": {"authorization": ""},
    "no token": {"authorization": "Bearer "},
    "another": {"authorization": "Bearer s3cret"},
    "a longer one": {"authorization": ALLOWED["authorization"] + b"x"},
    "another scheme": {"authorization": b"Basic " + TOKEN.encode()},
    "no scheme": {"authorization": TOKEN.encode()},
    "another header": {"x-api-key": TOKEN.encode()},
}


def refused(response: Any) -> bool:
    """The same for all, so that nothing can be learned from it."""
    is_401 = response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    return is_401 and response.json() == {"error": {"kind": "unauthorized"}}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG.keys())
def test_without_the_token_every_path_is_401(given: dict[str, Any]) -> None:
    server = Server()
    for method, path in PATHS:
        assert refused(server.http.request(method, path, headers=given)), path
    assert server.target.version is None
    assert not server.follower.status().is_paused


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer "}, {"authorization": "Bearer None"}, ALLOWED])
def test_a_server_without_a_token_refuses_every_request(given: dict[str, Any]) -> None:
    server = Server(token=None)
    assert all(refused(server.http.request(method, path, headers=given)) for method, path in PATHS)


def test_the_token_twice_is_not_the_token() -> None:
    headers = [("authorization", ALLOWED["authorization"])] * 2
    assert refused(Server().http.get("/deltasync/status", headers=headers))


def test_web_sockets_are_refused_alike() -> None:
    with pytest.raises(WebSocketDenialResponse) as raised, Server().http.websocket_connect("/deltasync/status"):
        pass
    assert refused(raised.value)


def test_a_server_behind_a_prefix_is_guarded_as_well() -> None:
    server = Server(root="/api")
    for path in ("/deltasync/status", "/api/deltasync/status", "/api/deltasync/nothing"):
        assert refused(server.http.get(path)), path
    assert server.http.get("/api/deltasync/status", headers=ALLOWED).status_code == 200


def test_other_routes_need_no_token() -> None:
    server = Server()
    assert [server.http.get(path).json() for path in ("/v1/models", "/deltasyncs")] == ["others"] * 2
    assert server.http.get("/nothing").status_code == 404


def test_with_the_token_unknown_paths_are_unknown() -> None:
    assert Server().http.get("/deltasync/nothing", headers=ALLOWED).status_code == 404


def test_moves() -> None:
    server = Server()
    assert server.status()["version"] is None
    answer = server.post("advance", to=0).json()
    assert (answer["version"], answer["moved"]["version"], answer["moved"]["edges"]) == (0, 0, ["anchor"])
    answer = server.post("advance").json()
    assert (answer["version"], answer["moved"]["from_version"]) == (2, 0)
    assert server.post("advance").json() == {"version": 2, "moved": None}
    assert server.target.holds(server.feed.states[2])
    status = server.status()
    expected = {
        "replica": "me",
        "version": 2,
        "head": 2,
        "lag": 0,
        "engine": "torch",
        "way": "push",
        "is_paused": False,
        "is_ready": True,
    }
    assert expected.items() <= status.items()
    assert status["last"]["version"] == 2


def test_an_answer_without_a_body() -> None:
    """All fields may be left out."""
    server = Server()
    assert server.http.post("/deltasync/advance", headers=ALLOWED).json()["version"] == 2
    scrubbed = server.http.post("/deltasync/scrub", headers=ALLOWED).json()
    assert scrubbed == {"version": 2, "damaged": [], "unseen_elements": 0}


def test_pins() -> None:
    server = Server()
    assert server.post("pin", version=1).json()["pinned"] == 1
    assert server.post("advance").json()["version"] == 1
    assert server.post("pin", version=None).json()["pinned"] is None
    assert server.post("advance").json()["version"] == 2


def test_following_can_be_held() -> None:
    server = Server()
    assert server.post("pause").json()["is_paused"] is True
    assert server.post("nudge").json()["is_paused"] is True
    assert server.post("resume").json()["is_paused"] is False


@pytest.mark.parametrize("is_repaired", [True, False])
def test_damage_is_reported(is_repaired: bool) -> None:
    server = Server()
    server.post("advance")
    server.target.state["packed"][0, 0] ^= 1
    wanted = {"version": 2, "damaged": [{"tensor": "packed", "elements": 1}], "unseen_elements": 0}
    assert server.post("scrub", repair=is_repaired).json() == wanted
    assert server.target.holds(server.feed.states[2]) is is_repaired
    assert server.status()["counts"]["repaired"] == int(is_repaired)


ERRORS: list[tuple[DeltasyncError, int]] = [
    (NotFoundError("gone", hint="look elsewhere"), 404),
    (InvalidInputError("wrong"), 400),
    (MismatchError("another model", rule="engine.model", hint="serve it"), 409),
    (StoreError("no answer", transient=True), 502),
    (EngineError("it fails", hint="look at its log"), 503),
    (CorruptError("damaged", rule="payload.sha256"), 500),
    (FormatError("too new"), 500),
    (ConflictError("another one"), 500),
]


@pytest.mark.parametrize(("error", "status"), ERRORS, ids=[error.kind for error, _ in ERRORS])
def test_errors_have_a_status(error: DeltasyncError, status: int) -> None:
    server = Server()

    def fails(staged: object) -> None:
        raise error

    server.target.fails = fails
    answer = server.post("advance")
    assert answer.status_code == status
    fields = {"kind": error.kind, "message": error.message, "hint": error.hint, "rule": error.rule}
    assert answer.json() == {"error": fields}
    assert server.status()["error"] == f"{type(error).__name__}: {error}"
    server.target.fails = lambda staged: None
    assert server.post("advance").status_code == 200
    assert server.status()["error"] is None


@pytest.mark.parametrize(("verb", "field"), [("advance", "to"), ("pin", "version")])
@pytest.mark.parametrize("version", [3, 99, 10**18])
def test_an_unknown_version_names_the_range_of_the_feed(verb: str, field: str, version: int) -> None:
    server = Server()
    answer = server.post(verb, **{field: version})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["kind"] == "not_found"
    assert f"version {version} is not in" in error["message"]
    assert error["message"].endswith("which has 0 to 2")
    assert server.target.version is None


@pytest.mark.parametrize(("verb", "field"), [("advance", "to"), ("pin", "version")])
@pytest.mark.parametrize("version", ["one", 1.5, [1], -1, 10**40])
def test_what_is_no_version(verb: str, field: str, version: Any) -> None:
    server = Server()
    answer = server.post(verb, **{field: version})
    assert 400 <= answer.status_code < 500
    assert server.target.version is None


@pytest.mark.parametrize("token", [TOKEN, None])
def test_readiness_needs_no_token_and_gives_no_details(token: str | None) -> None:
    server = Server(token=token)
    answers = [server.http.get("/deltasync/ready")]
    server.follower.advance()
    answers.append(server.http.get("/deltasync/ready"))
    assert [(answer.status_code, answer.json()) for answer in answers] == [
        (503, {"ready": False}),
        (200, {"ready": True}),
    ]


def test_a_server_that_is_pushed_is_ready_while_a_version_is_live() -> None:
    """A version that was refused leaves the one before live; a write that failed leaves none."""
    server = Server()

    def ready() -> int:
        return server.http.get("/deltasync/ready").status_code

    assert server.post("advance", to=9).status_code == 404
    assert ready() == 503
    server.post("advance", to=1)
    assert server.post("advance", to=9).status_code == 404
    assert ready() == 200

    def tears(staged: object) -> None:
        server.target.version = None
        raise EngineError("half of it is written")

    server.target.fails = tears
    assert server.post("advance").status_code == 503
    assert ready() == 503


def test_before_the_server_is_up() -> None:
    server = Server(is_up=False)
    answer = server.http.get("/deltasync/status", headers=ALLOWED)
    assert answer.status_code == 503
    assert answer.json()["error"]["hint"] == "try again"
    assert server.http.get("/deltasync/ready").status_code == 503


def test_a_route_for_an_adapter() -> None:
    server = Server(has_adapter=True)
    assert server.http.get("/deltasync/ready").status_code == 503
    server.post("advance", to=2)
    assert server.http.get("/deltasync/ready").status_code == 503
    assert server.http.post("/deltasync/advance?adapter=math", json={"to": 1}, headers=ALLOWED).json()["version"] == 1
    assert (server.target.version, server.adapter.version) == (2, 1)
    assert server.http.get("/deltasync/ready").status_code == 200
    assert server.status()["adapters"]["math"]["version"] == 1
    answer = server.http.post("/deltasync/advance?adapter=chat", json={}, headers=ALLOWED)
    assert answer.status_code == 404
    assert answer.json()["error"]["hint"] == "it follows math"


def test_a_server_that_follows_only_adapters() -> None:
    server = Server(has_weights=False, has_adapter=True)
    answer = server.post("advance", to=1)
    assert answer.status_code == 400
    assert "follows no feed of weights" in answer.json()["error"]["message"]
    server.http.post("/deltasync/advance?adapter=math", json={}, headers=ALLOWED)
    assert list(server.status()) == ["adapters"]
    assert server.http.get("/deltasync/ready").status_code == 200


WAIT_S = "50"


class VersionedServer:
    """A server whose version changes on demand."""

    def __init__(self, label: str = "3", *, root: str = "") -> None:
        self.labels = Labels()
        self.labels.current = label
        self.is_closing = False
        app = FastAPI(root_path=root)
        app.add_middleware(version_middleware, labels=self.labels, is_closing=lambda: self.is_closing)
        app.add_middleware(label_middleware, labels=self.labels)

        @app.post("/v1/completions")
        @app.post("/inference/v1/generate")
        @app.post("/deltasync/advance")
        async def answer() -> str:
            return self.labels.current

        self.http = TestClient(app)

    @contextmanager
    def switching_to(self, label: str, *, after_s: float = 0.2) -> Iterator[None]:
        """Another version goes live during the block."""
        assert self.http.portal is not None
        portal = self.http.portal

        def switch() -> None:
            time.sleep(after_s)
            self.labels.is_switching = True
            self.labels.current = label
            portal.call(self.labels.end_switch)

        thread = threading.Thread(target=switch)
        thread.start()
        try:
            yield
        finally:
            join(thread)

    def post(self, path: str = "/v1/completions", **headers: str) -> Any:
        return self.http.post(path, headers={f"x-deltasync-{k.replace('_', '-')}": v for k, v in headers.items()})


SERVED: dict[str, dict[str, str]] = {
    "anything": {},
    "no version to wait for": {"wait_s": WAIT_S},
    "this one": {"version": "3"},
    "this one, written otherwise": {"version": " 003 "},
    "an older one": {"min_version": "0"},
    "at least this one": {"min_version": "3"},
    "both": {"min_version": "2", "version": "3"},
    "there is no need to wait": {"version": "3", "wait_s": WAIT_S},
}


@pytest.mark.parametrize("headers", SERVED.values(), ids=SERVED.keys())
def test_a_version_that_is_live(headers: dict[str, str]) -> None:
    answer = VersionedServer().post(**headers)
    assert (answer.status_code, answer.json()) == (200, "3")


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "a later one": ({"version": "4"}, "version 4"),
    "an older one": ({"version": "2"}, "version 2"),
    "at least a later one": ({"min_version": "4"}, "at least version 4"),
    "one of both": ({"min_version": "4", "version": "3"}, "version 3 and at least version 4"),
    "after some time": ({"min_version": "4", "wait_s": "0.05"}, "at least version 4"),
}


@pytest.mark.parametrize(("headers", "wanted"), REFUSED.values(), ids=REFUSED.keys())
def test_a_version_that_is_not_live_is_409(headers: dict[str, str], wanted: str) -> None:
    answer = VersionedServer().post(**headers)
    assert answer.status_code == 409
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-deltasync-version"] == "3"
    body = answer.json()
    assert body["version"] == 3
    assert body["error"]["kind"] == "version"
    assert body["error"]["message"] == f"the request asks for {wanted}, but version 3 is live"


def test_the_weights_of_the_start_are_no_version() -> None:
    answer = VersionedServer("none").post(min_version="0")
    assert (answer.status_code, answer.json()["version"]) == (409, None)
    assert answer.json()["error"]["message"] == "the request asks for at least version 0, but none is live"


BAD: dict[str, tuple[dict[str, str], str]] = {
    "no number": ({"version": "latest"}, "x-deltasync-version is 'latest'"),
    "empty": ({"version": ""}, "x-deltasync-version is ''"),
    "below zero": ({"min_version": "-1"}, "x-deltasync-min-version is '-1'"),
    "a fraction": ({"min_version": "1.0"}, "x-deltasync-min-version is '1.0'"),
    "no ASCII": ({"version": "\u00b2"}, "x-deltasync-version is '\u00c2\u00b2'"),
    "too long": ({"version": "1" * 19}, "x-deltasync-version is '1111"),
    "much too long": ({"version": "9" * 10_000}, "x-deltasync-version is '9999"),
    "no time": ({"version": "3", "wait_s": "soon"}, "x-deltasync-wait-s is 'soon'"),
    "without end": ({"version": "3", "wait_s": "inf"}, "x-deltasync-wait-s is 'inf'"),
    "not a number": ({"version": "3", "wait_s": "nan"}, "x-deltasync-wait-s is 'nan'"),
    "before now": ({"wait_s": "-1"}, "x-deltasync-wait-s is '-1'"),
}


@pytest.mark.parametrize(("headers", "message"), BAD.values(), ids=BAD.keys())
def test_a_value_that_is_wrong_is_400_and_names_the_header(headers: dict[str, str], message: str) -> None:
    answer = VersionedServer().http.post(
        "/v1/completions",
        headers=[(f"x-deltasync-{k.replace('_', '-')}".encode(), v.encode()) for k, v in headers.items()],
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["kind"] == "invalid_input"
    assert error["message"].startswith(f"the header {message}")
    assert error["hint"].startswith("send a ")
    assert len(answer.content) < 400


def test_a_header_that_is_given_twice_is_400() -> None:
    headers = [("x-deltasync-version", "3"), ("x-deltasync-version", "4")]
    answer = VersionedServer().http.post("/v1/completions", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the header x-deltasync-version is given twice"


def test_long_waits_are_cut() -> None:
    assert Wanted.from_headers([(b"x-deltasync-wait-s", b"1e9")]).wait_s == routes.WAIT_MOST_S
    with pytest.raises(InvalidInputError):
        Wanted.from_headers([(b"x-deltasync-wait-s", b"1e999")])


def test_a_request_waits_for_its_version() -> None:
    server = VersionedServer()
    with server.http, server.switching_to("4"):
        answer = server.post(version="4", wait_s=WAIT_S)
    assert (answer.status_code, answer.json()) == (200, "4")


def test_a_request_goes_on_waiting_where_another_version_goes_live() -> None:
    server = VersionedServer()
    with server.http, server.switching_to("4", after_s=0.1), server.switching_to("7", after_s=0.3):
        answer = server.post(min_version="6", wait_s=WAIT_S)
    assert (answer.status_code, answer.json()) == (200, "7")


@pytest.mark.parametrize(("wanted", "status"), [({"version": "3"}, 409), ({"min_version": "3"}, 200)])
def test_during_a_switch_the_version_after_it_counts(wanted: dict[str, str], status: int) -> None:
    """Also for a request that does not wait: it could not start earlier."""
    server = VersionedServer()
    server.labels.is_switching = True
    with server.http, server.switching_to("4"):
        answer = server.post(**wanted)
    assert answer.status_code == status
    assert answer.headers["x-deltasync-version"] == "4"


def test_a_switch_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_SWITCH_S", 0.05)
    server = VersionedServer()
    server.labels.is_switching = True
    answer = server.post(version="3")
    assert (answer.status_code, answer.json()["version"]) == (409, None)
    assert server.post().status_code == 200


def test_a_server_that_shuts_down_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_CLOSING_S", 0.05)
    server = VersionedServer()
    threading.Timer(0.2, lambda: setattr(server, "is_closing", True)).start()
    begun = time.monotonic()
    assert server.post(version="4", wait_s=WAIT_S).status_code == 409
    assert time.monotonic() - begun < 20


def test_every_route_but_the_control_routes() -> None:
    server = VersionedServer()
    assert server.post("/inference/v1/generate", version="4").status_code == 409
    assert server.post("/deltasync/advance", version="4").status_code == 200
    behind = VersionedServer(root="/api")
    for path in ("/v1/completions", "/api/v1/completions"):
        assert behind.post(path, version="4").status_code == 409
    assert behind.post("/api/deltasync/advance", version="4").status_code == 200


def test_many_requests_wait_at_once() -> None:
    labels = Labels()

    async def wait_for_version(version: int) -> bool:
        return await labels.wait_for(lambda: labels.version == version, 60.0)

    async def run() -> list[bool]:
        waits = [asyncio.create_task(wait_for_version(version)) for version in (1, 2) * 50]
        await asyncio.sleep(0.05)
        for label, woken in (("1", waits[::2]), ("2", waits[1::2])):
            assert not any(wait.done() for wait in woken)
            labels.current = label
            await labels.end_switch()
            # Before the next switch: a version that is live for a moment only is missed.
            await asyncio.wait(woken)
        return await asyncio.gather(*waits)

    assert asyncio.run(run()) == [True] * 100
