"""What every launcher offers: show what would be run, run it, and say how it ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from seatrial.base.errors import EXIT_DONE
from seatrial.control.spec import WORKER_MODULE

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.record.folder import RunFolder


@dataclass(frozen=True)
class Failure:
    """The failure that ended a launch, with its evidence."""

    node: int | None  # None: of no one node
    rank: int | None  # None: the node's agent or nursery, or of no one rank
    message: str  # one line, who and what: "rank 3 on node 0 was killed by SIGKILL"
    cause: str  # what alone: "was killed by SIGKILL", "ValueError: ..."
    time: float  # unix seconds
    exit_code: int
    log: Path
    tail: str  # the traceback, or else the log's last lines
    hint: str


@dataclass(frozen=True)
class Outcome:
    """How a launch ended: 0, 1 (failed), 2 (bad input), 75 (preempted) or 130 (interrupted).

    `failure` is there with 1 and 2.
    """

    exit_code: int = EXIT_DONE
    failure: Failure | None = None


class Launcher(Protocol):
    """A way to start a job's ranks."""

    name: str

    def check(self, job: Job) -> None:
        """Raise InputError if the job cannot be started here; changes nothing."""

    def render(self, job: Job, folder: RunFolder, generation: int = 1) -> str:
        """Exactly what would be run, as text; starts nothing."""

    def launch(
        self,
        job: Job,
        folder: RunFolder,
        generation: int,
        *,
        tick: Callable[[], None] | None = None,
        worker_module: str = WORKER_MODULE,
    ) -> Outcome:
        """Run the job to its end. `tick` is called at least ten times a second meanwhile."""
