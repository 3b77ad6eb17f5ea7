"""Handling of lost peers: a rank drops all its connections at once, and can then join another world."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

_CONNECT_TIMEOUT_S = 1.0  # of one attempt, if packets are dropped rather than refused
_RETRY_S = 0.005


class _HalfClosed:
    """A connection that was shut down for reading: a duplicated descriptor keeps it open after gloo closes its own."""

    def __init__(self, fd: int, inode: int, duplicate: socket.socket) -> None:
        self._fd, self._inode, self._duplicate = fd, inode, duplicate

    def end(self, *, now: bool = False) -> None:
        """Send the peer a FIN once no thread here can write to it any more; with `now`, at once."""
        try:
            if not now and os.fstat(self._fd).st_ino == self._inode:
                return
        except OSError:
            pass  # closed, as expected
        with contextlib.suppress(OSError):  # the peer closed it first
            self._duplicate.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._duplicate.close()


_broken: dict[int, _HalfClosed] = {}  # by inode
_lock = threading.Lock()  # of `_broken`


def break_connections() -> int:
    """Shut down every TCP connection of this process for reading; returns how many there were.

    gloo's thread then reads end-of-file from each connection and closes it, so threads that wait in a collective get an
    error within milliseconds, here and, once the FIN arrives, in the peer. Works from any thread.
    `ProcessGroupGloo.abort` and `shutdown` do not: measured on torch 2.13, a collective that another thread waits in
    keeps waiting. Listening sockets stay as they are, so that a store's own thread is not disturbed.

    A concurrent send must not fail, here or in the peer: gloo (torch 2.13) treats a closed connection (EPIPE) like a
    full one and queues the message; the error that its thread reads next is passed to every waiting operation except
    those in that queue. The sender waits until gloo's timeout, and no call interrupts it. So a connection stays open
    until the peer has had time to read end-of-file: `release_connections` closes it. A peer's death can have the same
    effect, and so can a message larger than the socket's buffer: the agent kills a rank that does not leave. Peers get
    the FIN of a connection that gloo has closed from the next call, or from `teardown`.
    """
    with _lock:
        broken = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                # A duplicate: closing it does not close gloo's descriptor.
                fd = os.dup(int(name))
            except OSError:
                continue  # closed in the meantime
            broken += _shut_down(int(name), fd)
        for each in _broken.values():
            each.end()
        return broken


def _shut_down(original: int, fd: int) -> bool:
    inode = os.fstat(fd).st_ino
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return False  # not a socket
    try:
        stream = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
        if inode not in _broken and stream and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.shutdown(socket.SHUT_RD)
            _broken[inode] = _HalfClosed(original, inode, sock)
            return True
    except OSError:
        pass  # not connected, or not any more
    sock.close()
    return False


def teardown() -> float:
    """Leave all process groups after a failure, so that every peer notices at once; returns its duration in ms.

    Call it on the main thread after releasing the model and everything else that references process groups: a group
    that is still referenced keeps its threads and sockets. Then this process may call `init_process_group` again, also
    as another rank.
    """
    begin = time.perf_counter()
    break_connections()
    if dist.is_initialized():
        # Abort, not destroy: with NCCL the latter waits for collectives that peers never finish.
        dist.distributed_c10d._abort_process_group()
    # `init_process_group` counts a group before creating it, and the number is part of every store key: if it failed
    # midway, this process would next wait for keys that no other rank writes.
    dist.distributed_c10d._world.group_count = 0
    gc.collect()
    with _lock:
        for each in _broken.values():
            each.end(now=True)
    return (time.perf_counter() - begin) * 1e3


def release_connections() -> None:
    """Close the connections that `break_connections` kept open; call it once all peers have left their groups."""
    with _lock:
        for each in _broken.values():
            each.close()
        _broken.clear()


def wait_for_store(
    address: str, port: int, *, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the store listens on `address`:`port`, before `init_process_group` in every rank but the first.

    torch's own client sleeps 0.4 to 0.7 s after a refused connection, which every new world risks; this polls every few
    ms. Raises ConnectionError after `timeout_s`, and as soon as `stop()` is true.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            if stop() or time.monotonic() > end:
                raise ConnectionError(f"no store at {address}:{port}: {error}") from error
            time.sleep(_RETRY_S)
        else:
            return
