"""The monitor's process beside the coordinator: started, restarted a bounded number of times, and ended with it.

It reads the run folder, evaluates alert rules and feeds trackers (`seatrial.watch.monitor`, started by name: control
never imports watch). The run needs nothing from it: it has the lowest priority, nothing here waits for it but the very
end of a run, for a limited time, and its failure is a warning event.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seatrial.base import process
from seatrial.base.complain import complain
from seatrial.base.lines import Channel
from seatrial.control.coordinator.recorder import Recorder
from seatrial.record import messages as msg

MODULE = "seatrial.watch.monitor"
# At most, once the run is over: a launcher kills agents that have not ended 2 s after the outcome.
ENDS_S = 1.5

_AFTER_STEP_S = 3.0  # after the first step: until then it would compete with the start of the ranks
_WITHOUT_STEP_S = 30.0  # after the first generation has begun
_RESTARTS_S = (1.0, 10.0, 60.0)
_MOST_RECORDS = 1000  # an hour; far above what its own limits allow


class MonitorProcess:
    """At most one monitor of one coordinator."""

    def __init__(
        self,
        run: Path,
        log: Path,
        recorder: Recorder,
        watch: Callable[..., None],
        unwatch: Callable[[Any], None],
    ) -> None:
        self._run, self._log, self._recorder = run, log, recorder
        self._watch, self._unwatch = watch, unwatch
        self._starts_at: float | None = None
        self._pid: int | None = None
        self._channel: Channel | None = None
        self._restarts = 0
        self._stepped = self._over = False
        self._recorded: list[float] = []  # when, of the last hour

    @property
    def deadline(self) -> float | None:
        return self._starts_at

    def helpers(self) -> dict[int, str]:
        """The name of its process by pid, for the watchdog: one that is stopped is killed, and started again."""
        return {} if self._pid is None else {self._pid: "monitor"}

    def generation_started(self, now: float) -> None:
        """Schedule the start of the monitor, at the first generation; `stepped` brings it forward."""
        if self._starts_at is None and self._pid is None and not self._restarts and not self._over:
            self._starts_at = now + _WITHOUT_STEP_S

    def stepped(self, now: float) -> None:
        """A step is done."""
        if not self._stepped and self._starts_at is not None and not self._restarts:
            self._starts_at = min(self._starts_at, now + _AFTER_STEP_S)
        self._stepped = True

    def tick(self, now: float) -> None:
        if self._starts_at is not None and now >= self._starts_at:
            self._starts_at = None
            self._start()

    def reaped(self, pid: int, status: int) -> bool:
        """A child has ended; whether it was the monitor."""
        if pid != self._pid:
            return False
        self._pid = None
        self._receive()  # its last messages
        self._close_channel()
        if not self._over:
            self._failed(f"the monitor's process {process.status_text(status)}", status=status)
        return True

    def end(self) -> None:
        """The run is over: it delivers what it has, and exits."""
        self._over, self._starts_at = True, None
        if self._channel is not None:
            self._channel.post(msg.encode(msg.EndMonitor(within_s=ENDS_S)))

    def close(self) -> None:
        """Wait for its end, if it was asked to, for `ENDS_S` at most; then kill it."""
        if self._pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(self._pid)
            try:
                until = time.monotonic() + (ENDS_S if self._over else 0.0)
                while not _ready(fd, 0.05) and time.monotonic() < until:
                    self._receive()
            finally:
                os.close(fd)
        self._receive()
        process.signal_group(self._pid, signal.SIGKILL)
        self._close_channel()
        self._pid = None

    def _start(self) -> None:
        ours, theirs = Channel.pair()
        command = process.python(MODULE, str(self._run))

        def execute() -> int:
            for target in (0, 1):
                os.dup2(theirs.fileno(), target)
            os.nice(19)
            os.execv(command[0], command)

        try:
            self._pid = process.fork(execute, log=self._log)
        except OSError as error:  # no memory, or no process left for this user
            ours.close()
            self._failed(f"the monitor's process could not be started: {error}", status=None)
            return
        finally:
            theirs.close()
        self._channel = ours
        self._watch(ours, self._receive)

    def _receive(self) -> None:
        if self._channel is None:
            return
        try:
            for values in self._channel.receive():
                self._record(msg.decode(values, msg.FromMonitor))
        except ValueError as error:
            complain(f"protocol error from the monitor: {error}")
            self._stop()
            return
        if self._channel.closed:
            self._close_channel()  # `reaped` follows

    def _record(self, message: msg.FromMonitor) -> None:
        now = time.monotonic()
        self._recorded = [at for at in self._recorded if at > now - 3600] + [now]
        if len(self._recorded) > _MOST_RECORDS:
            raise ValueError(f"more than {_MOST_RECORDS} records in an hour")
        match message:
            case msg.MonitorAlert():
                node = message.nodes[0] if len(message.nodes) == 1 else None
                self._recorder.event(
                    "alert",
                    message.message,
                    severity=message.severity,
                    node=node,
                    rank=message.rank,
                    data=message.event_data(),
                )
            case msg.MonitorFailed():
                self._recorder.event(message.kind, message.message, severity="warning", data=message.data)

    def _failed(self, what: str, *, status: int | None) -> None:
        again = self._restarts < len(_RESTARTS_S)
        if again:
            self._starts_at = time.monotonic() + _RESTARTS_S[self._restarts]
            self._restarts += 1
        follows = "it is started again" if again else "it is not started again: no more alerts in this term"
        self._recorder.event(
            "monitor_failed",
            f"{what}; {follows}; the run continues",
            severity="warning",
            data={"status": status, "log": str(self._log), "restarts": self._restarts},
        )

    def _stop(self) -> None:
        """Kill it; `reaped` follows."""
        if self._pid is not None:
            process.signal_group(self._pid, signal.SIGKILL)
        self._close_channel()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._unwatch(self._channel)
            self._channel.close()
            self._channel = None


def _ready(fd: int, seconds: float) -> bool:
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(seconds * 1000))
