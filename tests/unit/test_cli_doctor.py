"""`doctor`: each check can fail, nothing is left behind, and a URL without a feed stays without one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.feeds import Feed, NoFenceStore, SpyStore

from deltasync.cli import doctor
from deltasync.cli import main as cli
from deltasync.errors import StoreError
from deltasync.format import keys
from deltasync.store.local import LocalStore
from deltasync.store.protocol import Data, ObjectInfo, Store

Out = pytest.CaptureFixture[str]
MACHINE = ["deltasync", "packages", "kernels", "threads", "memory", "shared memory", "disk", "temporary files"]
STORE = ["list", "feed", "put and get", "create-if-absent", "clock", "latency", "bandwidth", "delete"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DELTASYNC_FEED", raising=False)
    return tmp_path


def report(capsys: Out, *arguments: str) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The exit code, the report, and its checks by name."""
    code = cli.main(["doctor", *arguments, "--probe-mb", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    return code, found, {check["name"]: check for check in found["checks"]}


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_machine_alone(capsys: Out, place: Path) -> None:
    code, found, checks = report(capsys)
    assert (code, found["healthy"], found["probes"]) == (0, True, [])
    assert list(checks) == MACHINE
    assert checks["packages"]["packages"].keys() == set(doctor._PACKAGES)
    assert checks["packages"]["packages"]["numpy"] is not None
    assert checks["shared memory"]["free_bytes"] > 0
    assert not files(place)


def test_a_feed_is_as_it_was(capsys: Out, place: Path) -> None:
    Feed.of(2, LocalStore("feed"))
    before = files(place)
    code, found, checks = report(capsys, "feed")
    assert code == 0
    assert list(checks) == MACHINE + STORE
    assert {checks[name]["state"] for name in STORE} == {"ok"}
    assert checks["feed"]["head"] == 1
    assert checks["bandwidth"]["put_bytes_per_s"] > 0
    assert len(found["probes"]) == 3
    assert all(key.startswith(keys.PROBES) for key in found["probes"])
    assert files(place) == before
    assert cli.main(["doctor", "feed", "--probe-mb", "1"]) == 0
    assert capsys.readouterr().out.endswith("wrote 3 objects under probes/ and removed them\n")


@pytest.mark.parametrize("path", ["nowhere", "checkpoint"])
def test_no_feed_is_created(capsys: Out, place: Path, path: str) -> None:
    """Neither at a mistyped path, nor between the files of a user."""
    (place / "checkpoint").mkdir()
    (place / "checkpoint/model.safetensors").touch()
    code, found, checks = report(capsys, path)
    assert (code, found["probes"]) == (0, [])
    assert (checks["feed"]["state"], checks["write"]["state"]) == ("warning", "skipped")
    assert {p.name for p in place.rglob("*")} == {"checkpoint", "model.safetensors"}


def test_a_bucket_without_a_feed_is_probed_and_left_empty(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SpyStore()
    monkeypatch.setattr("deltasync.open_store", lambda url: store)
    code, found, checks = report(capsys, "s3://bucket/run")
    assert (code, checks["feed"]["state"], checks["put and get"]["state"]) == (0, "warning", "ok")
    assert list(store.list()) == []
    touched = {key for verb, key in store.took() if verb in ("put", "create", "delete")}
    assert touched == set(found["probes"]), "it names every object that it wrote"


def test_read_only_writes_nothing(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SpyStore()
    monkeypatch.setattr("deltasync.open_store", lambda url: store)
    code, found, checks = report(capsys, "s3://bucket/run", "--read-only")
    assert (code, found["probes"], checks["write"]["state"]) == (0, [], "skipped")
    assert {verb for verb, _ in store.took()} <= {"get", "list"}


class NoList(SpyStore):
    def list(self, prefix: str = "", *, after: str | None = None) -> Any:
        raise StoreError("cannot list: the credentials are not accepted", transient=False, hint="check the keys")


class NoPut(SpyStore):
    def put(self, key: str, data: Data) -> None:
        raise StoreError("cannot put: not allowed", transient=False)


class Forgetful(SpyStore):
    def put(self, key: str, data: Data) -> None:
        pass


class Garbling(SpyStore):
    def get(self, key: str) -> bytes:
        data = super().get(key)
        return data if len(data) < 1_000_000 else data[:-1] + bytes([data[-1] ^ 1])


class LateClock(SpyStore):
    def list(self, prefix: str = "", *, after: str | None = None) -> Any:
        return (ObjectInfo(i.key, i.nbytes, i.modified_unix_s - 500) for i in super().list(prefix, after=after))


class NoDelete(SpyStore):
    def delete(self, key: str) -> None:
        raise StoreError("cannot delete: not allowed", transient=False)


@pytest.mark.parametrize(
    ("store", "code", "name", "state", "words"),
    [
        (NoList, 1, "list", "failed", "check the keys"),
        (NoPut, 1, "put and get", "failed", "not allowed"),
        (Forgetful, 1, "put and get", "failed", "does not have what was just put"),
        (Garbling, 1, "bandwidth", "failed", "other bytes"),
        (NoDelete, 1, "delete", "failed", "not allowed"),
        (NoFenceStore, 0, "create-if-absent", "warning", "lease"),
        (LateClock, 0, "clock", "warning", "behind this machine's"),
    ],
)
def test_a_store_that_lacks_something(
    capsys: Out,
    monkeypatch: pytest.MonkeyPatch,
    store: Callable[[], Store],
    code: int,
    name: str,
    state: str,
    words: str,
) -> None:
    monkeypatch.setattr("deltasync.open_store", lambda url: store())
    found_code, found, checks = report(capsys, "s3://bucket/run")
    assert (found_code, found["healthy"]) == (code, code == 0)
    assert checks[name]["state"] == state
    assert words in checks[name]["text"]
    assert [check for check, fields in checks.items() if fields["state"] == "failed" and check != name] == []
    cli.main(["doctor", "s3://bucket/run", "--probe-mb", "1"])
    out, err = capsys.readouterr()
    assert f"{state}\t{name}\t" in out
    last = {
        "list": "wrote nothing",
        "put and get": "could not write under probes/",
        "delete": "wrote 3 objects under probes/, and could not remove them: probes/",
    }
    assert last.get(name, " under probes/ and removed them") in out.splitlines()[-1]
    assert err == (f"error: 1 check failed: {name} (see above)\n" if code else "")


def test_a_url_that_is_none(capsys: Out) -> None:
    code, _, checks = report(capsys, "ftp://host/x")
    assert (code, checks["store"]["state"]) == (1, "failed")
    assert "ftp:// is not a kind of store" in checks["store"]["text"]


@pytest.mark.parametrize(
    ("name", "value", "check", "state"),
    [
        ("DELTASYNC_KERNELS", "abacus", "kernels", "failed"),
        ("DELTASYNC_KERNELS", "reference", "kernels", "warning"),
        ("DELTASYNC_THREADS", "many", "threads", "failed"),
    ],
)
def test_settings_of_the_machine(
    capsys: Out, monkeypatch: pytest.MonkeyPatch, name: str, value: str, check: str, state: str
) -> None:
    from deltasync.kernels import kernels

    monkeypatch.setenv(name, value)
    kernels.cache_clear()
    try:
        code, _, checks = report(capsys)
    finally:
        kernels.cache_clear()
    assert (code, checks[check]["state"]) == (int(state == "failed"), state)


def test_an_untested_release_of_vllm(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda name: "0.99.1")
    code, _, checks = report(capsys)
    assert (code, checks["vLLM"]["state"]) == (0, "warning")
    monkeypatch.setattr(doctor, "_installed", lambda name: "0.31.0")
    assert "vLLM" not in report(capsys)[2]


def test_the_screen_is_one_screen(capsys: Out) -> None:
    Feed.of(2, LocalStore("feed"))
    os.chdir("feed")
    assert cli.main(["doctor", ".", "--probe-mb", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
