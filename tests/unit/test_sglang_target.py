"""An SGLang server as target, on a stand-in with the routes of release 0.5.23."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from sglang_stand_in import RELEASE, TABLE, SglangStandIn, sglang_server
from support import join
from support.helpers import changed, state, write_sharded

import deltasync
from deltasync import Follower
from deltasync.cli import main as cli
from deltasync.errors import EngineError, InvalidInputError
from deltasync.feed.log import Log
from deltasync.listener import Request, Response, listening
from deltasync.sglang import SglangTarget
from deltasync.sglang.target import IN_PLACE_ROUTES, ROUTES, TOKEN, UNKNOWN, SglangServer
from deltasync.store import open_store

ROUND = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.fixture
def server() -> Iterator[SglangStandIn]:
    with sglang_server() as found:
        yield found


@pytest.fixture
def feed(tmp_path: Path) -> str:
    """A feed with one version."""
    publish(tmp_path, 0)
    return str(tmp_path / "feed")


def publish(tmp_path: Path, number: int) -> None:
    write_sharded(tmp_path / f"c{number}", changed(state(), seed=number))
    deltasync.publish(str(tmp_path / "feed"), tmp_path / f"c{number}")


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_every_route_and_field_that_is_used_is_in_the_table_of_the_release() -> None:
    assert RELEASE == "0.5.23"
    for route, fields in {**ROUTES, **IN_PLACE_ROUTES}.items():
        assert set(fields) <= set(TABLE[route])


def test_a_server_gets_each_version_and_says_so(tmp_path: Path, feed: str, server: SglangStandIn) -> None:
    target = SglangTarget(tmp_path / "live", server.url)
    with Follower(feed, target, replica="one") as follower:
        for version in range(3):
            if version:
                publish(tmp_path, version)
            follower.advance()
            assert [route for route, _ in server.calls] == ROUND
            assert server.calls[1][1]["model_path"] == str(tmp_path / "live")
            assert server.digest == deltasync.digest(tmp_path / f"c{version}").hex
            assert server.weight_version == str(version)
            assert (target.version, server.paused, server.is_cache_flushed) == (version, None, True)
            server.calls.clear()
        assert follower.advance() is None
        assert server.calls == []
        [beat] = Log(open_store(feed)).heartbeats()
        assert (beat.version, beat.facts["engine"]) == (2, f"sglang at {server.url}")


def test_a_server_that_was_restarted_loads_the_version_again(
    tmp_path: Path, feed: str, server: SglangStandIn, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    target = SglangTarget(tmp_path / "live", server.url, clock=clock)
    with Follower(feed, target) as follower:
        follower.advance()
        folder = (tmp_path / "live").resolve()
        server.restart()
        target.look()
        assert target.version == 0, "it was asked just now"
        clock.now_s += 60
        target.look()
        assert target.version is None
        assert "loaded again" in caplog.text
        follower.advance()
        assert (target.version, server.weight_version) == (0, "0")
        assert (tmp_path / "live").resolve() == folder, "the folder was right"


@pytest.mark.parametrize("failure", ["refused", "other label", "half done", "gone"])
def test_a_server_that_fails_is_reported_and_generates_on(
    tmp_path: Path, feed: str, server: SglangStandIn, failure: str
) -> None:
    target = SglangTarget(tmp_path / "live", server.url)
    with Follower(feed, target) as follower:
        follower.advance()
        publish(tmp_path, 1)
        server.calls.clear()
        if failure == "refused":
            server.refusal = "derived weight caches exist"
        elif failure == "other label":
            server.forgets_label = True
        elif failure == "half done":
            server.refuses_flush = True
        else:
            target._server.url = "http://127.0.0.1:9"
        with pytest.raises(EngineError) as error:
            follower.advance()
        expected = {
            "refused": "derived weight caches exist",
            "other label": "has the weights '0' after it loaded version 1",
            "half done": "the cache was not flushed",
            "gone": "cannot be reached",
        }
        assert expected[failure] in error.value.message
        assert target.version is None
        assert server.paused is None
        failed = [*ROUND[:2], "/update_weight_version", ROUND[2]]
        assert [route for route, _ in server.calls] == ([] if failure == "gone" else failed)
        if failure != "gone":
            assert server.weight_version == UNKNOWN, "its weights may be those of version 0 or 1"
        server.refusal, server.forgets_label, server.refuses_flush, target._server.url = None, False, False, server.url
        follower.advance()
        assert (target.version, server.digest) == (1, deltasync.digest(tmp_path / "c1").hex)


def test_an_answer_that_is_not_http_is_a_failure_of_the_server(tmp_path: Path, feed: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with listening.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        target = SglangTarget(tmp_path / "live", f"http://127.0.0.1:{listening.getsockname()[1]}")
        with Follower(feed, target) as follower, pytest.raises(EngineError, match="cannot be reached: nonsense"):
            follower.advance()
        join(thread)


def test_a_server_of_another_release_is_refused_before_anything_is_written(
    tmp_path: Path, feed: str, server: SglangStandIn
) -> None:
    without_field = {
        name: spec for name, spec in TABLE["/update_weights_from_disk"].items() if name != "weight_version"
    }
    for table, message in (
        ({**TABLE, "/update_weights_from_disk": without_field}, "takes no weight_version"),
        (
            {name: fields for name, fields in TABLE.items() if name != "/pause_generation"},
            "no route POST /pause_generation",
        ),
    ):
        server.table = table
        with (
            closing(SglangTarget(tmp_path / "live", server.url)) as target,
            Follower(feed, target) as follower,
            pytest.raises(InvalidInputError, match=message),
        ):
            follower.advance()
        assert server.calls == []
        assert not (tmp_path / "live").exists()
    server.table, server.has_openapi = TABLE, False
    with Follower(feed, SglangTarget(tmp_path / "live", server.url)) as follower:
        follower.advance()
    assert server.weight_version == "0"


def test_options_reach_the_server(
    tmp_path: Path, feed: str, server: SglangStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").symlink_to(tmp_path / "live")
    server.token = "secret"
    command = ["follow", feed, "--target", str(tmp_path / "live"), "--once", "--sglang", server.url]
    command += ["--pause", "in_place", "--keep-cache", "--sglang-path", str(tmp_path / "there")]
    assert cli.main(command) == 1
    monkeypatch.setenv(TOKEN, "secret")
    assert cli.main(command) == 0
    assert server.calls[0] == ("/pause_generation", {"mode": "in_place"})
    assert server.calls[1][1] == {"model_path": str(tmp_path / "there"), "weight_version": "0", "flush_cache": False}
    assert cli.main([*command, "--exec", "true"]) == 1


def test_the_key_is_not_sent_to_where_a_server_redirects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, "secret")
    keys: dict[str, str | None] = {}

    def respond(request: Request) -> Response:
        keys[request.path] = request.headers.get("Authorization")
        if request.path == "/model_info":
            return Response(307, "text/plain", b"", {"Location": "/elsewhere"})
        return Response.json(200, {"weight_version": "3"})

    with listening(respond, "127.0.0.1", 0, has_token=False) as url:
        assert SglangServer(url).label() == "3"
    assert keys == {"/model_info": "Bearer secret", "/elsewhere": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"server": "localhost:30000"}, "not the URL"),
        ({"server": "http://user:secret@localhost:30000"}, r"^the URL of a server must not have a password"),
        ({"server": "http://localhost:30000?key=secret"}, r"^the URL of a server must not have a password"),
        ({"pause": "in_place"}, "cannot flush"),
        ({"pause": "wait"}, "pause must be"),
        ({"load_s": 0}, "load_s must be above 0"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        SglangTarget(tmp_path / "live", **{"server": "http://127.0.0.1:1", **options})  # type: ignore[arg-type]
