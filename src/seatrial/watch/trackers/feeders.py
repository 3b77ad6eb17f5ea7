"""Starts, restarts and ends the processes that push a live run to its trackers, one per tracker.

They read the run folder, so nothing is queued in memory however slow a tracker is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

from seatrial.base.process import python
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder
from seatrial.watch.monitor_task import Send
from seatrial.watch.trackers.progress import path_of

# Without a heartbeat a process is considered hung; connecting to a tracker may take minutes.
_SILENT_S = 180.0
_AGAIN_S, _AGAIN_MOST_S = 30.0, 600.0  # restart delay, doubled after each failure
_TAIL_BYTES = 4096


@dataclass
class _Feeder:
    """One tracker's process."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    start_at: float = 0.0  # time.monotonic of the (next) start
    again_s: float = _AGAIN_S
    seen: int = 0  # mtime of its progress file
    seen_at: float = 0.0
    reported: bool = False  # failure reported, and no progress since
    done: bool = False


class Feeders:
    """The monitor's task for all trackers of a run. Only `close` blocks."""

    def __init__(
        self,
        folder: RunFolder,
        names: Sequence[str],
        send: Send,
        *,
        silent_s: float = _SILENT_S,
        again_s: float = _AGAIN_S,
    ) -> None:
        """`send` records a tracker's failure, once until it works again."""
        self._folder, self._record = folder, send
        self._silent_s, self._again_s = silent_s, again_s
        self._feeders = [_Feeder(name, again_s=again_s) for name in dict.fromkeys(names)]

    def poll(self, now: float) -> None:
        """Start processes that are due, and check those that run."""
        now = time.monotonic()  # the wall clock may jump
        for feeder in self._feeders:
            if feeder.process is not None:
                self._watch(feeder, now)
            elif not feeder.done and now >= feeder.start_at:
                self._start(feeder, now)

    def close(self, until: float) -> None:
        """The run has ended: let the processes push the rest until `until` (time.monotonic), then end them."""
        running = [feeder for feeder in self._feeders if feeder.process is not None]
        for feeder in running:
            assert feeder.process is not None
            feeder.process.terminate()
        for feeder in running:
            assert feeder.process is not None
            try:
                feeder.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._report(feeder, "the end of the run is not pushed yet")
            self._kill(feeder)

    def _start(self, feeder: _Feeder, now: float) -> None:
        command = [str(self._folder.path), "--to", feeder.name, "--parent", str(os.getpid())]
        try:
            self._folder.trackers.mkdir(parents=True, exist_ok=True)
            with open(self._log(feeder), "wb") as log:
                feeder.process = subprocess.Popen(
                    python("seatrial.watch.trackers", *command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # its own group, with everything that the tracker starts
                )
        except OSError as error:
            self._failed(feeder, f"its process cannot be started: {error}", now)
            return
        feeder.seen, feeder.seen_at, feeder.start_at = self._mtime(feeder), now, now

    def _watch(self, feeder: _Feeder, now: float) -> None:
        assert feeder.process is not None
        mtime, code = self._mtime(feeder), feeder.process.poll()
        if mtime != feeder.seen:
            feeder.seen, feeder.seen_at = mtime, now
        if code == 0:
            feeder.process, feeder.done, feeder.reported = None, True, False
        elif code is not None:
            self._kill(feeder)  # and its children
            self._failed(feeder, self._last_line(feeder) or f"its process ended with status {code}", now)
        elif now - feeder.seen_at > self._silent_s:
            self._kill(feeder)
            self._failed(feeder, f"it hangs: no heartbeat for {self._silent_s:.0f} s", now)
        elif feeder.reported and feeder.seen_at > feeder.start_at + self._silent_s:
            feeder.reported, feeder.again_s = False, self._again_s  # it works again

    def _failed(self, feeder: _Feeder, why: str, now: float) -> None:
        feeder.start_at = now + feeder.again_s
        self._report(feeder, f"{why}; restarting in {feeder.again_s:.0f} s from where it stopped")
        feeder.again_s = min(2 * feeder.again_s, _AGAIN_MOST_S)

    def _report(self, feeder: _Feeder, why: str) -> None:
        if not feeder.reported:
            feeder.reported = True
            by_hand = f"seatrial watch {self._folder.path} --to {feeder.name}"
            text = f'the tracker "{feeder.name}" failed: {why}; the run continues. See {self._log(feeder)}; to push manually: {by_hand}'
            self._record(
                msg.MonitorFailed("tracker_failed", text, {"tracker": feeder.name, "log": self._log(feeder)})
            )

    def _kill(self, feeder: _Feeder) -> None:
        process, feeder.process = feeder.process, None
        assert process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _log(self, feeder: _Feeder) -> str:
        return str(self._folder.trackers / f"{feeder.name}.log")

    def _last_line(self, feeder: _Feeder) -> str:
        try:
            with open(self._log(feeder), "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def _mtime(self, feeder: _Feeder) -> int:
        try:
            return path_of(self._folder, feeder.name).stat().st_mtime_ns
        except OSError:
            return 0
