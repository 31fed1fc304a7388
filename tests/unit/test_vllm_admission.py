"""Requests that ask for a version: served, held back for a while, or refused with what is live."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from support import join

from deltasync.errors import InvalidInputError
from deltasync.vllm import routes
from deltasync.vllm.labels import Labels, label_middleware
from deltasync.vllm.routes import Wanted, version_middleware

LONG_S = "50"


class Server:
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
    "no version to wait for": {"wait_s": LONG_S},
    "this one": {"version": "3"},
    "this one, written otherwise": {"version": " 003 "},
    "an older one": {"min_version": "0"},
    "at least this one": {"min_version": "3"},
    "both": {"min_version": "2", "version": "3"},
    "there is no need to wait": {"version": "3", "wait_s": LONG_S},
}


@pytest.mark.parametrize("headers", SERVED.values(), ids=SERVED.keys())
def test_a_version_that_is_live(headers: dict[str, str]) -> None:
    answer = Server().post(**headers)
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
    answer = Server().post(**headers)
    assert answer.status_code == 409
    assert answer.headers["retry-after"] == "1"
    assert answer.headers["x-deltasync-version"] == "3"
    body = answer.json()
    assert body["version"] == 3
    assert body["error"]["kind"] == "version"
    assert body["error"]["message"] == f"the request asks for {wanted}, but version 3 is live"


def test_the_weights_of_the_start_are_no_version() -> None:
    answer = Server("none").post(min_version="0")
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
    answer = Server().http.post(
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
    answer = Server().http.post("/v1/completions", headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "the header x-deltasync-version is given twice"


def test_long_waits_are_cut() -> None:
    assert Wanted.from_headers([(b"x-deltasync-wait-s", b"1e9")]).wait_s == routes.WAIT_MOST_S
    with pytest.raises(InvalidInputError):
        Wanted.from_headers([(b"x-deltasync-wait-s", b"1e999")])


def test_a_request_waits_for_its_version() -> None:
    server = Server()
    with server.http, server.switching_to("4"):
        answer = server.post(version="4", wait_s=LONG_S)
    assert (answer.status_code, answer.json()) == (200, "4")


def test_a_request_goes_on_waiting_where_another_version_goes_live() -> None:
    server = Server()
    with server.http, server.switching_to("4", after_s=0.1), server.switching_to("7", after_s=0.3):
        answer = server.post(min_version="6", wait_s=LONG_S)
    assert (answer.status_code, answer.json()) == (200, "7")


@pytest.mark.parametrize(("wanted", "status"), [({"version": "3"}, 409), ({"min_version": "3"}, 200)])
def test_during_a_switch_the_version_after_it_counts(wanted: dict[str, str], status: int) -> None:
    """Also for a request that does not wait: it could not start earlier."""
    server = Server()
    server.labels.is_switching = True
    with server.http, server.switching_to("4"):
        answer = server.post(**wanted)
    assert answer.status_code == status
    assert answer.headers["x-deltasync-version"] == "4"


def test_a_switch_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_SWITCH_S", 0.05)
    server = Server()
    server.labels.is_switching = True
    answer = server.post(version="3")
    assert (answer.status_code, answer.json()["version"]) == (409, None)
    assert server.post().status_code == 200


def test_a_server_that_shuts_down_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_CLOSING_S", 0.05)
    server = Server()
    threading.Timer(0.2, lambda: setattr(server, "is_closing", True)).start()
    begun = time.monotonic()
    assert server.post(version="4", wait_s=LONG_S).status_code == 409
    assert time.monotonic() - begun < 20


def test_every_route_but_the_control_routes() -> None:
    server = Server()
    assert server.post("/inference/v1/generate", version="4").status_code == 409
    assert server.post("/deltasync/advance", version="4").status_code == 200
    behind = Server(root="/api")
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
