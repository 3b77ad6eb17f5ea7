"""Ends of processes and losses of nodes, collected over a generation, and the failure shown to the user at its end."""

from __future__ import annotations

import signal as signals
import time
from dataclasses import dataclass, replace

from seatrial.base.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, address_limit
from seatrial.base.process import status_text
from seatrial.control.coordinator.first_failure import Exited, first_failure, is_consequence
from seatrial.control.machine.policy import signal_of_exception
from seatrial.control.machine.types import Finish
from seatrial.record import messages as msg
from seatrial.record.failure import Failure, disk_hint
from seatrial.record.folder import RunFolder


@dataclass(frozen=True)
class ProcessFailure:
    """A process that failed by itself, not by being stopped. No `Failure`: what follows is up to the policy."""

    event: str  # kind of the event that records it
    message: str
    cause: str
    signal: str  # key of the policy
    consequence: bool  # it failed only because others did


class Verdicts:
    """The ends of processes in the current generation."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._generation = 0
        self._exits: list[tuple[int, Exited]] = []  # each with its node
        self._lost: tuple[int, str, float] | None = None
        self._blamed: tuple[int, int | None, str, float] | None = None  # node, rank, cause, when

    def generation_started(self, generation: int) -> None:
        """Discard earlier reports: those failures have been handled, and the next one is a new one."""
        self._generation = generation
        self._exits.clear()
        self._lost = self._blamed = None

    def node_lost(self, node: int, cause: str) -> None:
        self._lost = self._lost or (node, cause, time.time())

    def blamed(self, node: int, rank: int | None, cause: str) -> None:
        """Record the node or rank that the coordinator blames, even if no process exited because of it."""
        self._blamed = self._blamed or (node, rank, cause, time.time())

    def process_ended(self, node: int, exited: Exited) -> ProcessFailure | None:
        """Process an agent's report that a worker or a fork server exited; None if that is not a failure."""
        if exited.generation != self._generation:
            return None
        if isinstance(exited, msg.RankExited) and exited.never_began:
            return None
        self._exits.append((node, exited))
        failure = first_failure([(node, exited)])
        # Stopped, and without an error of its own: only `outcome` asks whether it had failed before that.
        if failure is None or (exited.signalled is not None and exited.error is None):
            return None
        rank = exited.rank
        what = "fork server" if rank is None else f"rank {rank}"
        ended = status_text(exited.status)
        consequence = is_consequence(exited)
        if consequence:
            ended += ", because it lost a peer"
        return ProcessFailure(
            event="nursery_failed" if rank is None else "rank_failed",
            message=f"{what} on node {node} {ended}",
            # Without its fork server no rank can be started there.
            cause=f"its fork server {ended}" if rank is None else failure.cause,
            signal=_signal_of(exited),
            consequence=consequence,
        )

    def outcome(self, finish: Finish, term: int) -> msg.Outcome:
        """The outcome for agents and launcher."""
        codes = {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED, "interrupted": EXIT_INTERRUPTED}
        if finish.how != "failed":
            return msg.Outcome(codes[finish.how], term, None)
        # A lost node goes before those that failed only because of it.
        first = first_failure(e for e in self._exits if not (self._lost and is_consequence(e[1])))
        failure = self._plain(finish.message) if first is None else self._explained(first, finish.message)
        return msg.Outcome(failure.exit_code, term, failure)

    def _explained(self, failure: Failure, message: str) -> Failure:
        """With a hint. `message`: why the machine ended the run."""
        gave_up = message if failure.message not in message else None
        hint = failure.hint or self._host_hint() or gave_up or f"the whole log is {failure.log}"
        return replace(failure, hint=hint)

    def _plain(self, message: str) -> Failure:
        node, rank, cause, when = self._first_lost() or (None, None, message, time.time())
        log = str(self._folder.coordinator_log)
        text = message
        if rank is not None:
            text = f"rank {rank} on node {node}: {cause}"
        elif node is not None:
            text = f"node {node}: {cause}"
        hint = self._host_hint() or (
            message if message not in text else f"the reasons for its decision: {log}"
        )
        return Failure(node, rank, text, cause, when, log=log, hint=hint)

    def _first_lost(self) -> tuple[int, int | None, str, float] | None:
        """The lost or blamed node that was recorded first, for when no process failed by itself."""
        lost = None if self._lost is None else (self._lost[0], None, *self._lost[1:])
        return min((k for k in (lost, self._blamed) if k is not None), key=lambda k: k[3], default=None)

    def _host_hint(self) -> str | None:
        """Hint at a full disk, which can prevent error files, or a memory limit, which can cause arbitrary errors."""
        return disk_hint(self._folder) or address_limit()


def _signal_of(exited: Exited) -> str:
    if exited.error is not None:
        return signal_of_exception(exited.error.type, exited.error.message)
    if exited.status >= 0:
        return "worker_exit"
    if exited.status == -signals.SIGKILL:
        return "oom" if exited.oom_killed else "worker_killed"
    return "worker_crash"
