"""Follow a scheduled start through its run folder; the scheduler is only asked whether it still has the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from seatrial.base.errors import EXIT_DONE, EXIT_PREEMPTED, RunFailed
from seatrial.launch import named
from seatrial.launch.base import Scheduled, Status
from seatrial.launch.begin import current_launch
from seatrial.record.folder import RunFolder
from seatrial.record.launches import Launch, StartOutcome, follow_up, read_outcome
from seatrial.record.running import running

_POLL_S = 0.2
_ASK_S = 5.0  # between two queries to the scheduler
_LAG_S = 60.0  # how stale a network file system's view of the folder may be


@dataclass(frozen=True)
class StartState:
    """State of the current start of a scheduled run."""

    launch: Launch
    outcome: StartOutcome | None
    status: Status  # of its job
    next: Status | None  # of the queued follow-up job; None if there is none

    @property
    def over(self) -> bool:
        """Whether the run does not continue without user action."""
        if self.outcome is not None and self.outcome.exit_code != EXIT_PREEMPTED:
            return True
        known = [self.status] if self.next is None else [self.status, self.next]
        return all(status.state == "gone" for status in known)


def scheduled(launch: Launch) -> Scheduled:
    """The launcher of a scheduled start."""
    launcher = named(launch.launcher)
    assert isinstance(launcher, Scheduled), launch
    return launcher


def read_state(folder: RunFolder) -> StartState:
    """Read the folder and ask the scheduler. Raises InputError, RunFailed."""
    launch = current_launch(folder)
    launcher = scheduled(launch)
    if launch.handle is None:
        status = Status("unknown", "not known to be submitted")
    else:
        status = launcher.status(launch.handle)
    waiting = follow_up(folder)
    outcome = read_outcome(folder, launch.generation)
    return StartState(
        launch, outcome, status, None if waiting in (None, launch.handle) else launcher.status(waiting)
    )


def end_rest(found: StartState) -> None:
    """Stop the scheduler from restarting the agents of a failed run. Raises RunFailed."""
    launcher, handle = scheduled(found.launch), found.launch.handle
    failed = found.outcome is not None and found.outcome.exit_code not in (EXIT_DONE, EXIT_PREEMPTED)
    if launcher.restarts and failed and handle is not None and found.status.state in ("queued", "running"):
        launcher.signal(handle, "preempt")  # agents of this start that are still running may exit cleanly


def follow(folder: RunFolder, tick: Callable[[], None], report: Callable[[str], None]) -> int:
    """Call `tick` a few times a second until the run is over; its exit code. Raises RunFailed if it recorded none.

    `report` is called with what only the scheduler knows.
    """
    ask_at, announced, gone_since = time.monotonic(), "", None
    while True:
        tick()
        launch = current_launch(folder)
        outcome = read_outcome(folder, launch.generation)
        if outcome is not None and outcome.exit_code != EXIT_PREEMPTED:
            break
        now = time.monotonic()
        if now >= ask_at:
            ask_at = now + _ASK_S
            found = read_state(folder)
            outcome = found.outcome
            if not found.over:
                gone_since = None
                if found.status.state == "gone" and found.next is not None and announced != found.next.words:
                    announced = found.next.words
                    report(f"the job has ended; the next one, {follow_up(folder)}, continues: {announced}")
            elif outcome is not None:
                break
            else:
                gone_since = now if gone_since is None else gone_since
                if running(folder) is None or now - gone_since >= _LAG_S:
                    kept = [f"`{command}`" for command in scheduled(launch).logs(str(launch.handle))]
                    raise RunFailed(
                        f"{launch.launcher} no longer has {launch.handle}, and no agent recorded how the run ended",
                        hint=f"its output: {', '.join([str(folder.logs), *kept])}; the same command resumes from the last "
                        "saved state",
                    )
        time.sleep(_POLL_S)
    tick()
    if outcome.exit_code != EXIT_DONE:
        end_rest(read_state(folder))
    return outcome.exit_code
