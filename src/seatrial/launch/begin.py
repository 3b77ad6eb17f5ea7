"""Decide whether an agent joins the current start of a run, begins the next one, or exits because the run is over.

`python -m seatrial.launch.begin` does this once per job script, before agents start; see launch/slurm.py.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from seatrial.base import atomic
from seatrial.base.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    InputError,
    RunFailed,
    SeatrialError,
)
from seatrial.launch.base import LEAVE, NO_OUTCOME
from seatrial.record import events
from seatrial.record.filesystem import put_token
from seatrial.record.folder import RunFolder
from seatrial.record.inputs import frozen, job_of
from seatrial.record.launches import (
    Launch,
    StartOutcome,
    begin_event,
    checked_launch,
    read_outcome,
    record_handle,
    write_launch,
)
from seatrial.record.secret import make_secret

_CLAIM_S = 60.0  # a process that claimed the next start and has not begun it by then is taken for dead
_POLL_S = 0.1


def current_launch(folder: RunFolder) -> Launch:
    """The current start. Raises InputError if there is none, or it cannot be read."""
    launch = checked_launch(folder)
    if launch is None:
        raise InputError(
            f"{folder.path} has no start that an agent could join",
            hint="`seatrial train` starts the run",
        )
    return launch


def current_start(folder: RunFolder, attempt: str, submitted: int | None = None) -> Launch | StartOutcome:
    """The start to join, or the outcome to exit with.

    `attempt`: the scheduler's handle of the job this process belongs to; "" where one submission may continue after a
    preemption, as the pods of a Kubernetes Job do. `submitted`: the start that it was submitted for; it does not join
    a start that was submitted later, without knowledge of it. Raises InputError, RunFailed.
    """
    launch = current_launch(folder)
    if submitted is not None and launch.submitted is not None and submitted < launch.submitted:
        message = f"a later start was submitted, {launch.handle or 'just now'}"
        return StartOutcome(launch.generation, 0, EXIT_INTERRUPTED, message, None, time.time())
    if launch.handle is None and attempt:
        launch = record_handle(folder, launch, attempt)
    outcome = read_outcome(folder, launch.generation)
    stopped = folder.stopped(launch.generation).exists()
    if outcome is None and stopped:
        message = "`seatrial stop` has ended it"
        return StartOutcome(launch.generation, 0, EXIT_INTERRUPTED, message, None, time.time())
    same = attempt == launch.handle
    if outcome is None:
        return launch if same or not attempt else _begin_next(folder, launch, attempt)
    if outcome.exit_code != EXIT_PREEMPTED or same or stopped or not launch.scheduled:
        return outcome  # over; or preempted, and another job or a user continues the run
    return _begin_next(folder, launch, attempt or launch.handle)


def _begin_next(folder: RunFolder, last: Launch, handle: str | None) -> Launch:
    """Begin the start after `last`. Of many callers on many hosts one does so; the others wait for it."""
    number = 1
    while True:
        # Exclusive creation is decided by the file server, however stale the caches of this host are.
        claim = folder.control / f"begin-{last.generation:06d}-{number}"
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            next_launch = _wait_for_next(folder, last)
            if next_launch is not None:
                return next_launch
            number += 1
            continue
        return _write_next(folder, last, handle)


def _wait_for_next(folder: RunFolder, last: Launch) -> Launch | None:
    deadline = time.monotonic() + _CLAIM_S
    while time.monotonic() < deadline:
        launch = current_launch(folder)
        if launch.generation > last.generation:
            return launch
        time.sleep(_POLL_S)
    return None


def _write_next(folder: RunFolder, last: Launch, handle: str | None) -> Launch:
    generation = folder.last_generation() + 1
    layout = job_of(folder, frozen(folder)).layout
    atomic.write_text(folder.generation_file, f"{generation}\n")
    make_secret(folder)
    put_token(folder, generation)
    launch = Launch(
        last.launcher, generation, time.time(), socket.gethostname(), True, handle, last.submitted
    )
    events.append(folder, generation=generation, **begin_event(layout, "continued"))
    write_launch(folder, launch)  # last: an agent that sees it may join
    return launch


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `python -m seatrial.launch.begin`; returns LEAVE if no agents are to be started."""
    parser = argparse.ArgumentParser(prog="seatrial.launch.begin")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--attempt", default="", help="the scheduler's handle of this job")
    parser.add_argument("--submitted", type=int, help="the start that this job was submitted for")
    parser.add_argument("--outcome", action="store_true", help="exit with the exit code of the start")
    args = parser.parse_args(argv)
    try:
        folder = RunFolder.open(args.run)
        if args.outcome:
            return _outcome(folder)
        start = current_start(folder, args.attempt, args.submitted)
    except SeatrialError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    if isinstance(start, StartOutcome):
        print(f"the run is over: {start.message or 'done'} (exit code {start.exit_code})", flush=True)
        return LEAVE
    print(f"start of generation {start.generation}", flush=True)
    return EXIT_DONE


def _outcome(folder: RunFolder) -> int:
    outcome = read_outcome(folder, current_launch(folder).generation)
    if outcome is None:
        message = "no agent recorded how the run ended: the coordinator's node was lost, or all nodes were"
        print(RunFailed(message).render(), file=sys.stderr)
        return NO_OUTCOME
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
