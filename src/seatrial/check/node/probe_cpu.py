"""CPU rates of a node without GPUs: matrix product, memory and loopback. For probe_rates.py; imports torch.

Nodes of a virtual cluster share one machine, and other work may run on it. So the measuring process holds the machine's
lock (released when its holder exits, leaving nothing), and the best of many repeats of a few milliseconds counts,
shorter than a time slice. Products are timed by each thread's own CPU time, unaffected by other work. Copies
are not: threads that do not run at once do not share the memory. So they report their share of CPU time for
judge_load.py.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from seatrial.base.kernel_files import bytes_of, fields_of
from seatrial.check.node.node_inventory import last_level_cache_bytes

_ROWS = 640  # of a product: 0.5 GFLOP, and its three matrices fit into a cache of 5 MiB
_SMALLEST_COPY, _LARGEST_COPY = 64 << 20, 1 << 30
# STREAM's rule: each array at least four times the last-level cache (cs.virginia.edu/stream/ref.html).
_CACHES = 4
_MEMORY_SHARE = 8  # two arrays take at most a quarter of what is available
_LEAST_REPEATS, _MOST_REPEATS = 3, 100_000
_OWN_SHARE = 0.9
_BARRIER_S = 60.0  # timeout, in case a thread has died
_CHUNK = 1 << 20
_WINDOW_S = 0.02
_TURN = "/dev/shm"
_LOOK_S = 0.02


def measure_cpu(seconds: float, threads: int, send: Callable[[dict[str, Any]], None]) -> None:
    """Send {"cpu": {...}}: GFLOP/s of an fp32 product, GB/s of a copy (read + write) and of TCP on 127.0.0.1.

    `seconds` is for all of it, including waiting for the machine's lock.
    """
    deadline = time.monotonic() + seconds
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(1)  # we start our own threads, so that each one's time is known
    size = _copy_bytes()
    send({"doing": "waiting for the machine's lock"})
    with _machine_lock(deadline - seconds * 0.4) as mine:
        part = max(0.2, min(0.5, (deadline - time.monotonic()) / 4))
        found: dict[str, Any] = {"threads": count, "copy_bytes": size, "turn": mine}
        send({"doing": "GEMMs"})
        found["gemm_gflop_s"] = _products(part, count)
        send({"doing": "copies in memory"})
        rate, share, repeats = _copies(part, count, size)
        found["memory_gb_s"], found["memory_share"], found["memory_repeats"] = rate, share, repeats
        send({"doing": "TCP on 127.0.0.1"})
        try:
            found["loopback_gb_s"], found["loopback_share"] = _loopback(part / 2)
        except OSError as error:
            found["loopback_gb_s"], found["loopback_problem"] = None, error.strerror or str(error)
    send({"cpu": found})


def _products(seconds: float, threads: int) -> float:
    """GFLOP/s of all threads together, each by its fastest product in its own CPU time."""
    rates = [0.0] * threads
    until = time.perf_counter() + seconds

    def work(number: int) -> None:
        torch.set_num_threads(1)  # OpenMP has this setting per thread
        a, b, c = (torch.rand(_ROWS, _ROWS) for _ in range(3))
        for repeat in range(_MOST_REPEATS):
            started_at = time.thread_time()
            torch.mm(a, b, out=c)
            rates[number] = max(rates[number], 2 * _ROWS**3 / (time.thread_time() - started_at) / 1e9)
            if repeat >= _LEAST_REPEATS and time.perf_counter() > until:
                break

    _all(work, threads)
    return sum(rates)


def _copies(seconds: float, threads: int, size: int) -> tuple[float, float, int]:
    """GB/s of all threads copying at once, their share of the CPUs meanwhile (0..1), and the number of repeats.

    A barrier before each repeat, because threads that drift apart no longer share the memory. They leave the barrier
    one after the other, so each copies for much longer than that takes, and is timed by its own clock.
    """
    words = max(1, size // 4 // threads)
    arrays = [
        (torch.ones(words), torch.ones(words)) for _ in range(threads)
    ]  # written to: otherwise no pages are allocated
    times: list[list[tuple[float, float, int]]] = [[] for _ in range(threads)]
    window, until, over = 2e-3 + 3e-4 * threads, time.perf_counter() + seconds, False

    def decide() -> None:  # by one thread while all wait, so that all see the same
        nonlocal over
        over = len(times[0]) >= _LEAST_REPEATS and time.perf_counter() > until

    together = threading.Barrier(threads, decide, timeout=_BARRIER_S)

    def work(number: int) -> None:
        source, target = arrays[number]
        for _ in range(_MOST_REPEATS):
            together.wait()
            if over:
                break
            used, started_at, copies = time.thread_time(), time.perf_counter(), 0
            while copies == 0 or time.perf_counter() - started_at < window:
                target.copy_(source)
                copies += 1
            times[number].append((time.perf_counter() - started_at, time.thread_time() - used, copies))

    _all(work, threads)
    found = []
    for repeat in zip(*times, strict=True):
        rate = sum(2 * words * 4 * copies / seconds for seconds, _, copies in repeat) / 1e9
        found.append(
            (min(1.0, sum(used for _, used, _ in repeat) / sum(seconds for seconds, _, _ in repeat)), rate)
        )
    # While a thread had to wait, the others had the memory for themselves: their rate is meaningless.
    own = [(rate, share) for share, rate in found if share >= _OWN_SHARE]
    rate, share = max(own) if own else max(found)[::-1]
    return rate, round(share, 3), len(found)


def _all(work: Callable[[int], None], threads: int) -> None:
    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _copy_bytes() -> int:
    """Size of one array, in whole MiB."""
    wanted = max(_SMALLEST_COPY, min(_LARGEST_COPY, _CACHES * (last_level_cache_bytes() or _SMALLEST_COPY)))
    available = bytes_of(fields_of(Path("/proc/meminfo")).get("MemAvailable"))
    available = wanted * _MEMORY_SHARE if available is None else available
    return max(1 << 20, min(wanted, available // _MEMORY_SHARE) >> 20 << 20)


@contextmanager
def _machine_lock(until: float) -> Iterator[bool]:
    """Hold the machine's lock; False if not acquired by `until`: then the CPU shares show whether others ran."""
    try:
        fd = os.open(_TURN, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        mine = False
        while not mine:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mine = True
            except BlockingIOError:
                if time.monotonic() >= until:
                    break
                time.sleep(_LOOK_S)
        yield mine
    finally:
        os.close(fd)


def _loopback(seconds: float) -> tuple[float, float]:
    """GB/s of one TCP connection to this host in its best window, and the CPUs that both ends had then, 1 at most."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=5.0)
        far, _ = server.accept()
    windows: list[tuple[float, float]] = []  # GB/s, share

    def receive() -> None:
        into = bytearray(_CHUNK)
        got, started_at, cpu = 0, time.perf_counter(), time.process_time()
        while n := far.recv_into(into):
            got += n
            if (elapsed_s := time.perf_counter() - started_at) >= _WINDOW_S:
                windows.append((got / elapsed_s / 1e9, (time.process_time() - cpu) / elapsed_s))
                got, started_at, cpu = 0, time.perf_counter(), time.process_time()

    reader = threading.Thread(target=receive)
    with near, far:
        reader.start()
        data, until = bytes(_CHUNK), time.perf_counter() + seconds
        while time.perf_counter() < until:
            near.sendall(data)
        near.shutdown(socket.SHUT_WR)
        reader.join()
    if not windows:
        raise OSError("no data received")
    rate, share = max(windows)
    return rate, round(min(1.0, share), 3)
