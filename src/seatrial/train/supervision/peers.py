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

_DIAL_S = 1.0  # timeout of one attempt, where not even a refusal comes back
_DIAL_AGAIN_S = 0.005
_CLOSING_MS = 20  # how long gloo has for closing its connections before the caller continues


class _Broken:
    """A connection that was shut down for reading: a duplicate keeps it open after gloo has closed its own."""

    def __init__(self, fd: int, inode: int, duplicate: socket.socket) -> None:
        self._fd, self._inode, self._duplicate = fd, inode, duplicate

    def end(self, *, now: bool = False) -> None:
        """Send the peer the end of the connection, once no thread here can write to it any more; or at once."""
        try:
            if not now and os.fstat(self._fd).st_ino == self._inode:
                return
        except OSError:
            pass  # closed, as it should be
        with contextlib.suppress(OSError):  # the peer was first
            self._duplicate.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._duplicate.close()


_broken: dict[int, _Broken] = {}  # by inode
_lock = threading.Lock()  # of `_broken`


def break_connections() -> int:
    """Shut down every TCP connection of this process for reading; returns how many there were.

    gloo's thread then reads the end of each connection and closes it, so threads that wait in a collective get an error
    within milliseconds, here and, when the end of the connection arrives there, in the peer. Works from any thread.
    `ProcessGroupGloo.abort` and `shutdown` do not: measured on torch 2.13, a collective that another thread waits in
    keeps waiting. Listening sockets are left alone, so that a store's own thread is not disturbed.

    A thread that sends at this moment must not fail, here or in the peer: gloo (torch 2.13) takes a closed connection
    (EPIPE) for one that is full and queues the message; the error that its thread reads next is passed to every waiting
    operation except those in that queue. The sender waits until gloo's timeout, and no call ends that. So a connection
    stays open until the peer can have read its end: `release_connections` closes it. A peer's death can have the same
    effect, and so can a message that is larger than the socket's buffer: the agent kills a rank that does not leave.
    """
    with _lock:
        broken = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                # The duplicate is ours to close; it refers to the same connection.
                fd = os.dup(int(name))
            except OSError:
                continue  # closed in the meantime
            broken += _shut_down(int(name), fd)
        for _ in range(_CLOSING_MS):
            time.sleep(1e-3)
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
            _broken[inode] = _Broken(original, inode, sock)
            return True
    except OSError:
        pass  # not connected, or not any more
    sock.close()
    return False


def teardown() -> float:
    """Leave all process groups after a failure, so that every peer notices at once; returns the milliseconds it took.

    Call it on the main thread after releasing the model and everything else that holds process groups: a group that is
    still referenced keeps its threads and sockets, although it can never be used again. Then this process may call
    `init_process_group` again, also as another rank.
    """
    begin = time.perf_counter()
    break_connections()
    if dist.is_initialized():
        # Abort, not destroy: with NCCL the latter would wait for what peers will never finish.
        dist.distributed_c10d._abort_process_group()
    # `init_process_group` counts a group before creating it, and the number is part of every key in the store: if it
    # failed midway, this process would next time wait for keys that no other rank writes.
    dist.distributed_c10d._world.group_count = 0
    gc.collect()
    with _lock:
        for each in _broken.values():
            each.end(now=True)
    return (time.perf_counter() - begin) * 1e3


def release_connections() -> None:
    """Close what `break_connections` kept open; call it when all peers have left their groups."""
    with _lock:
        for each in _broken.values():
            each.close()
        _broken.clear()


def wait_for_store(
    address: str, port: int, *, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Wait until the store listens on `address`:`port`, before `init_process_group` in every rank but the first.

    torch's own client waits 0.4 to 0.7 s after a first refusal, and every new world starts with that race; this wait is
    only as long as rank 0 needs. Raises ConnectionError after `timeout_s`, and as soon as `stop()` is true.
    """
    end = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((address, port), timeout=_DIAL_S).close()
        except OSError as error:
            if stop() or time.monotonic() > end:
                raise ConnectionError(f"no store at {address}:{port}: {error}") from error
            time.sleep(_DIAL_AGAIN_S)
        else:
            return
