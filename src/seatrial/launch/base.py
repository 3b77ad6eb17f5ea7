"""The launcher interface: check and render; then either launch, or submit, status, signal and agent identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from seatrial.base.errors import EXIT_DONE
from seatrial.record.failure import Failure

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.record.folder import RunFolder


# Exit statuses of `python -m seatrial.launch.begin`, in addition to those of every command.
LEAVE = 10  # the run is over: start no agents
NO_OUTCOME = 3  # with --outcome: the start recorded no outcome


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: 0, 1 (failed), 2 (bad input), 75 (preempted) or 130 (interrupted).

    `failure` is set with 1 and 2.
    """

    exit_code: int = EXIT_DONE
    failure: Failure | None = None


@dataclass(frozen=True)
class Identity:
    """Identity of an agent, from its launcher's environment."""

    node: int  # index; nodes + spares or higher: a node that the run did not plan for, which joins as a spare
    incarnation: str  # differs for each start of an agent on the same index
    attempt: str = ""  # handle of the submission it belongs to; "": one that may begin several starts
    address: str | None = None  # where the others reach it, if the environment states it
    order: str = ""  # sort key by which nodes take slots, such as "switch0.switch3.node17"; "": by index
    peers: tuple[str, ...] = ()  # host names of other nodes: the route to them determines the address


@dataclass(frozen=True)
class Status:
    """State of a submitted start, as its scheduler reports it."""

    state: Literal["queued", "running", "gone", "unknown"]
    words: str  # the scheduler's own: "PENDING (Priority)"


class Launcher(Protocol):
    """Starts one agent on each node."""

    name: str

    def check(self, job: Job) -> None:
        """Raise InputError with every reason why the job cannot be started from here; changes nothing."""

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> dict[str, str]:
        """Exactly what would be run, as file name -> text; starts nothing."""


@runtime_checkable
class Attended(Launcher, Protocol):
    """A launcher whose agents are children of the process that starts the run; it stays until they have ended."""

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
    ) -> Outcome:
        """Run the job to its end. `tick` is called at least ten times a second meanwhile."""


@runtime_checkable
class Scheduled(Launcher, Protocol):
    """A launcher whose agents are started by a scheduler; the process that submits them may exit."""

    def identity(self, environment: Mapping[str, str]) -> Identity:
        """Identity of the agent that runs with this environment. Raises InputError outside a job of this launcher."""

    restarts: bool  # whether it restarts agents that exit, even with the exit code of a failed run

    def submit(self, files: Mapping[str, Path]) -> str:
        """Submit the output of `render`, written to `files`; returns the handle. RunFailed with the scheduler's message."""

    def status(self, handle: str) -> Status:
        """Query the state of a submitted start."""

    def signal(self, handle: str, how: Literal["preempt", "end"]) -> None:
        """Request a save and exit, or end it immediately. Raises RunFailed."""

    def warnings(self, grace_s: float) -> Sequence[str]:
        """Settings of this scheduler that may kill agents before they have saved, within `grace_s`."""

    def logs(self, handle: str) -> Sequence[str]:
        """Commands that show output kept only by the scheduler; empty if all of it is in the run folder."""
