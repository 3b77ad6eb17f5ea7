"""What the kernel measured on each TCP connection of this process: struct tcp_info of linux/tcp.h, Linux 4.9 and later.

Gloo, and NCCL without RDMA, send through such connections. How fast each one emptied while it had data to send names a
slow link without any traffic of its own.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass

# Offsets in struct tcp_info; new fields are only ever appended to it.
_RTT, _RETRANSMITTED = ("<I", 68), ("<I", 100)  # us; segments
_ACKED, _BUSY = ("<Q", 120), ("<Q", 168)  # bytes; us
_SIZE = 176


@dataclass(frozen=True)
class Connection:
    """One established connection, as its sender sees it, since it was made."""

    here: str  # addresses without ports
    there: str
    sent_bytes: int  # acknowledged by the peer
    busy_s: float  # time in which data was waiting to be sent or acknowledged
    rtt_s: float  # smoothed
    retransmitted: int  # segments

    @property
    def bytes_per_s(self) -> float | None:
        """The rate at which it sent while it had data to send; None if it never had."""
        return self.sent_bytes / self.busy_s if self.busy_s > 0 else None


def connections() -> list[Connection]:
    """Of this process, in no order; empty if the kernel does not report them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            fd = os.dup(int(name))
        except OSError:  # closed meanwhile, as the descriptor of this listing is
            continue
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                found.append(_read(fd))
        except OSError:  # of another kind, or not connected
            continue
        finally:
            os.close(fd)
    return [each for each in found if each is not None]


def _read(fd: int) -> Connection | None:
    of = socket.socket(fileno=os.dup(fd))
    with of:
        if of.family not in (socket.AF_INET, socket.AF_INET6) or of.type != socket.SOCK_STREAM:
            return None
        here, there = (str(end[0]).removeprefix("::ffff:") for end in (of.getsockname(), of.getpeername()))
        info = of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    if len(info) < _SIZE:
        return None

    def value(field: tuple[str, int]) -> int:
        return int(struct.unpack_from(field[0], info, field[1])[0])

    return Connection(
        here, there, value(_ACKED), value(_BUSY) / 1e6, value(_RTT) / 1e6, value(_RETRANSMITTED)
    )
