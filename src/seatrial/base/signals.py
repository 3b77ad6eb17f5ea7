"""Signals as a descriptor to poll along with sockets, instead of handlers that interrupt arbitrary code."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class SignalQueue:
    """Queues the given signals, while it is open, instead of running their handlers. Main thread only."""

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Signals that were ignored at start (nohup, a background job) stay ignored.
        taken = [s for s in signums if signal.getsignal(s) is not signal.SIG_IGN]
        self._old: dict[signal.Signals, Any] = {s: signal.signal(s, _ignore) for s in taken}

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> list[int]:
        """Numbers of the signals that have arrived since the last call, without blocking.

        Other signals of the process that have their own handler may be among them.
        """
        try:
            return list(os.read(self._reader.fileno(), 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Restore the previous handlers."""
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the sockets only: for a forked child, which must not touch what it shares with its parent."""
        self._reader.close()
        self._writer.close()


def _ignore(signum: int, frame: FrameType | None) -> None:
    """No-op: the signal is handled through the queue. Not SIG_IGN, which would be inherited through exec."""


@contextmanager
def interrupting() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what runs inside like Ctrl-C, by KeyboardInterrupt. Main thread only."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)
