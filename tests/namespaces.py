"""Hosts on one machine: each has a network, a process table, a shared memory and a home folder of its own.

A host is a set of Linux namespaces, held open by one process. When that process ends, for whatever reason, the kernel
kills everything on the host and takes its links along: nothing has a name outside, so nothing can be left behind.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from servers import missing

Reach = Literal["connected", "refused", "no route"]
"""What a connection attempt comes to. A refusal was sent by the other host: there is a way to it."""

_TOOLS = {"ip": "iproute2", "mount": "mount", "nsenter": "util-linux", "unshare": "util-linux"}
_KINDS = ("--net", "--mount", "--ipc", "--pid")
_WITHIN_S = 60.0

_BOOT = 'mount -t tmpfs none "$1" && mount -t tmpfs none /dev/shm && ip link set lo up && echo up && exec cat'
"""Ends with the pipe that is its stdin, and that the tests hold open as long as they live."""

_CONNECT = """
import errno, socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
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
        done = subprocess.run(
            self.command(*command),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}: {command} ended with {done.returncode}: {done.stderr[-2000:]}"
        return done.stdout

    def reach(self, other: "Host", port: int) -> Reach:
        """What becomes of a TCP connection from here to a port of another host."""
        told = self.run(sys.executable, "-ISc", _CONNECT, other.address, str(port)).strip()
        for reach in get_args(Reach):
            if told == reach:
                return reach
        raise AssertionError(f"{self.name} to port {port} of {other.name}: {told}")

    def open_ports(self) -> set[int]:
        """TCP ports that somebody on this host listens at, and not on loopback alone."""
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
    subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True, timeout=_WITHIN_S)
    for here, there in ((a, b), (b, a)):
        here.run("ip", "addr", "add", here.address, "peer", there.address, "dev", there.name)
        here.run("ip", "link", "set", "dev", there.name, "up")


def cut(a: Host, b: Host) -> None:
    """Pull the cable between two hosts."""
    a.run("ip", "link", "delete", "dev", b.name)


@contextmanager
def _host(name: str, address: str, home: Path) -> Iterator[Host]:
    holder = subprocess.Popen(
        ["unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _BOOT, "sh", str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Not the Ctrl-C that is meant for the tests: they end it themselves, after what runs on it.
        start_new_session=True,
    )
    with holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stderr is not None
        try:
            if holder.stdout.readline() != "up\n":
                missing(f"namespaces cannot be made here: {holder.stderr.read().strip()}")
            yield Host(name, address, home, holder)
        finally:
            holder.kill()


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
