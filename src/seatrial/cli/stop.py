"""`seatrial stop RUN`: save the state and end the run, whatever process or scheduler runs it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import atomic
from seatrial.base.errors import EXIT_DONE, EXIT_INTERRUPTED, RunFailed
from seatrial.record.folder import RunFolder
from seatrial.record.launches import checked_launch, follow_up, known_launch, read_outcome, record_end
from seatrial.record.running import running
from seatrial.record.view import read_brief

if TYPE_CHECKING:
    from seatrial.launch.follow import StartState

_POLL_S = 0.2
_SLACK_S = 30.0  # added to the grace period, for the final records to reach this host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="path of a run folder, or the name of one in ./runs")
    parser.add_argument("--now", action="store_true", help="end it at once, without saving")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 once nothing of the run is left, also if nothing was running. RunFailed if it does not end."""
    folder = RunFolder.find(args.run)
    found = running(folder)
    attended = found is not None and found.launch is None
    if found is not None and found.launch is None:
        _stop_process(folder, found.pid, now=args.now)
    if not _stop_scheduled(folder, now=args.now) and not attended:  # that process may have submitted it
        print(f"{folder.path} is not running")
        return EXIT_DONE
    view = read_brief(folder)
    print(f"{folder.path} has ended, {view.state}: {view.state_reason}")
    return EXIT_DONE


def _grace_s(folder: RunFolder) -> float:
    from seatrial.record.inputs import frozen, job_of

    return job_of(folder, frozen(folder)).resilience.preempt_grace_s


def _stop_process(folder: RunFolder, pid: int | None, *, now: bool) -> None:
    if pid is None or not _has_open(pid, folder.lock):
        if running(folder) is None:
            return  # it has ended just now
        launch = known_launch(folder)
        where = "" if launch is None else f"; {launch.host} was the host of its last start"
        raise RunFailed(
            f"{folder.path} is run by process {pid} of another host or user{where}",
            hint=f"stop it there: kill {pid}",
        )
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        if now:
            os.kill(pid, signal.SIGINT)  # a second signal ends it without waiting
    deadline = time.monotonic() + _grace_s(folder) + _SLACK_S
    while (found := running(folder)) is not None and found.pid == pid:
        if time.monotonic() > deadline:
            raise RunFailed(f"process {pid} has not ended", hint=f"seatrial stop {folder.path} --now")
        time.sleep(_POLL_S)


def _has_open(pid: int, path: Path) -> bool:
    """Whether process `pid` of this host has `path` open. The lock's pid may belong to another host."""
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if fd.samefile(path):
                    return True
    return False


def _stop_scheduled(folder: RunFolder, *, now: bool) -> bool:
    """Stop the scheduled starts of the run; False if none is queued or running."""
    from seatrial.launch.follow import end_rest, read_state

    launch = checked_launch(folder)
    if launch is None or not launch.scheduled:
        return False
    if (found := read_state(folder)).over:
        end_rest(found)
        return False
    while not (found := read_state(folder)).over:  # a follow-up job may have begun in the meantime
        _stop_start(folder, found, now=now)
    return True


def _stop_start(folder: RunFolder, found: StartState, *, now: bool) -> None:
    """End one start and its follow-up job. Raises RunFailed."""
    from seatrial.launch.follow import scheduled

    launch, launcher, grace_s = found.launch, scheduled(found.launch), 0.0
    handles = [handle for handle in (follow_up(folder), launch.handle) if handle is not None]
    for handle in handles:
        if handle != launch.handle:
            launcher.signal(handle, "end")  # first, because it would continue the run
    # Read by a follow-up job that is not known here yet.
    atomic.write_text(folder.stopped(launch.generation), "")
    if launch.handle is not None and found.status.state != "gone":
        if not now:
            grace_s = _grace_s(folder)
            for warning in launcher.warnings(grace_s):
                print(f"warning: {warning}")
        launcher.signal(launch.handle, "end" if now else "preempt")
    deadline = time.monotonic() + grace_s + _SLACK_S
    while any(launcher.status(handle).state != "gone" for handle in handles):
        if time.monotonic() > deadline:
            for handle in handles:
                launcher.signal(handle, "end")
            raise RunFailed(
                f"{launch.launcher} {launch.handle} did not save and exit within its grace period, and was cancelled",
                hint=f"`seatrial logs {folder.path}` shows its last actions; the last checkpoint is unchanged",
            )
        time.sleep(5 * _POLL_S)
    if found.status.state != "running" and read_outcome(folder, launch.generation) is None:
        record_end(folder, launch, EXIT_INTERRUPTED, "stopped while no agent ran; the same command resumes")
