"""A stand-in for the Hugging Face Hub: the routes of buckets, and the content store (CAS) behind them."""

import http.server
import json
import re
import secrets
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

if TYPE_CHECKING:
    # Not at run time: it opens its log when it is imported, and how that is done is up to the code under test.
    import hf_xet

from . import join


@dataclass(frozen=True, slots=True)
class Xorb:
    """A run of compressed chunks, as the client sent it."""

    data: bytes
    ends: tuple[int, ...]
    """Where each chunk ends in `data`."""
    lengths: tuple[int, ...]
    """What each chunk holds, uncompressed."""

    @classmethod
    def parse(cls, data: bytes) -> "Xorb":
        """Chunk headers have 8 bytes: version, compressed length (3), scheme, length (3). A footer may follow."""
        ends, lengths, position = [], [], 0
        while position < len(data) and not data.startswith(b"XETBLOB", position):
            lengths.append(int.from_bytes(data[position + 5 : position + 8], "little"))
            position += 8 + int.from_bytes(data[position + 1 : position + 4], "little")
            ends.append(position)
        return cls(data, tuple(ends), tuple(lengths))


@dataclass(frozen=True, slots=True)
class Segment:
    """Chunks `first` up to `last` of a xorb: a piece of a file."""

    xorb: str
    nbytes: int
    first: int
    last: int


def parse_shard(data: bytes) -> dict[str, tuple[Segment, ...]]:
    """The files that a shard describes: records of 48 bytes behind a header of 48, up to one whose hash is all ones."""
    files: dict[str, tuple[Segment, ...]] = {}
    position = 48
    while True:
        name, flags, count = struct.unpack_from("<32sII", data, position)
        if name == b"\xff" * 32:
            return files
        records = [struct.unpack_from("<32sIIII", data, position + 48 * (1 + i)) for i in range(count)]
        files[_hex(name)] = tuple(Segment(_hex(r[0]), r[2], r[3], r[4]) for r in records)
        verification, metadata = flags >> 31 & 1, flags >> 30 & 1
        position += 48 * (1 + count * (1 + verification) + metadata)


def _hex(raw: bytes) -> str:
    """Hashes are written as four little-endian words."""
    return "".join(raw[i : i + 8][::-1].hex() for i in range(0, 32, 8))


class ContentStore:
    """What clients uploaded, and how to build files from it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.token = secrets.token_hex(16)
        """What the Hub gives to clients for this store."""
        self.xorbs: dict[str, Xorb] = {}
        self.files: dict[str, tuple[Segment, ...]] = {}

    def size(self, name: str) -> int:
        return sum(segment.nbytes for segment in self.files[name])

    def plan(self, name: str, begin: int, end: int) -> dict[str, Any]:
        """How to build bytes `begin` to `end` of a file: chunks, and where they lie in which xorb."""
        terms: list[dict[str, Any]] = []
        spans: dict[str, list[tuple[int, int]]] = {}
        skipped = position = 0
        for segment in self.files[name]:
            lengths = self.xorbs[segment.xorb].lengths
            starts = list(accumulate(lengths[segment.first : segment.last], initial=position))
            wanted = [i for i in range(len(starts) - 1) if starts[i + 1] > begin and starts[i] < end]
            position = starts[-1]
            if not wanted:
                continue
            if not terms:
                skipped = begin - starts[wanted[0]]
            first, last = segment.first + wanted[0], segment.first + wanted[-1] + 1
            span = {"start": first, "end": last}
            terms.append({"hash": segment.xorb, "unpacked_length": sum(lengths[first:last]), "range": span})
            spans.setdefault(segment.xorb, []).append((first, last))
        sources = {xorb: [self._source(xorb, *span) for span in _merged(found)] for xorb, found in spans.items()}
        return {"offset_into_first_range": skipped, "terms": terms, "fetch_info": sources}

    def _source(self, name: str, first: int, last: int) -> dict[str, Any]:
        ends = self.xorbs[name].ends
        place = {"start": 0 if first == 0 else ends[first - 1], "end": ends[last - 1] - 1}
        return {"range": {"start": first, "end": last}, "url": f"{self.url}/chunks/{name}", "url_range": place}

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Bytes of a file, put together by the client's own library through the routes of the stand-in."""
        if begin >= end:
            return b""
        group = self._session.new_download_stream_group(
            endpoint=self.url, token=self.token, token_expiry_unix_secs=int(time.time()) + 3600
        )
        import hf_xet

        return b"".join(group.download_stream(hf_xet.XetFileInfo(name, self.size(name)), begin, end))

    @cached_property
    def _session(self) -> "hf_xet.XetSession":
        import hf_xet

        return hf_xet.XetSession()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The fewest spans that cover these: the client needs one for each term, and the same chunk in no two of them."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


PAGE_ENTRIES = 1000
_BUCKET = r"/api/buckets/([^/]+/[^/]+)"
_HASH = r"([0-9a-f]{64})"


@dataclass(slots=True)
class Fault:
    """What becomes of the next requests to a route: an error status, or no answer at all."""

    route: str
    status: int | None
    times: int
    after: bool
    """Whether the request is carried out before."""


@dataclass
class Hub:
    """The state of the stand-in, and what tests may ask of it."""

    url: str
    home: str
    token: str = field(default_factory=lambda: f"hf_{secrets.token_hex(16)}")
    """The one valid token. Change it, and requests with the old one are refused."""
    writable: bool = True
    """Whether the token may write."""
    ranged: bool = True
    """Whether downloads honour ranges; otherwise they send the whole file."""
    prefixed: bool = True
    """Whether listings honour the prefix; otherwise they list the whole bucket."""
    requests: Counter[str] = field(default_factory=Counter)
    """How often each route was asked, by its name."""
    buckets: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    """Paths that a batch may not touch, with the reason given to the client."""
    faults: list[Fault] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        self.cas = ContentStore(f"{self.url}/cas")

    def create_bucket(self, bucket_id: str = "user/feeds") -> str:
        """An empty bucket; its id."""
        self.buckets[bucket_id] = {}
        return bucket_id

    def environment(self) -> dict[str, str]:
        """The variables that send the client here, and nowhere else."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": self.token,
            "HF_HOME": self.home,
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_XET_TELEMETRY_ENABLED": "0",
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",
        }

    def fail(self, route: str, *, status: int | None, times: int = 1, after: bool = False) -> None:
        """Let the next requests to a route fail, with a status or (None) with a closed connection.

        Routes: create, tree, paths, batch, token, resolve, bridge; those of the CAS: xorb, shard, plan, chunks.
        """
        self.faults.append(Fault(route, status, times, after))

    def enter(self, route: str) -> Fault | None:
        """Counts a request; the fault that it meets."""
        with self.lock:
            self.requests[route] += 1
            for fault in self.faults:
                if fault.route == route and fault.times > 0:
                    fault.times -= 1
                    return fault
            return None

    def apply(self, bucket: dict[str, dict[str, Any]], operation: dict[str, Any]) -> str | None:
        """One operation of a batch; the reason if it fails."""
        path = operation["path"]
        if path in self.refused:
            return self.refused[path]
        if operation["type"] == "deleteFile":
            return None if bucket.pop(path, None) is not None else "file not found"
        if operation["xetHash"] not in self.cas.files:
            return "unknown content"
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        size = self.cas.size(operation["xetHash"])
        bucket[path] = {"type": "file", "path": path, "size": size, "xetHash": operation["xetHash"], "uploadedAt": now}
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    """The routes. Each method is named after its route and gets the parts of the path."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    ROUTES = (
        ("POST", rf"{_BUCKET}", "create"),
        ("GET", rf"{_BUCKET}/tree(?:/(.*))?", "tree"),
        ("POST", rf"{_BUCKET}/paths-info", "paths"),
        ("POST", rf"{_BUCKET}/batch", "batch"),
        ("GET", rf"{_BUCKET}/xet-(read|write)-token", "token"),
        ("HEAD", r"/buckets/([^/]+/[^/]+)/resolve/(.+)", "resolve"),
        ("GET", r"/buckets/([^/]+/[^/]+)/resolve/(.+)", "resolve"),
        ("GET", rf"/bridge/{_HASH}", "bridge"),
        ("POST", rf"/cas/v1/xorbs/default/{_HASH}", "xorb"),
        ("POST", r"/cas/v1/shards", "shard"),
        ("GET", rf"/cas/v1/reconstructions/{_HASH}", "plan"),
        ("GET", rf"/cas/chunks/{_HASH}", "chunks"),
    )
    PRESIGNED = frozenset({"bridge", "chunks"})
    WRITES = frozenset({"create", "batch"})

    def _route(self) -> None:
        self.body = self._read_body()
        self.fault: Fault | None = None
        split = urlsplit(self.path)
        self.query = parse_qs(split.query)
        for method, pattern, name in self.ROUTES:
            match = re.fullmatch(pattern, split.path)
            if match is not None and method == self.command:
                self._dispatch(name, [unquote(part) if part is not None else "" for part in match.groups()])
                return
        # Newer forms of some CAS routes are tried first: on 404 the client goes on with those above.
        self._refuse(404, "no such route")

    do_GET = do_POST = do_HEAD = _route  # noqa: N815

    def handle(self) -> None:
        # A client may end in the middle of an answer.
        with suppress(ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def create(self, bucket_id: str) -> None:
        with self.hub.lock:
            taken = bucket_id in self.hub.buckets
            if not taken:
                self.hub.create_bucket(bucket_id)
        answer = {"url": f"{self.hub.url}/buckets/{bucket_id}", "id": bucket_id}
        self._json(answer, status=409 if taken else 200)

    def tree(self, bucket_id: str, prefix: str) -> None:
        prefix = prefix if self.hub.prefixed else ""
        cursor = self.query.get("cursor", [""])[0]
        with self.hub.lock:
            bucket = self.hub.buckets[bucket_id]
            found = [bucket[path] for path in sorted(bucket) if path.startswith(prefix) and path > cursor]
        page, headers = found[:PAGE_ENTRIES], {}
        if len(found) > len(page):
            path, last = quote(prefix, safe=""), quote(page[-1]["path"], safe="")
            address = f"{self.hub.url}/api/buckets/{bucket_id}/tree{'/' if path else ''}{path}"
            headers["Link"] = f'<{address}?recursive=true&cursor={last}>; rel="next"'
        self._json(page, headers)

    def paths(self, bucket_id: str) -> None:
        with self.hub.lock:
            bucket = self.hub.buckets[bucket_id]
            self._json([bucket[path] for path in json.loads(self.body)["paths"] if path in bucket])

    def batch(self, bucket_id: str) -> None:
        operations = [json.loads(line) for line in self.body.splitlines()]
        with self.hub.lock:
            bucket = self.hub.buckets[bucket_id]
            reasons = [(o["path"], self.hub.apply(bucket, o)) for o in operations]
        failed = [{"path": path, "error": reason} for path, reason in reasons if reason is not None]
        done = len(operations) - len(failed)
        answer = {"success": not failed, "processed": len(operations), "succeeded": done, "failed": failed}
        self._json(answer, status=422 if failed and done == 0 else 200)

    def token(self, bucket_id: str, kind: str) -> None:
        if kind == "write" and not self.hub.writable:
            self._refuse(403, "this token may not write here")
            return
        expiry = int(time.time()) + 3600
        self._json({"accessToken": self.hub.cas.token, "exp": expiry, "casUrl": self.hub.cas.url})

    def resolve(self, bucket_id: str, path: str) -> None:
        info = self.hub.buckets[bucket_id].get(path)
        if info is None:
            self._refuse(404, "entry not found", code="EntryNotFound")
        elif self.command == "GET":
            self._send(302, b"", {"Location": f"{self.hub.url}/bridge/{info['xetHash']}"})
        else:
            route = f"{self.hub.url}/api/buckets/{bucket_id}/xet-read-token"
            headers = {"X-Xet-Hash": info["xetHash"], "X-Linked-Size": str(info["size"])}
            self._send(200, b"", {**headers, "Link": f'<{route}>; rel="xet-auth"'})

    def bridge(self, name: str) -> None:
        size = self.hub.cas.size(name)
        begin, end = self._range(size)
        if "Range" not in self.headers or not self.hub.ranged:
            self._send(200, self.hub.cas.read(name, 0, size), {})
        elif begin >= size:
            self._refuse(416, "no such range")
        else:
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"}
            self._send(206, self.hub.cas.read(name, begin, end), headers)

    def xorb(self, name: str) -> None:
        with self.hub.lock:
            new = name not in self.hub.cas.xorbs
            self.hub.cas.xorbs[name] = Xorb.parse(self.body)
        self._json({"was_inserted": new})

    def shard(self) -> None:
        with self.hub.lock:
            self.hub.cas.files.update(parse_shard(self.body))
        self._json({"result": 1})

    def plan(self, name: str) -> None:
        if name not in self.hub.cas.files:
            self._refuse(404, "no such file")
            return
        begin, end = self._range(self.hub.cas.size(name))
        if begin >= end:
            self._refuse(416, "no such range")
        else:
            self._json(self.hub.cas.plan(name, begin, end))

    def chunks(self, name: str) -> None:
        data = self.hub.cas.xorbs[name].data
        begin, end = self._range(len(data))
        self._send(206, data[begin:end], {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"})

    def _dispatch(self, route: str, parts: list[str]) -> None:
        self.fault = self.hub.enter(route)
        if self.fault is not None and not self.fault.after:
            self._send(200, b"", {})
        elif self._admit(route, parts):
            getattr(self, route)(*parts)

    def _admit(self, route: str, parts: list[str]) -> bool:
        """Whether the token is right, it may do this, and the bucket is there: in this order, as on the Hub."""
        cas = self.path.startswith("/cas/")
        expected = self.hub.cas.token if cas else self.hub.token
        if route not in self.PRESIGNED and self.headers.get("Authorization") != f"Bearer {expected}":
            self._refuse(401, "Invalid username or password.")
        elif route in self.WRITES and not self.hub.writable:
            self._refuse(403, "this token may not write here")
        elif not cas and route not in {"create", "bridge"} and parts[0] not in self.hub.buckets:
            self._refuse(404, "Repository not found", code="RepoNotFound")
        else:
            return True
        return False

    def _range(self, size: int) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "bytes=0-"))
        assert match is not None
        return int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        pieces = []
        while length := int(self.rfile.readline(), 16):
            pieces.append(self.rfile.read(length))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _json(self, value: Any, headers: dict[str, str] | None = None, *, status: int = 200) -> None:
        kind = {"Content-Type": "application/json"}
        self._send(status, json.dumps(value).encode(), kind if headers is None else {**kind, **headers})

    def _refuse(self, status: int, message: str, *, code: str | None = None) -> None:
        headers = {"X-Error-Message": message} if code is None else {"X-Error-Message": message, "X-Error-Code": code}
        self._json({"error": message}, headers, status=status)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        if self.fault is not None:
            if self.fault.status is None:
                self.close_connection = True
                return
            status, data, headers = self.fault.status, b'{"error": "by the test"}', {"X-Error-Message": "by the test"}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def hub() -> Iterator[Hub]:
    """A running stand-in on a free port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with tempfile.TemporaryDirectory(prefix="deltasync-hub-") as home:
        standin = Hub(f"http://127.0.0.1:{server.server_port}", home)
        server.RequestHandlerClass = type("BoundHandler", (Handler,), {"hub": standin})
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield standin
        finally:
            server.shutdown()
            server.server_close()
            join(thread)
