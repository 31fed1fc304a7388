"""The page of a feed: served while it is watched, or written as one file that needs nothing else."""

import base64
import gzip
import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from deltasync.errors import DeltasyncError, NotFoundError
from deltasync.feed.log import Log
from deltasync.listener import Request, Response
from deltasync.store.protocol import Store
from deltasync.ui.index import version_json
from deltasync.ui.overview import BEHIND_VERSIONS, Overview, Watch

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two reads of the feed while someone looks at the page."""

REPORT_VERSIONS = 16
"""Versions whose details are in a report: the newest."""

_REPORT_MARK = '<meta name="generator" content="deltasync report">'
"""Near the start of every report: a file without it is not overwritten by one."""

_MARK_WITHIN_BYTES = 1024
_DETAILS_MAX = 64
_VERSION = re.compile(r"/api/versions/([0-9]{1,15})", re.ASCII)
_TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_STYLES = ("uPlot.min.css", "app.css")
_SCRIPTS = ("uPlot.iife.min.js", "app.js")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def asset(name: str) -> str:
    """A file of the page, from the package."""
    return files("deltasync.ui").joinpath("assets", name).read_text(encoding="utf-8")


def feed_json(overview: Overview, error: dict[str, Any] | None = None) -> dict[str, Any]:
    """What the page shows: the overview, its alerts, and why it is no longer read, if it is not."""
    found = [asdict(alert) for alert in overview.alerts()]
    rules = {"alerts": found, "ended": overview.has_ended, "behind_versions": BEHIND_VERSIONS}
    return {**overview.to_json(), **rules, "error": error}


class Page:
    """Reads a feed while someone looks at it, and answers the requests of the page. It never writes."""

    def __init__(self, store: Store, *, token: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._watch = Watch(store, clock=clock)
        self._token = token
        self._clock = clock
        self._log = Log(store)
        self._overview: Overview | None = None
        self._error: dict[str, Any] | None = None
        self._details: dict[int, dict[str, Any]] = {}
        self._details_lock = threading.Lock()
        self._asked = threading.Event()
        self._stopped = threading.Event()
        self._assets = {"/": ("html", asset("index.html").encode())}
        self._assets |= {
            f"/assets/{name}": (name.rpartition(".")[2], asset(name).encode()) for name in (*_STYLES, *_SCRIPTS)
        }

    def run(self) -> None:
        """Poll the feed until `stop`. It waits while the page is not open anywhere."""
        while not self._stopped.is_set():
            self._asked.clear()
            self.refresh()
            if not self._stopped.wait(POLL_S):
                self._asked.wait()

    def stop(self) -> None:
        """Let `run` return."""
        self._stopped.set()
        self._asked.set()

    def refresh(self) -> None:
        """Read the feed once. An error is kept to be shown: the last overview stays."""
        try:
            self._overview = self._watch.refresh()
            self._error = None
        except DeltasyncError as error:
            logger.info("the feed cannot be read: %s", error)
            since = self._clock() if self._error is None else self._error["since_unix_s"]
            self._error = {**_error_json(error), "since_unix_s": since}

    def respond(self, request: Request) -> Response:
        """The response to a request. Only GET is answered."""
        content = self._assets.get(request.path)
        if request.method != "GET":
            return self._json(405, {"error": {"kind": "method", "message": "this page is read-only"}})
        if self._token is None and not request.is_local:
            return self._json(403, {"error": {"kind": "host", "message": "open it as 127.0.0.1 or localhost"}})
        if content is not None:
            return Response(200, _TYPES[content[0]], content[1], _HEADERS)
        if not request.is_allowed(self._token):
            refused = Response.unauthorized()
            return Response(refused.code, refused.content_type, refused.content, {**_HEADERS, **refused.headers})
        if request.path == "/api/feed":
            self._asked.set()
            overview, error = self._overview, self._error
            if overview is None and error is None:
                return self._json(200, {"loading": True})
            if overview is None:
                # The feed could not be read even once.
                overview = Overview(self._log.store.url, self._clock())
            encoded = json.dumps(feed_json(overview, error)).encode()
            if "gzip" in request.headers.get("Accept-Encoding", ""):
                headers = {**_HEADERS, "Content-Encoding": "gzip"}
                return Response(200, "application/json", gzip.compress(encoded, 1), headers)
            return Response(200, "application/json", encoded, _HEADERS)
        if (match := _VERSION.fullmatch(request.path)) is not None:
            return self._version(int(match[1]))
        return self._json(404, {"error": {"kind": "not_found", "message": "there is nothing here"}})

    def _version(self, version: int) -> Response:
        try:
            with self._details_lock:
                detail = self._details.get(version)
                if detail is None:
                    detail = version_json(self._log, version)
                    if len(self._details) >= _DETAILS_MAX:
                        del self._details[next(iter(self._details))]
                    self._details[version] = detail
        except DeltasyncError as error:
            return self._json(404 if isinstance(error, NotFoundError) else 502, {"error": _error_json(error)})
        return self._json(200, detail)

    def _json(self, code: int, value: dict[str, Any]) -> Response:
        return Response.json(code, value, _HEADERS)


def report(store: Store, *, clock: Callable[[], float] = time.time) -> tuple[str, Overview]:
    """The page as one file that makes no request, and what it shows. NotFoundError if the feed has no version."""
    watch = Watch(store, clock=clock)
    watch.log.require_head()
    overview = watch.refresh()
    details: dict[str, Any] = {}
    for m in overview.versions[-REPORT_VERSIONS:]:
        try:
            details[str(m.version)] = version_json(watch.log, m.version)
        except DeltasyncError as error:
            details[str(m.version)] = {"error": _error_json(error)}
    styles = [asset(name) for name in _STYLES]
    scripts = [asset(name) for name in _SCRIPTS]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_source_hash, scripts))}; "
        f"style-src {' '.join(map(_source_hash, styles))}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # In a script element, `<` could begin its end.
    data = json.dumps({"feed": feed_json(overview), "details": details}).replace("<", "\\u003c")
    html = asset("index.html")
    html = html.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n{_REPORT_MARK}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    for name, text in zip(_STYLES, styles, strict=True):
        html = html.replace(f'<link rel="stylesheet" href="assets/{name}">', f"<style>{text}</style>")
    for i, (name, text) in enumerate(zip(_SCRIPTS, scripts, strict=True)):
        before = f'<script type="application/json" id="report">{data}</script>\n' if i == 0 else ""
        html = html.replace(f'<script src="assets/{name}"></script>', f"{before}<script>{text}</script>")
    return html, overview


def is_report(path: Path) -> bool:
    """Whether a file is a report that was written earlier."""
    with path.open("rb") as file:
        return _REPORT_MARK.encode() in file.read(_MARK_WITHIN_BYTES)


def _source_hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _error_json(error: DeltasyncError) -> dict[str, Any]:
    return {"kind": error.kind, "message": error.message, "hint": error.hint}
