"""A link of a given rate and round trip between two hosts in network namespaces, for kernels without `netem`.

Each host gets one end: a tun device. A process in between passes the packets on, as a router with a queue does: a
packet waits until the rate has room for it and until the one-way delay is over, and is dropped if the queue is full.
The devices take segments of up to 64 KB in one piece, so that 1 Gbit/s is a few thousand packets a second. What is
counted, and what takes time, includes the headers that each packet of the MTU would have. Connections start as slowly,
and share the link as fairly, as the TCP of this kernel lets them.
"""

import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from tests.support.hosts import Host

DEVICE = "wan0"
MTU = 1500
QUEUE_S = 0.1
"""How long a packet may wait for the rate before it is dropped."""

_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_OFFLOADS = 0b1111  # checksums, and TCP segments of IPv4 and IPv6, with and without ECN
_CLONE_NEWNET = 0x40000000
_VNET_BYTES = 10
_GSO_SIZE_AT = 4
_HEADER_BYTES = 52  # of IPv4 and TCP with time stamps
_FRAME_BYTES = 38  # of Ethernet: header, checksum, preamble and gap
_PACKET_MOST = 70_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the link has carried since it was made, with all headers. `down` is towards the second host."""

    down_bytes: int
    up_bytes: int
    drops: int

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.down_bytes - other.down_bytes, self.up_bytes - other.up_bytes, self.drops - other.drops)


class Link:
    """The process that passes packets on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def set_rate(self, bits_per_s: float) -> None:
        """The rate of each direction from now on."""
        self._ask({"bits_per_s": bits_per_s})

    def traffic(self) -> Traffic:
        """What was carried so far."""
        return Traffic(**self._ask({}))

    def _ask(self, order: dict[str, float]) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def linked(a: Host, b: Host, *, round_trip_s: float) -> Iterator[Link]:
    """A link between two hosts, at first of 1 Gbit/s."""
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "benchmarks.wan_link"]
    command += [str(a.holder.pid), str(b.holder.pid), str(round_trip_s / 2)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        link = Link(process)
        link.set_rate(1e9)
        for here, there in ((a, b), (b, a)):
            here.run("ip", "addr", "add", here.address, "peer", there.address, "dev", DEVICE)
            here.run("ip", "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "5000", "up")
        yield link
        # Closes its standard input, at which it ends.


class _Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, sink: int, *, delay_s: float) -> None:
        self.source = source
        self.nbytes = self.drops = 0
        self._sink = sink
        self._delay_s = delay_s
        self._free_s = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    @property
    def due_s(self) -> float:
        """When the next packet arrives."""
        return self._waiting[0][0] if self._waiting else float("inf")

    def take(self, bits_per_s: float) -> None:
        """Read one packet from the device."""
        packet = os.read(self.source, _PACKET_MOST)
        now_s = time.monotonic()
        (segment_bytes,) = struct.unpack_from("<H", packet, _GSO_SIZE_AT)
        content_bytes = len(packet) - _VNET_BYTES
        packets = -(-content_bytes // segment_bytes) if segment_bytes else 1
        nbytes = content_bytes + (packets - 1) * _HEADER_BYTES + packets * _FRAME_BYTES
        begin_s = max(now_s, self._free_s)
        if begin_s - now_s > QUEUE_S:
            self.drops += 1
            return
        self._free_s = begin_s + 8 * nbytes / bits_per_s
        self.nbytes += nbytes
        self._waiting.append((self._free_s + self._delay_s, packet))

    def deliver(self) -> None:
        """Write what has arrived."""
        while self.due_s <= time.monotonic():
            try:
                os.write(self._sink, self._waiting.popleft()[1])
            except OSError:
                # The device is not up yet, or its queue is full.
                self.drops += 1


def _open_device(pid: int) -> int:
    """A tun device in the network namespace of a process. A thread enters it, and ends there."""
    opened: list[int] = []

    def enter() -> None:
        with open(f"/proc/{pid}/ns/net") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22s", DEVICE.encode(), flags, b""))
        fcntl.ioctl(device, _TUNSETVNETHDRSZ, struct.pack("i", _VNET_BYTES))
        fcntl.ioctl(device, _TUNSETOFFLOAD, _OFFLOADS)
        opened.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    if not opened:
        raise SystemExit(f"there is no tun device in the namespace of process {pid}")
    return opened[0]


def main(pid_a: str, pid_b: str, delay: str) -> None:
    """Pass packets on until standard input ends. Each line of it is an order; each is answered with the traffic."""
    a, b = _open_device(int(pid_a)), _open_device(int(pid_b))
    down, up = (_Direction(*ends, delay_s=float(delay)) for ends in ((a, b), (b, a)))
    bits_per_s = 1e9
    while True:
        wait_s = min(down.due_s, up.due_s) - time.monotonic()
        ready, _, _ = select.select([0, a, b], [], [], min(1.0, max(0.0, wait_s)))
        for direction in (down, up):
            if direction.source in ready:
                direction.take(bits_per_s)
            direction.deliver()
        if 0 in ready:
            line = sys.stdin.readline()
            if not line:
                return
            bits_per_s = json.loads(line).get("bits_per_s", bits_per_s)
            carried = Traffic(down.nbytes, up.nbytes, down.drops + up.drops)
            print(json.dumps(asdict(carried)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
