"""Hosts that share nothing but the disk: network namespaces of this machine, joined by one bridge.

Cutting or slowing such a host is what a pulled cable or a bad link is to a cluster, with the kernel's own TCP behind
it. The bridge is in a namespace of its own, so nothing of this machine's network is touched. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from types import TracebackType

from seatrial.base.errors import SeatrialError

_FOLDER = "/run/netns"
_NAME = re.compile(r"st-(\d+)(?:x\d+)?-(?:\d+|hub)")
_ADDRESS_BITS = 16
_LATENCY_MS = 400  # how long a packet may wait in a slowed link before it is dropped
_HZ = 100  # tbf hands out tokens at least this often; a smaller bucket would not reach the rate
_LEAST_BURST_BYTES = 32 * 1024

_numbers = itertools.count()


class Unavailable(SeatrialError):
    """This machine, or this user, cannot have network namespaces; the message says why."""


class Hosts:
    """`count` hosts that reach each other; gone again, with everything made for them, when the context ends.

    Processes that run in them are the caller's to end.
    """

    interface = "eth0"  # of each host, inside it

    def __init__(self, count: int) -> None:
        self.count = count
        number = next(_numbers)
        self._stem = f"st-{os.getpid()}" + (f"x{number}" if number else "")
        self._hub = f"{self._stem}-hub"
        self._made: list[str] = []
        self._slowed: set[int] = set()

    def name(self, host: int) -> str:
        """The name of the namespace, as `ip netns` knows it."""
        assert 0 <= host < self.count
        return f"{self._stem}-{host}"

    def address(self, host: int) -> str:
        """Its IPv4 address; every host of the context has one in the same network."""
        assert 0 <= host < self.count
        high, low = divmod(host + 1, 256)
        return f"10.77.{high}.{low}"

    def prefix(self, host: int) -> list[str]:
        """The command that executes the rest of its line inside `host`, in the same process."""
        return [_tool("ip"), "netns", "exec", self.name(host)]

    def __enter__(self) -> Hosts:
        """Make them. Raises Unavailable where that is not possible; nothing is left behind then."""
        if os.geteuid() != 0:
            raise Unavailable("network namespaces need root")
        for tool in ("ip", "tc"):
            _tool(tool)
        remove_orphans()
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    # -- what can happen to a host

    def down(self, host: int) -> None:
        """Cut its cable: nothing comes through any more, and nobody is told. What is inside goes on."""
        self._in_hub("link", "set", self._port(host), "down")

    def up(self, host: int) -> None:
        """Put the cable back."""
        self._in_hub("link", "set", self._port(host), "up")

    def slow(self, host: int, rate_mbit: float) -> None:
        """Let its link carry `rate_mbit` Mbit/s in each direction (tc's token bucket)."""
        bits_per_s = round(rate_mbit * 1e6)
        burst = max(_LEAST_BURST_BYTES, bits_per_s // 8 // _HZ)
        shape = ["tbf", "rate", f"{bits_per_s}bit", "burst", str(burst), "latency", f"{_LATENCY_MS}ms"]
        for place, device in self._ends(host):
            _call("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *shape)
        self._slowed.add(host)

    def fast(self, host: int) -> None:
        """Take the limit away."""
        if host in self._slowed:
            for place, device in self._ends(host):
                _call("tc", "-n", place, "qdisc", "del", "dev", device, "root")
            self._slowed.remove(host)

    # -- making and removing

    def _make(self) -> None:
        self._add(self._hub)
        self._in_hub("link", "add", "bridge", "type", "bridge")
        self._in_hub("link", "set", "bridge", "up")
        for host in range(self.count):
            name, port = self.name(host), self._port(host)
            self._add(name)
            peer = ["peer", "name", self.interface, "netns", name]
            self._in_hub("link", "add", port, "type", "veth", *peer)
            self._in_hub("link", "set", port, "master", "bridge", "up")
            _call("ip", "-n", name, "link", "set", "lo", "up")
            address = f"{self.address(host)}/{_ADDRESS_BITS}"
            _call("ip", "-n", name, "address", "add", address, "dev", self.interface)
            _call("ip", "-n", name, "link", "set", self.interface, "up")

    def _add(self, name: str) -> None:
        # Noted first: interrupted in the middle, it may exist although nobody said so.
        self._made.append(name)
        _call("ip", "netns", "add", name)

    def _remove(self) -> None:
        """A namespace takes its interfaces along, and a link is gone with either of its ends."""
        refused: Unavailable | None = None
        while self._made:
            name = self._made.pop()
            if os.path.exists(f"{_FOLDER}/{name}"):
                try:
                    _call("ip", "netns", "delete", name)
                except Unavailable as error:  # the others go nevertheless
                    refused = error
        if refused is not None:
            raise refused

    def _in_hub(self, *arguments: str) -> None:
        _call("ip", "-n", self._hub, *arguments)

    def _port(self, host: int) -> str:
        return f"host{host}"

    def _ends(self, host: int) -> list[tuple[str, str]]:
        """(namespace, device) of both ends of its link: each limits what it sends."""
        return [(self.name(host), self.interface), (self._hub, self._port(host))]


def remove_orphans() -> None:
    """Remove hosts whose maker was killed before it could; none in which a process still runs."""
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return
    for name in names:
        made = _NAME.fullmatch(name)
        if made is None or os.path.exists(f"/proc/{made[1]}"):
            continue
        with contextlib.suppress(Unavailable):  # somebody else was quicker
            if not _call("ip", "netns", "pids", name).strip():
                _call("ip", "netns", "delete", name)


def _tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise Unavailable(f"`{name}` (iproute2) is not installed")
    return path


def _call(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [_tool(tool), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise Unavailable(f"`{tool} {' '.join(arguments)}` failed: {said}")
    return done.stdout
