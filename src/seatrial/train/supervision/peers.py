"""Handling of lost peers: a rank drops all its connections at once, and can then join another world."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

_DIAL_S = 1.0  # timeout of one attempt, where not even a refusal comes back
_DIAL_AGAIN_S = 0.005


def break_connections() -> int:
    """Shut down every TCP connection of this process for reading; returns how many there were.

    gloo's thread then reads the end of each connection and closes it, so threads that wait in a collective, here or at
    the other end, get an error within milliseconds. Works from any thread. `ProcessGroupGloo.abort` and `shutdown` do
    not: measured on torch 2.13, a collective that another thread waits in keeps waiting. Listening sockets are left
    alone, so that a store's own thread is not disturbed.

    A thread that sends at this moment must not fail: gloo (torch 2.13) takes a reset connection (EPIPE) for one that
    is full and queues the message; the error that its thread reads next is passed to every waiting operation except
    those in that queue. The sender waits until gloo's timeout, and no call ends that. A peer's death can have the same
    effect, and so can a message that is larger than the socket's buffer: the agent kills a rank that does not leave.
    """
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            # The duplicate is ours to close; it refers to the same connection.
            fd = os.dup(int(name))
        except OSError:
            continue  # closed in the meantime
        broken += _shut_down(fd)
    return broken


def _shut_down(fd: int) -> bool:
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return False  # not a socket
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RD)
        except OSError:
            return False  # not connected, or not any more
        return True


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
    return (time.perf_counter() - begin) * 1e3


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
