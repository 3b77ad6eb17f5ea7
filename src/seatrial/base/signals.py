"""Signals as something to wait for beside sockets, instead of handlers that run in the middle of anything."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable
from types import FrameType
from typing import Any


class SignalQueue:
    """While it is open, the given signals are queued instead of acted upon. Main thread only."""

    def __init__(self, signums: Iterable[signal.Signals]) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # What the user has had ignored (nohup, a background job) stays ignored.
        taken = [s for s in signums if signal.getsignal(s) is not signal.SIG_IGN]
        self._old: dict[signal.Signals, Any] = {s: signal.signal(s, _ignore) for s in taken}

    def fileno(self) -> int:
        return self._reader.fileno()

    def read(self) -> list[int]:
        """Numbers of the signals that have come since the last call, without waiting.

        Another signal of the process that has a handler of its own may be among them.
        """
        try:
            return list(os.read(self._reader.fileno(), 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        """Give the signals back to the handlers they had."""
        for signum, handler in self._old.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_fd)
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close the sockets only: for a forked child, which must not touch what it shares with its parent."""
        self._reader.close()
        self._writer.close()


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Handled by being in the queue. A real handler, because SIG_IGN would be inherited through exec."""
