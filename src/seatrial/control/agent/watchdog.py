"""Watch a node's processes that others wait for: stalled helpers are killed, stalled ranks are reported."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from seatrial.base import process
from seatrial.base.stalled import SAMPLE_S, StalledProcesses
from seatrial.control.agent.worker import Worker
from seatrial.control.agent.workers import Workers

_ANSWER_CHECKS = 15  # unanswered checks before the fork server counts as stalled; on a loaded host it may wait for CPU time


class Watchdog:
    """Checks the processes of one agent once a second. A killed process is handled as if it had crashed."""

    def __init__(
        self,
        workers: Workers,
        helpers: Callable[[], dict[int, str]],
        parent: int | None,
        *,
        rank_stopped: Callable[[Worker, str], None],
        report: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """`helpers()`: name of each transfer, and of the monitor, by pid; `parent`: pid of the launcher.

        `rank_stopped(worker, why)` is called once for each stalled rank at work; `report(message, data)` for everything
        else.
        """
        self._workers, self._helpers, self._parent = workers, helpers, parent
        self._rank_stopped, self._report = rank_stopped, report
        self._stalled = StalledProcesses()
        self._reported: set[int] = set()
        self.deadline = time.monotonic() + SAMPLE_S

    def tick(self) -> None:
        """Check the processes if a check is due."""
        if time.monotonic() < self.deadline:
            return
        self.deadline = time.monotonic() + SAMPLE_S
        workers = {w.pid: w for w in self._workers.workers.values() if w.alive and w.pid is not None}
        names = self._helpers()
        if self._workers.fork_server is not None:
            names[self._workers.fork_server] = "fork server"
        if self._parent is not None:
            names[self._parent] = "launcher"
        # While the fork server imports torch it must make progress; afterwards it idles until it gets a request.
        imports = None if self._workers.fork_server_ready else self._workers.fork_server
        stalled = self._stalled.find({pid: pid == imports for pid in (*workers, *names)})
        if self._workers.ask_fork_server() > _ANSWER_CHECKS and self._workers.fork_server is not None:
            stalled.setdefault(
                self._workers.fork_server, f"has not answered for {_ANSWER_CHECKS * SAMPLE_S:.0f} s"
            )
        self._reported &= stalled.keys()
        for pid, why in stalled.items():
            if pid in workers:
                self._on_rank(workers[pid], why)
            else:
                self._on_helper(pid, names[pid], why)

    def _on_rank(self, worker: Worker, why: str) -> None:
        assert worker.pid is not None
        if not worker.runs:
            # It only holds a state or is about to exit, and its end is awaited.
            self._report(f"rank {worker.rank} (process {worker.pid}) {why}: killed", {"pid": worker.pid})
            self._workers.signal(worker.rank, signal.SIGKILL)
        elif worker.pid not in self._reported:
            self._reported.add(worker.pid)
            self._rank_stopped(worker, f"process {worker.pid} {why}")

    def _on_helper(self, pid: int, name: str, why: str) -> None:
        if pid != self._parent:
            process.signal_group(pid, signal.SIGKILL)
        if pid not in self._reported:
            self._reported.add(pid)
            what = f"`kill -CONT {pid}` resumes it" if pid == self._parent else "killed"
            self._report(
                f"the {name} (process {pid}) {why}: {what}", {"pid": pid, "killed": pid != self._parent}
            )
