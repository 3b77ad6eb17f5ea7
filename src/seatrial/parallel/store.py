"""The TCPStore of a process group, listening on a single address."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_BACKLOG = 4096  # all ranks connect at once; the kernel caps it


def serve_store(address: str, port: int, timeout: timedelta) -> TCPStore:
    """Create rank 0's store on `port` of `address`, 0 for a free one. Raises OSError if it cannot listen there.

    By default torch listens on every interface, and the store does not authenticate clients: any user of the host, or
    of another network, could write to it. Clients that can reach `address` still can.
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
            master_listen_fd=listening.detach(),  # closed by the store
        )
