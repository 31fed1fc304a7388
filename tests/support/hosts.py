"""Hosts in network namespaces, and programs on them."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pytest

from . import processes
from .servers import missing

Reach = Literal["connected", "refused", "no route"]
"""What a connection attempt comes to. A refusal was sent by the other host: there is a way to it."""

_TOOLS = {"ip": "iproute2", "mount": "mount", "nsenter": "util-linux", "unshare": "util-linux"}
_KINDS = ("--net", "--mount", "--ipc", "--pid")

_BOOT = 'mount -t tmpfs none "$1" && mount -t tmpfs none /dev/shm && ip link set lo up && echo up && exec cat'
"""Ends with the pipe that is its stdin, and that the tests hold open as long as they live."""

_CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60).close()
    print("connected")
except ConnectionRefusedError:
    print("refused")
except OSError as error:
    print("no route" if error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH) else repr(error))
"""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that is up. `home` is a path that leads to another, empty folder on each host."""

    name: str
    address: str
    home: Path
    holder: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        """All that a program here knows of the outside."""
        home = str(self.home)
        return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "HOME": home, "TMPDIR": home}

    def command(self, *command: str | Path) -> list[str]:
        """What runs a command on this host."""
        # The holder itself is not inside the process table that it made, but what it starts is.
        inside = f"--pid=/proc/{self.holder.pid}/ns/pid_for_children"
        entered = ["nsenter", f"--target={self.holder.pid}", "--net", "--mount", "--ipc", inside, f"--wdns={self.home}"]
        return [*entered, "--", *(str(word) for word in command)]

    def run(self, *command: str | Path) -> str:
        """What a command on this host prints; it must succeed."""
        printed: str = processes.run(self.command(*command), env=self.environment, check=True).stdout
        return printed

    def reach(self, other: "Host", port: int) -> Reach:
        """What becomes of a TCP connection from here to a port of another host."""
        printed = self.run(sys.executable, "-ISc", _CONNECT, other.address, str(port)).strip()
        for reach in get_args(Reach):
            if printed == reach:
                return reach
        raise AssertionError(f"{self.name} to port {port} of {other.name}: {printed}")

    def open_ports(self) -> set[int]:
        """TCP ports that a process on this host listens at, and not on loopback alone."""
        found = json.loads(self.run("ip", "-j", "addr", "show", "lo"))
        assert "UP" in found[0]["flags"], f"the loopback of {self.name} is down"
        return _open_ports(self.run("cat", "/proc/net/tcp", "/proc/net/tcp6"))


@contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """Hosts by name, without a link between any two. Skips the test where this is not possible; in CI it fails."""
    _require_tools()
    # Not in the folder of a test, whose path may be too long for the sockets that programs make at home.
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder, ExitStack() as up:
        home = Path(folder)
        yield {name: up.enter_context(_host(name, f"10.77.0.{n}", home)) for n, name in enumerate(names, start=1)}


def link(a: Host, b: Host) -> None:
    """A cable between two hosts. Each end has the name of the other host, and leads to that host alone."""
    ends = [("name", there.name, "netns", str(here.holder.pid)) for here, there in ((a, b), (b, a))]
    processes.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
    for here, there in ((a, b), (b, a)):
        here.run("ip", "addr", "add", here.address, "peer", there.address, "dev", there.name)
        here.run("ip", "link", "set", "dev", there.name, "up")


def cut(a: Host, b: Host) -> None:
    """Pull the cable between two hosts."""
    a.run("ip", "link", "delete", "dev", b.name)


@contextmanager
def _host(name: str, address: str, home: Path) -> Iterator[Host]:
    boot = ["unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _BOOT, "sh", home]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with processes.running(boot, **pipes) as holder:
        try:
            if holder.stdout.readline() != "up\n":
                missing(f"namespaces cannot be made here: {holder.stderr.read().strip()}")
            yield Host(name, address, home, holder)
        finally:
            # It would not end by itself as long as something runs on it.
            processes.kill(holder)


def _require_tools() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        missing("namespaces need root on Linux")
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            missing(f"{tool} is not installed (Debian: apt-get install {package})")


def _open_ports(table: str) -> set[int]:
    """From the kernel's own tables: local address, remote address and state are the second to the fourth column."""
    listens, loopbacks = "0A", ("0100007F", "00000000000000000000000001000000")
    found = set()
    for line in table.splitlines():
        fields = line.split()
        address, _, port = fields[1].partition(":")
        if fields[3] == listens and address not in loopbacks:
            found.add(int(port, 16))
    return found


_LOOK_S = 0.1
_TAIL_LINES = 25


class Programs:
    """The programs that were started. Waiting for one of them raises the error of any that has failed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, host: Host, *command: str | Path, environment: Mapping[str, str]) -> None:
        """Start a program. What it prints goes to files that no host sees."""
        with self._events(name).open("wb") as events, self._log(name).open("wb") as log:
            self._running[name] = processes.start(
                host.command(*command),
                env={**host.environment, **environment},
                stdin=subprocess.PIPE,
                stdout=events,
                stderr=log,
            )

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        # The last line may be only half there. Programs that are not ours print what they like.
        lines = self._events(name).read_text(errors="replace").split("\n")[:-1]
        found = [json.loads(line) for line in lines if line.startswith('{"event": ')]
        return [fields for fields in found if fields["event"] == event]

    def await_event(self, name: str, event: str, *, within_s: float) -> dict[str, Any]:
        """Wait for the first event of one kind."""
        deadline = time.monotonic() + within_s
        while not (found := self.events(name, event)):
            self.require_well()
            if self._running[name].poll() == 0 and not self.events(name, event):
                pytest.fail(f"{name} ended without {event!r}\n{self._tails()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{name} did not print {event!r} in {within_s:g} s\n{self._tails()}")
            time.sleep(_LOOK_S)
        return found[0]

    def require_well(self) -> None:
        """Fails, with the reason that it gave, if a program has failed."""
        for name, process in self._running.items():
            if process.poll() not in (None, 0):
                pytest.fail(f"{name} ended with {process.poll()}: {self._reason(name)}\n{self._tails()}")

    def finish(self, name: str, *, within_s: float) -> None:
        """Let a program end, and require that it succeeded."""
        process = self._running[name]
        assert process.stdin is not None
        process.stdin.close()
        process.wait(within_s)
        self.require_well()

    def kill(self) -> None:
        """End all that was started, at once."""
        for process in self._running.values():
            processes.kill(process)
            if process.stdin is not None:
                process.stdin.close()

    def _reason(self, name: str) -> str:
        """The error that a program printed; if there is none, the last line of its log."""
        for error in self.events(name, "error"):
            return f"{error['message']} ({error['hint']})"
        return self._log(name).read_text(errors="replace").rstrip().rpartition("\n")[2]

    def _events(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _tails(self) -> str:
        found = []
        for name in self._running:
            for path in (self._events(name), self._log(name)):
                lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
                found.append("\n".join([f"--- {path.name}", *(line[:300] for line in lines)]))
        return "\n".join(found)


@contextmanager
def programs(folder: Path) -> Iterator[Programs]:
    """Programs that are gone at the end of the block."""
    folder.mkdir()
    started = Programs(folder)
    try:
        yield started
    finally:
        started.kill()
