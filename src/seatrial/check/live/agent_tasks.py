"""Processes that an agent has started, with their output, their deadline, and the order that they are for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO

from seatrial.base import process

_LONGEST_BYTES = 64 << 20  # of one process's output; no tool prints more
_TAIL_BYTES = 4096  # of its stderr


@dataclass
class Task:
    """A process in a group of its own. `out` and `err` are its output so far, `err` only the end."""

    order: int
    pid: int
    until: float  # time.monotonic()
    limit_s: float
    out_pipe: FileIO
    err_pipe: FileIO
    prints_answer: bool = False  # `out` is to be the answer to the order, encoded
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    too_late: bool = False
    started_at: float = field(default_factory=time.monotonic)

    @property
    def pipes(self) -> list[FileIO]:
        """Open pipes to read from."""
        return [pipe for pipe in (self.out_pipe, self.err_pipe) if not pipe.closed]

    def read(self, pipe: FileIO) -> bool:
        """Read what has arrived, without blocking; False at the end of the stream."""
        while (data := pipe.read(1 << 16)) is not None:
            if not data:
                return False
            if pipe is self.out_pipe:
                self.out += data[: _LONGEST_BYTES - len(self.out)]
            else:
                self.err = (self.err + data)[-_TAIL_BYTES:]
        return True

    def kill(self) -> None:
        """SIGKILL to its group."""
        process.signal_group(self.pid, signal.SIGKILL)

    @property
    def stderr_tail(self) -> str:
        """The end of its stderr, as one line."""
        return last_lines(bytes(self.err))


def last_lines(data: bytes) -> str:
    """The last lines of `data` as one printable line of at most 300 characters."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    text = " / ".join(lines[-3:])[-300:]
    return "".join(c if c.isprintable() else "?" for c in text)


def start(
    order: int,
    body: Callable[[], int],
    limit_s: float,
    *,
    keep: Sequence[int] = (),
    prints_answer: bool = False,
) -> Task:
    """Fork a child that runs `body` with its stdout and stderr in pipes. `body` may exec another program.

    Descriptors in `keep` stay open through an exec. The child dies with this process (base/process.py).
    """
    out, out_in = os.pipe()
    err, err_in = os.pipe()

    def child() -> int:
        os.dup2(out_in, 1)
        os.dup2(err_in, 2)
        for fd in keep:
            os.set_inheritable(fd, True)
        return body()

    try:
        pid = process.fork(child)
    finally:
        os.close(out_in)
        os.close(err_in)
    os.set_blocking(out, False)
    os.set_blocking(err, False)
    return Task(order, pid, time.monotonic() + limit_s, limit_s, FileIO(out), FileIO(err), prints_answer)


def executes(argv: Sequence[str], environment: Mapping[str, str]) -> Callable[[], int]:
    """A body for `start` that execs the command `argv`, found on PATH."""

    def body() -> int:
        os.execvpe(argv[0], list(argv), dict(environment))

    return body


def listens(port: int) -> bool:
    """Whether a process on this host (in this network namespace) listens for TCP connections on `port`."""
    wanted = f":{port:04X}"
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as f:
                rows = [line.split() for line in f]
        except OSError:
            continue
        if any(len(row) > 3 and row[1].endswith(wanted) and row[3] == "0A" for row in rows[1:]):
            return True
    return False
