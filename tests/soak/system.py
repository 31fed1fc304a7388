"""All that runs: a store behind a proxy, a trainer, replicas, a pruner, a small disk; and the faults they get."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from faults.running import mounted, run
from support.servers import Proxy, Server, free_port, missing, proxied, seaweed
from support.vllm import PROMPTS, PYTHON, TOKEN, VllmServer, save, start_vllm, tiny_model

from deltasync.checkpoint import open_checkpoint
from deltasync.errors import DeltasyncError
from deltasync.replica.folder import recorded_version

from .processes import Life, Role, popen
from .schedule import JUMPING, Step
from .training import weights_hash

DISK_BYTES = 24 << 20
SAMPLE_S = 1.0
TICK_S = 0.05
ASK_S = 2.0
FULL_S = 30.0
"""How long after a disk was full a replica may still report that."""

_HERE = Path(__file__).parent
_SIZES = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256}
_NO_SPACE = "free some space"


@dataclass(slots=True)
class Faults:
    """What was done to the processes, besides what the proxy counts."""

    fills: int = 0
    jumps: Counter[int] = field(default_factory=Counter)
    prunes: Counter[int] = field(default_factory=Counter)
    """Exit codes of the pruner."""
    no_space_exits: int = 0


class System:
    """Everything between the start of the store and the judgement. `problems` has what must not have happened."""

    def __init__(self, folder: Path, url: str, server: Server, proxy: Proxy, *, seed: int, disk: Path) -> None:
        self.folder = folder
        self.url = url
        self.server = server
        self.proxy = proxy
        self.disk = disk
        self.base = folder / "base"
        self.link = disk / "model"
        self.mirror = disk / "mirror"
        self.roles: dict[str, Role] = {}
        self.faults = Faults()
        self.problems: list[str] = []
        self.served: list[tuple[str, int, str]] = []
        """Versions that were read from the folder replica: its name, the version, the hash of the weights."""
        self.counts: dict[str, dict[int, dict[str, int]]] = {}
        """The counters of each follower, by role and life."""
        self.vllm: VllmServer | None = None
        self.answers: Counter[str] = Counter()
        """The answers of the vLLM server to requests for completions, by status."""
        self._is_over = threading.Event()
        self.began_s = time.monotonic()
        self._rng = random.Random(seed)
        self._is_mapped = False
        self._published_before = 0
        self._full_until_s = -FULL_S
        self._is_full = False
        self._sampled_s = 0.0
        self._preload: Path | None = None
        self._environment = {
            **server.environment,
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "AWS_ENDPOINT": proxy.endpoint,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_HERE.parent), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "DELTASYNC_THREADS": "1",
        }
        self._status_port = free_port()
        self._add("trainer", self._launch_trainer)
        for name in ("torch", "steady"):
            self._add(name, lambda name=name: self._launch_torch(name))
        self._add("folder", self._launch_folder)
        self._add("pruner", self._launch_pruner, is_long_lived=False)
        self._add("store", lambda: server.process, is_long_lived=False)
        self.roles["store"].start()

    @property
    def now_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def published(self) -> int:
        """How many versions and anchors the trainer has reported."""
        path = self.folder / "published.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    @property
    def replicas(self) -> list[str]:
        return [name for name in ("torch", "steady", "folder", "vllm") if name in self.roles]

    @property
    def has_small_disk(self) -> bool:
        """Whether the disk of the folder replica can become full."""
        return self.disk.is_mount()

    @property
    def has_clocks(self) -> bool:
        """Whether clocks can jump."""
        return self._preload is not None

    def use_clock(self, library: Path) -> None:
        """Let the clocks of some processes jump; before they are started."""
        self._preload = library
        for name in JUMPING:
            self._set_clock(name, 0)

    def add_vllm(self) -> None:
        """Add a vLLM server to the replicas, and a client that asks it for completions."""
        self._add("vllm", self._launch_vllm)
        self.roles["vllm"].log = self.folder / "vllm/server.log"
        threading.Thread(target=self._ask, daemon=True).start()

    def start(self) -> None:
        """Start everything that is to run all the time."""
        for name in ("trainer", *self.replicas):
            self.roles[name].start()

    def stop_all(self) -> None:
        """End what still runs, at once."""
        self._is_over.set()
        for name, role in self.roles.items():
            if name != "store":
                role.kill()

    def apply(self, step: Step) -> None:
        """Do what a step says, and note it in `steps.log`."""
        with (self.folder / "steps.log").open("a") as log:
            print(f"{time.strftime('%T')} {step.verb} {step.subject} {step.amount:g}", file=log)
        role = self.roles.get(step.subject)
        match step.verb:
            case "kill" if role is not None:
                role.kill()
            case "start" if role is not None:
                self._is_mapped = bool(step.amount) if step.subject == "trainer" else self._is_mapped
                role.start()
            case "stop" if role is not None:
                role.stop()
            case "continue" if role is not None:
                role.resume()
            case "fill":
                self._fill(int(step.amount))
            case "empty":
                self._empty()
            case "jump":
                self.faults.jumps[int(step.amount)] += 1
                self._set_clock(step.subject, int(step.amount))
            case "return":
                self._set_clock(step.subject, 0)
            case "spoil":
                self._spoil(step.subject, share=step.amount)
            case "release":
                self.proxy.release()
            case "prune":
                self.roles["pruner"].start()

    def end_faults(self) -> None:
        """Undo whatever is still in effect, and start what is dead."""
        self.proxy.release()
        self._empty()
        for role in self.roles.values():
            role.resume()
        for name in JUMPING if self.has_clocks else ():
            self._set_clock(name, 0)
        self.start()

    def watch(self, until_s: float) -> None:
        """Sample the processes and look at their ends, until that time."""
        while True:
            self._look_at_ends()
            if self.now_s - self._sampled_s >= SAMPLE_S:
                self._sampled_s = self.now_s
                for role in self.roles.values():
                    role.sample(self.now_s)
                self._read_counts()
                self._read_folder()
            if self.now_s >= until_s:
                return
            time.sleep(TICK_S)

    def version_of(self, name: str) -> int | None:
        """The version that a replica serves, by its own word."""
        with suppress(OSError, ValueError, AssertionError):
            version = self._status(name)["version"]
            return version if isinstance(version, int) else None
        return None

    # Launching

    def _add(self, name: str, launch: Callable[[], subprocess.Popen[bytes]], *, is_long_lived: bool = True) -> None:
        self.roles[name] = Role(name, self.folder / f"{name}.log", launch, is_long_lived=is_long_lived)

    def _popen(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        clock = {}
        if self._preload is not None and name in JUMPING:
            clock = {"LD_PRELOAD": str(self._preload), "SOAK_CLOCK": str(self._clock_path(name))}
        return popen([sys.executable, "-m", *command], self.roles[name].log, {**self._environment, **clock})

    def _launch_trainer(self) -> subprocess.Popen[bytes]:
        self._published_before = self.published
        mapped = ("--mapped",) if self._is_mapped else ()
        return self._popen("trainer", "soak.training", self.folder, self.url, *mapped)

    def _launch_torch(self, name: str) -> subprocess.Popen[bytes]:
        (self.folder / f"{name}.status").unlink(missing_ok=True)
        mirror = ("--mirror", self.folder / "torch.mirror") if name == "torch" else ()
        return self._popen(name, "soak.replica", self.folder, self.url, name, *mirror)

    def _launch_folder(self) -> subprocess.Popen[bytes]:
        listen = ("--listen", f"127.0.0.1:{self._status_port}")
        places = ("--target", self.link, "--mirror", self.mirror)
        options = ("--replica", "folder", "--scrub-s", "20")
        return self._popen("folder", "deltasync", "follow", self.url, *places, *options, *listen)

    def _launch_pruner(self) -> subprocess.Popen[bytes]:
        kept = ("--keep-anchors", "2", "--keep-versions", "20")
        return self._popen("pruner", "deltasync", "prune", self.url, *kept, "--yes")

    def _launch_vllm(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in self._environment.items() if name != "PYTHONPATH"}
        settings = {"DELTASYNC_MIRROR": str(self.folder / "vllm.mirror"), "DELTASYNC_REPLICA": "vllm"}
        self.vllm = start_vllm(
            self.base, self.url, self.folder / "vllm", **environment, **settings, DELTASYNC_SCRUB_S="60"
        )
        return self.vllm.process

    def _ask(self) -> None:
        while not self._is_over.wait(ASK_S):
            if self.vllm is not None:
                try:
                    self.answers[str(self.vllm.complete(PROMPTS[0], timeout_s=30.0).status)] += 1
                except (OSError, HTTPException):
                    self.answers["no answer"] += 1

    # Faults

    def _clock_path(self, name: str) -> Path:
        return self.folder / f"{name}.clock"

    def _set_clock(self, name: str, offset_s: int) -> None:
        path = self._clock_path(name)
        path.touch()
        with path.open("r+b") as file:
            file.write(struct.pack("=q", offset_s))

    def _spoil(self, how: str, *, share: float) -> None:
        flipped: set[str] = set()

        def spoil(method: str, path: str) -> str:
            if self._rng.random() >= share:
                return ""
            if how == "flip":
                # No digest protects a listing. An object is read twice before it counts as damaged, so it is flipped
                # only once.
                if method != "GET" or "list-type=" in path or path in flipped:
                    return ""
                flipped.add(path)
            return how

        self.proxy.stall_s = 30.0
        self.proxy.spoil = spoil

    def _fill(self, free_pages: int) -> None:
        self.faults.fills += 1
        self._is_full = True
        found = os.statvfs(self.disk)
        with (self.disk / "filler").open("wb") as file, suppress(OSError):
            os.posix_fallocate(file.fileno(), 0, max(1, (found.f_bavail - free_pages) * found.f_frsize))

    def _empty(self) -> None:
        if self._is_full:
            self._full_until_s = self.now_s
            self._is_full = False
        with suppress(FileNotFoundError):
            (self.disk / "filler").unlink()

    # Watching

    def _look_at_ends(self) -> None:
        for name, role in self.roles.items():
            life = role.ended()
            if life is None:
                continue
            if name == "pruner":
                self.faults.prunes[life.exit or 0] += 1
                if life.exit not in (0, 1, 3):
                    self._report_end(role, life)
            elif name == "folder" and self._was_full and life.exit == 1 and _NO_SPACE in role.said(life):
                # It was started on a full disk, which it refuses. A supervisor starts it again.
                self.faults.no_space_exits += 1
                role.start()
            else:
                self._report_end(role, life)
                if name != "store":
                    role.start()

    @property
    def _was_full(self) -> bool:
        return self._is_full or self.now_s - self._full_until_s < FULL_S

    def _report_end(self, role: Role, life: Life) -> None:
        end = "\n".join(role.said(life).splitlines()[-12:])
        self.problems.append(f"{role.name} ended by itself with {life.exit} after {self.now_s:.0f} s:\n{end}")

    def _read_folder(self) -> None:
        """Read the live folder as an engine does: by its link, once."""
        folder = self.link.resolve()
        try:
            version, weights = recorded_version(folder), open_checkpoint(folder).weights
        except DeltasyncError as error:
            if self.link.is_symlink() and folder.exists() and folder == self.link.resolve():
                self.problems.append(f"the live folder cannot be read: {error}")
            return
        if version is not None:
            self.served.append(("folder", version, weights_hash(weights)))

    def _read_counts(self) -> None:
        """Read the counters of the followers, and note who is ready."""
        for name in self.replicas:
            role = self.roles[name]
            if role.is_running and not role.is_stopped:
                with suppress(OSError, ValueError, KeyError, AssertionError):
                    status = self._status(name)
                    self.counts.setdefault(name, {})[len(role.lives)] = status["counts"]
                    if status["version"] is not None:
                        role.lives[-1].note_ready()
        if self.published > self._published_before:
            self.roles["trainer"].lives[-1].note_ready()

    def _status(self, name: str) -> dict[str, Any]:
        if name == "folder":
            with urllib.request.urlopen(f"http://127.0.0.1:{self._status_port}/status", timeout=1) as answer:
                return json.loads(answer.read())
        if name == "vllm":
            assert self.vllm is not None
            answer = self.vllm.request("/deltasync/status", token=TOKEN, timeout_s=1)
            assert answer.status == 200, answer
            return answer.body
        return json.loads((self.folder / f"{name}.status").read_text())


@contextmanager
def running_system(folder: Path, *, seed: int, with_vllm: bool) -> Iterator[System]:
    """A system that is not started yet. Parts that this machine cannot have are left out, which is printed."""
    folder.mkdir(parents=True, exist_ok=True)
    if with_vllm and not PYTHON.exists():
        missing(f"there is no vLLM at {PYTHON}")
    save(tiny_model("qwen3", **_SIZES), folder / "base")
    with ExitStack() as held:
        server = held.enter_context(seaweed())
        # For what is judged in this process, which does not go through the proxy.
        os.environ.update(server.environment)
        proxy = held.enter_context(proxied(server))
        disk = held.enter_context(small_disk(folder))
        system = System(folder, server.url("run"), server, proxy, seed=seed, disk=disk)
        held.callback(system.stop_all)
        library = build_clock(folder)
        if library is not None:
            system.use_clock(library)
        if with_vllm:
            system.add_vllm()
        yield system


def build_clock(folder: Path) -> Path | None:
    """The library that changes the clock of a process; None without a compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "clang", "gcc"))), None)
    if compiler is None:
        why = "clocks do not jump: there is no C compiler"
        if os.environ.get("CI") == "true":
            missing(why)
        print(f"left out: {why}", flush=True)
        return None
    library = folder / "clock.so"
    done = run(compiler, "-O2", "-shared", "-fPIC", "-o", library, _HERE / "clock.c")
    if done.returncode != 0:
        raise RuntimeError(f"cannot build clock.c: {done.stderr}")
    return library


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """An ext4 file system of `DISK_BYTES`; a plain folder where that cannot be mounted."""
    at, image = folder / "disk", folder / "disk.image"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    with ExitStack() as held:
        try:
            if shutil.which("mkfs.ext4") is None:
                missing("mkfs.ext4 is not installed")
            done = run("mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image)
            if done.returncode != 0:
                raise RuntimeError(f"mkfs.ext4: {done.stderr}")
            held.enter_context(mounted(at, "-o", "loop", image))
        except pytest.skip.Exception as error:
            print(f"left out: disks do not become full: {error}", flush=True)
            at.mkdir(exist_ok=True)
        yield at
