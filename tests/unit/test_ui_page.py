"""The page of a feed: its routes, who may read it, what it embeds."""

import gzip
import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support import LONG_S, join
from support.feeds import Feed
from support.replicas import wait_until

from deltasync.errors import InvalidInputError, NotFoundError, StoreError
from deltasync.format.sealed import Heartbeat
from deltasync.listener import Request, listening
from deltasync.store.memory import MemoryStore
from deltasync.ui import page as module
from deltasync.ui.page import Page, asset, report

HOSTILE = "</script><script>alert(1)</script>\x1b[31m"
LOCAL = {"Host": "127.0.0.1:8642"}


def page(feed: Feed | None = None, **options: Any) -> Page:
    made = Page((Feed.of(3) if feed is None else feed).store, **options)
    made.refresh()
    return made


def get(of: Page, path: str, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    response = of.respond(Request("GET", path, LOCAL if headers is None else headers))
    is_json = response.content_type == "application/json"
    return response.code, json.loads(response.content) if is_json else response.content


@contextmanager
def served(of: Page, *, has_token: bool = False) -> Iterator[str]:
    with listening(of.respond, "127.0.0.1", 0, has_token=has_token) as url:
        yield url.removeprefix("http://")


def test_the_routes_of_the_page() -> None:
    shown = page()
    code, found = get(shown, "/api/feed")
    assert code == 200
    assert (found["head"], len(found["versions"]), found["error"]) == (2, 3, None)
    code, detail = get(shown, "/api/versions/2")
    assert code == 200
    assert detail["manifest"]["version"] == 2
    assert detail["cells"]
    assert get(shown, "/api/versions/7")[0] == 404
    assert get(shown, "/api/versions/99999999999999999999")[0] == 404
    assert get(shown, "/assets/../page.py")[0] == 404
    assert get(shown, "/elsewhere")[0] == 404
    assert shown.respond(Request("POST", "/api/feed", LOCAL)).code == 405


def test_every_file_that_the_page_names_is_served_and_none_is_of_another_host() -> None:
    shown = page()
    code, html = get(shown, "/")
    named = re.findall(rb'(?:src|href)="(?!#|data:)([^"]+)"', html)
    assert code == 200
    assert len(named) == 4
    for name in named:
        assert get(shown, f"/{name.decode()}")[0] == 200
    for name in ("index.html", "app.css", "app.js"):
        assert not re.search(r"(?<!xmlns=\")https?://(?!www\.w3\.org/2000/svg)", asset(name)), name
    assert "MIT License" in asset("uPlot.LICENSE")
    for banned in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert banned not in asset("app.js")


def test_responses_carry_a_strict_policy() -> None:
    shown = page()
    for path in ("/", "/assets/app.js", "/api/feed", "/nowhere"):
        headers = shown.respond(Request("GET", path, LOCAL)).headers
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8642", "127.0.0.1.evil.example", "", "[::", "10.0.0.1"])
def test_without_a_token_only_names_of_this_machine_are_answered(host: str) -> None:
    """A page elsewhere whose name is made to lead to 127.0.0.1 must not read the feed."""
    assert get(page(), "/api/feed", {"Host": host})[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:8642"])
def test_names_of_this_machine(host: str) -> None:
    assert get(page(), "/api/feed", {"Host": host})[0] == 200


def test_with_a_token_data_needs_it_and_files_do_not() -> None:
    shown = page(token="secret")
    with served(shown, has_token=True) as address:
        for path, headers, wanted in (
            ("/", {}, 200),
            ("/api/feed", {}, 401),
            ("/api/feed", {"Authorization": "Bearer wrong"}, 401),
            ("/api/versions/1", {}, 401),
            ("/api/feed", {"Authorization": "Bearer secret"}, 200),
        ):
            connection = http.client.HTTPConnection(address, timeout=LONG_S)
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            assert response.status == wanted, path
            response.read()
            connection.close()


def test_other_addresses_need_a_token() -> None:
    refused = pytest.raises(InvalidInputError, match="no token")
    with refused, listening(page().respond, "0.0.0.0", 0, has_token=False):
        pass


def test_compressed_for_a_browser() -> None:
    response = page().respond(Request("GET", "/api/feed", {**LOCAL, "Accept-Encoding": "gzip, br"}))
    assert response.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(response.content))["head"] == 2


def test_a_store_that_vanishes_is_shown_with_what_was_read_last() -> None:
    feed, is_away = Feed.of(3), False

    class Store(MemoryStore):
        def get_range(self, key: str, offset: int, length: int) -> bytes:
            if is_away:
                raise StoreError("no route to host", transient=True, hint="wait")
            return super().get_range(key, offset, length)

    store = Store()
    for item in feed.store.list():
        store.put(item.key, feed.store.get(item.key))
    now = 1000.0
    shown = Page(store, clock=lambda: now)
    assert get(shown, "/api/feed") == (200, {"loading": True})
    shown.refresh()
    is_away = True
    shown.refresh()
    now += 60
    shown.refresh()
    code, found = get(shown, "/api/feed")
    assert (code, found["head"]) == (200, 2)
    assert found["error"] == {"kind": "store", "message": "no route to host", "hint": "wait", "since_unix_s": 1000.0}
    is_away = False
    shown.refresh()
    assert get(shown, "/api/feed")[1]["error"] is None


def test_a_store_that_was_never_reached_is_shown_as_such() -> None:
    class Away(MemoryStore):
        def get_range(self, key: str, offset: int, length: int) -> bytes:
            raise StoreError("away", transient=True)

    shown = Page(Away())
    shown.refresh()
    found = get(shown, "/api/feed")[1]
    assert (found["head"], found["error"]["message"]) == (None, "away")


def test_the_feed_is_read_only_while_someone_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each read it waits for a request, however long that takes."""
    monkeypatch.setattr(module, "POLL_S", 0.001)
    shown, reads, reads_at_wait = Page(Feed.of(2).store), 0, []
    refresh = shown.refresh

    def counting() -> None:
        nonlocal reads
        reads += 1
        refresh()
        if reads > 100:
            shown.stop()

    class Asked(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is None
            reads_at_wait.append(reads)
            return super().wait(LONG_S)

    monkeypatch.setattr(shown, "refresh", counting)
    monkeypatch.setattr(shown, "_asked", Asked())
    thread = threading.Thread(target=shown.run)
    thread.start()
    try:
        for wanted in (1, 2, 3):
            wait_until(lambda wanted=wanted: reads >= wanted)
            get(shown, "/api/feed")
    finally:
        shown.stop()
        join(thread)
    assert reads_at_wait[:3] == [1, 2, 3]


def test_a_report_has_everything_inside_and_escapes_foreign_text() -> None:
    feed = Feed.of(3)
    feed.log.beat(Heartbeat("r", 2, 1, {"engine": HOSTILE}))
    html, overview = report(feed.store)
    assert overview.head is not None
    assert not re.findall(r'<(?:script|link)[^>]+(?:src|href)="(?!data:)', html)
    assert HOSTILE not in html
    data = json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)[1])  # type: ignore[index]
    assert data["feed"]["replicas"][0]["engine"] == HOSTILE
    assert set(data["details"]) == {"0", "1", "2"}
    assert html.count("<script") == 3
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert policy[1].count("'sha256-") == 4
    assert "unsafe" not in policy[1]


def test_a_report_of_nothing_is_refused() -> None:
    with pytest.raises(NotFoundError, match="there is no version"):
        report(MemoryStore())
