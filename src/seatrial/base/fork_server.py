"""A process that forks children after slow imports: those of a node's ranks, and those of a check's pairs and groups.

A forked child has torch at once and shares the imported pages. The parent process, an agent, sends the orders.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from seatrial.base import process
from seatrial.base.event_loop import EventLoop
from seatrial.base.lines import Channel
from seatrial.base.signals import SignalQueue


def import_to_share(module: str) -> ModuleType:
    """Import `module` and prepare this process's memory for sharing by forked children.

    Raises RuntimeError if the import left a second thread running: a lock that it holds at the moment of the fork
    would never be released in the child.
    """
    gc.disable()  # imports make next to no garbage, and looking for it takes a fifth of their time
    imported = importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"importing {module} started {threads - 1} threads: a rank forked now could hang")
    gc.freeze()  # the collector would write to every page that it visits, and so copy it in each child
    gc.enable()
    return imported


class ForkServer:
    """Waits for orders and for the end of children, until the agent has exited or SIGTERM arrives."""

    def __init__(
        self, channel: Channel, obey: Callable[[dict[str, Any]], None], reaped: Callable[[int, int], None]
    ) -> None:
        """`obey(message)` is called for each order, `reaped(pid, status)` for each child that has ended."""
        self.channel = channel
        self.sources = EventLoop()
        self._obey, self._reaped = obey, reaped
        self._signals = SignalQueue((signal.SIGCHLD, signal.SIGTERM))
        self._terminated = False
        self.sources.watch(channel, self._on_channel)
        self.sources.watch(self._signals, self._on_signals)

    def wait(self, seconds: float | None = None) -> bool:
        """Handle what arrives within `seconds`; False once this process is to end."""
        self.sources.wait(seconds)
        return not (self._terminated or self.channel.closed)

    def fork(self, body: Callable[[], int], log: Path | int) -> int:
        """Fork a child that runs `body` (see `process.fork`), without what belongs to this process; returns its pid."""

        def child() -> int:
            self.sources.close()
            self.channel.close()
            self._signals.close_in_child()
            return body()

        return process.fork(child, log=log)

    def _on_channel(self) -> None:
        for message in self.channel.receive():
            self._obey(message)

    def _on_signals(self) -> None:
        arrived = self._signals.read()
        if signal.SIGCHLD in arrived:
            process.reap(self._reaped)
        self._terminated = self._terminated or signal.SIGTERM in arrived
