"""The store that the ranks of a process group meet at: it listens on one address and nowhere else."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_BACKLOG = 4096  # all ranks of a large world connect at the same moment; the kernel caps it


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """The store of rank 0, on `port` of `address`, 0 for a free one. Raises OSError where it cannot listen there.

    Left to itself torch listens on every interface, and the store believes whoever connects: on a host with other
    users, or another network, anybody could write into it. What can reach `address` still can.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, port))
        listening.listen(_BACKLOG)
        number = listening.getsockname()[1]
        return TCPStore(
            address,
            number,
            None,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),  # the store closes it
        )
