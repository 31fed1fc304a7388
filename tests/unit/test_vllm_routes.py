"""The control routes: without the token every answer is the same, and each kind of error has a status code."""

from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient, WebSocketDenialResponse
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
from deltasync.vllm.routes import Replica, add_routes, token_middleware

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
