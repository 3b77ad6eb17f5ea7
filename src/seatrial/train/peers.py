"""What a rank does about peers that went away: it lets go of all of them at once, and can join another world."""

from __future__ import annotations

import gc
import os
import socket
import time
from collections.abc import Callable

import torch.distributed as dist

_DIAL_S = 1.0  # one attempt, where not even a refusal comes back
_DIAL_AGAIN_S = 0.005


def break_connections() -> int:
    """Shut down every TCP connection of this process; how many there were.

    Whoever waits in a collective, here or at the other end, gets an error within milliseconds. It works from any
    thread. `ProcessGroupGloo.abort` and `shutdown` do not: measured on torch 2.13, a collective that another thread
    waits in goes on waiting. Sockets that listen are left alone, so that a store's own thread is not disturbed.
    """
    broken = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            # A duplicate is ours to close; the connection behind it is the same one.
            fd = os.dup(int(name))
        except OSError:
            continue  # closed since
        broken += _shut_down(fd)
    return broken


def _shut_down(fd: int) -> bool:
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return False  # no socket
    with sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        try:
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return False
            sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # not connected, or not any more
        return True


def teardown() -> float:
    """Leave all process groups after a failure, so that every neighbour notices at once; milliseconds it took.

    Call it on the main thread after the model and whatever else holds process groups was let go of: a group that is
    still referenced keeps its threads and sockets, although it can never be used again. Then this process may call
    `init_process_group` anew, as another rank if need be.
    """
    begin = time.perf_counter()
    break_connections()
    if dist.is_initialized():
        # Abort, not destroy: with NCCL the latter would wait for what peers will never finish.
        dist.distributed_c10d._abort_process_group()
    # `init_process_group` counts a group before it has made it, and its number is part of every key in the store: where
    # it failed midway, this process would next time wait for keys that none of the others writes.
    dist.distributed_c10d._world.group_count = 0
    gc.collect()
    return (time.perf_counter() - begin) * 1e3


def wait_for_store(
    address: str, port: int, *, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> None:
    """Wait until somebody listens on `address`:`port`, before `init_process_group` in every rank but the first.

    torch's own client waits 0.4 to 0.7 s after a first refusal, and every new world begins with that race; here it
    costs what the other side takes. Raises ConnectionError after `timeout_s`, and as soon as `stop()` is true.
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
