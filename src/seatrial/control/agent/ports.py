"""The TCP port of the process-group store."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from seatrial.base.errors import InputError

_RANGE_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 15000


def is_free(port: int) -> bool:
    """Whether a server could listen on `port` of this machine now, on every address, as the store does."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as s:
        # As servers do: without it, connections of an earlier run that are still in TIME_WAIT would count as use.
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            s.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))
            s.listen(1)
        except OSError:
            return False
    return True


def check_port(port: int) -> None:
    """Raise InputError if `port` is in use."""
    if not is_free(port):
        raise InputError(
            f"port {port} is in use",
            hint=f"`ss -ltnp 'sport = :{port}'` shows which process listens there; choose another cluster.port, or leave it out "
            "for a free one",
        )


def free_port() -> int:
    """A port without a listener.

    It is below the kernel's port range for outgoing connections: until the store listens, seconds from now, another
    process's connection could otherwise take it.
    """
    try:
        lowest_outgoing = int(_RANGE_FILE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        lowest_outgoing = 0
    if lowest_outgoing > _LOWEST + 1000:
        choose = random.SystemRandom()  # not the seeded one: two starts with one seed must not collide
        for _ in range(64):
            port = choose.randrange(_LOWEST, lowest_outgoing)
            if is_free(port):
                return port
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def check_loopback() -> None:
    """Raise InputError where processes of this machine cannot reach each other over 127.0.0.1."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            socket.create_connection(server.getsockname(), timeout=2).close()
    except OSError as error:
        raise InputError(
            f"127.0.0.1 cannot be reached ({error.strerror or error}), and ranks on this machine communicate over it",
            hint="is the loopback interface up? `ip link set lo up`",
        ) from error
