"""TCP reachability between hosts, and an agent's first message about its host."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import select
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import seatrial
from seatrial.base.kernel_files import text_of
from seatrial.check.live import messages as msg


def hello(port: int) -> msg.Hello:
    """What the conductor must know about this host, whose agent listens on `port`."""
    return msg.Hello(
        version=seatrial.__version__,
        python=platform.python_version(),
        pid=os.getpid(),
        host=socket.gethostname(),
        machine=text_of(Path("/proc/sys/kernel/random/boot_id")) or socket.gethostname(),
        port=port,
        gpus=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
        rdma=sorted(_names("/sys/class/infiniband")),
    )


def _names(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def reach(targets: Sequence[msg.Endpoint], limit_s: float) -> msg.Reached:
    """Whether a TCP connection to each target succeeds within `limit_s`, all tried at once.

    A refused connection has reached the host: its kernel has answered.
    """
    reached, why = [False] * len(targets), ["no response"] * len(targets)
    trying: dict[int, tuple[int, socket.socket]] = {}
    poll = select.poll()
    until = time.monotonic() + limit_s

    def ended(number: int, code: int) -> None:
        reached[number] = code in (0, errno.ECONNREFUSED)
        why[number] = "" if reached[number] else os.strerror(code)

    for number, target in enumerate(targets):
        try:
            family, kind, protocol, _, place = socket.getaddrinfo(
                target.address, target.port, type=socket.SOCK_STREAM
            )[0]
        except OSError as error:
            why[number] = f"{target.address} is unknown: {error.strerror}"
            continue
        s = socket.socket(family, kind, protocol)
        s.setblocking(False)
        code = s.connect_ex(place)
        if code == errno.EINPROGRESS:
            trying[s.fileno()] = (number, s)
            poll.register(s.fileno(), select.POLLOUT)
        else:
            ended(number, code)
            s.close()
    while trying and (left := until - time.monotonic()) > 0:
        for fd, _ in poll.poll(left * 1000):
            number, s = trying.pop(fd)
            poll.unregister(fd)
            ended(number, s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            s.close()
    for _, s in trying.values():
        s.close()
    return msg.Reached(reached, why)


def partners(members: Sequence[int]) -> dict[int, list[int]]:
    """The partners that each of `members` should try to reach: at distances 1, 2, 4, ... around the ring.

    log2 of them for each, and the graph stays connected when some are missing.
    """
    count = len(members)
    steps = [1 << k for k in range(max(1, (count - 1).bit_length())) if 1 << k < count]
    return {member: [members[(i + step) % count] for step in steps] for i, member in enumerate(members)}


def cut_off(members: Iterable[int], reached: Iterable[tuple[int, int]]) -> set[int]:
    """Those of `members` that the network does not connect with most of the others; `reached` are (from, to).

    Empty if no component has more than half of them: then it is undecidable which side is cut off.
    """
    everyone = list(members)
    neighbours: dict[int, set[int]] = defaultdict(set)
    for a, b in reached:
        neighbours[a].add(b)
        neighbours[b].add(a)
    left = set(everyone)
    while left:
        part, open_ = set(), [min(left)]
        while open_:
            node = open_.pop()
            if node not in part:
                part.add(node)
                open_ += neighbours[node] & left
        if 2 * len(part) > len(everyone):
            return set(everyone) - part
        left -= part
    return set()
