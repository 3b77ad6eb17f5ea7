"""Hosts that share nothing but the disk: network namespaces on this machine, joined by one bridge.

Cutting or slowing such a host models a pulled cable or a bad link in a cluster, with the kernel's real TCP behind it.
The bridge is in its own namespace, so this machine's network is not touched. Needs root.
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
_HZ = 100  # tbf issues tokens at least this often; a smaller bucket would not reach the rate
_LEAST_BURST_BYTES = 32 * 1024

_numbers = itertools.count()


class Unavailable(SeatrialError):
    """Network namespaces are unavailable on this machine or to this user; the message states why."""


class Hosts:
    """`count` hosts that reach each other, removed with everything made for them when the context exits.

    The caller must end the processes that run in them.
    """

    interface = "eth0"  # of each host, in its namespace

    def __init__(self, count: int) -> None:
        self.count = count
        number = next(_numbers)
        self._stem = f"st-{os.getpid()}" + (f"x{number}" if number else "")
        self._hub = f"{self._stem}-hub"
        self._made: list[str] = []
        self._slowed: set[int] = set()

    def name(self, host: int) -> str:
        """Name of the host's namespace, as in `ip netns`."""
        assert 0 <= host < self.count
        return f"{self._stem}-{host}"

    def address(self, host: int) -> str:
        """The host's IPv4 address; all hosts of the context are in one network."""
        assert 0 <= host < self.count
        high, low = divmod(host + 1, 256)
        return f"10.77.{high}.{low}"

    def prefix(self, host: int) -> list[str]:
        """Command prefix that executes the rest of its line inside `host`, in the same process."""
        return [_tool("ip"), "netns", "exec", self.name(host)]

    def __enter__(self) -> Hosts:
        """Create the hosts. Raises Unavailable if that is not possible, and then leaves nothing behind."""
        check_available("ip", "tc")
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

    # -- faults of a host

    def down(self, host: int) -> None:
        """Cut the host's link: nothing gets through, and no peer is notified. Processes inside keep running."""
        self._in_hub("link", "set", self._port(host), "down")

    def up(self, host: int) -> None:
        """Restore the link."""
        self._in_hub("link", "set", self._port(host), "up")

    def slow(self, host: int, rate_mbit: float) -> None:
        """Limit the host's link to `rate_mbit` Mbit/s in each direction (tc's token bucket)."""
        bits_per_s = round(rate_mbit * 1e6)
        burst = max(_LEAST_BURST_BYTES, bits_per_s // 8 // _HZ)
        shape = ["tbf", "rate", f"{bits_per_s}bit", "burst", str(burst), "latency", f"{_LATENCY_MS}ms"]
        for place, device in self._ends(host):
            _call("tc", "-n", place, "qdisc", "replace", "dev", device, "root", *shape)
        self._slowed.add(host)

    def fast(self, host: int) -> None:
        """Remove the limit."""
        if host in self._slowed:
            for place, device in self._ends(host):
                _call("tc", "-n", place, "qdisc", "del", "dev", device, "root")
            self._slowed.remove(host)

    # -- creating and removing

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
        # Recorded first: after an interrupt in the middle it may exist although the command did not report success.
        self._made.append(name)
        _call("ip", "netns", "add", name)

    def _remove(self) -> None:
        """Delete the namespaces; each takes its interfaces along, and a veth pair goes with either of its ends."""
        refused: Unavailable | None = None
        while self._made:
            name = self._made.pop()
            if os.path.exists(f"{_FOLDER}/{name}"):
                try:
                    _call("ip", "netns", "delete", name)
                except Unavailable as error:  # remove the others nevertheless
                    refused = error
        if refused is not None:
            raise refused

    def _in_hub(self, *arguments: str) -> None:
        _call("ip", "-n", self._hub, *arguments)

    def _port(self, host: int) -> str:
        return f"host{host}"

    def _ends(self, host: int) -> list[tuple[str, str]]:
        """(namespace, device) of both ends of the host's link: each limits what it sends."""
        return [(self.name(host), self.interface), (self._hub, self._port(host))]


def check_available(*tools: str) -> None:
    """Raise Unavailable if this user cannot make namespaces, or a tool is missing."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    for tool in tools:
        _tool(tool)


def isolated(hostname: str) -> list[str]:
    """Command prefix that executes the rest of its line in the same process, with its own /dev/shm, TMPDIR and host
    name. They are removed with the last process that uses them."""
    script = (
        "mount -t tmpfs tmpfs /dev/shm && mkdir -m 1777 /dev/shm/tmp && "
        'echo "$0" > /proc/sys/kernel/hostname && export TMPDIR=/dev/shm/tmp && exec "$@"'
    )
    return [_tool("unshare"), "--mount", "--uts", "sh", "-c", script, hostname]


def remove_orphans() -> None:
    """Remove hosts whose creator was killed before it could do so, except those in which a process still runs."""
    try:
        names = os.listdir(_FOLDER)
    except OSError:
        return
    for name in names:
        made = _NAME.fullmatch(name)
        if made is None or os.path.exists(f"/proc/{made[1]}"):
            continue
        with contextlib.suppress(Unavailable):  # another process removed it first
            if not _call("ip", "netns", "pids", name).strip():
                _call("ip", "netns", "delete", name)


def _tool(name: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")
    if path is None:
        raise Unavailable(f"`{name}` ({'util-linux' if name == 'unshare' else 'iproute2'}) is not installed")
    return path


def _call(tool: str, *arguments: str) -> str:
    done = subprocess.run(
        [_tool(tool), *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode != 0:
        text = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise Unavailable(f"`{tool} {' '.join(arguments)}` failed: {text}")
    return done.stdout
