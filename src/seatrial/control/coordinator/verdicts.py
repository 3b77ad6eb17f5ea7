"""Reports of worker exits and node losses, collected over a run, and the failure shown to the user at its end."""

from __future__ import annotations

import os
import signal as signals
import time
from dataclasses import dataclass
from typing import Any

from seatrial.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_PREEMPTED, address_limit
from seatrial.base.process import status_text
from seatrial.control.coordinator.first_failure import FirstFailure, first_failure
from seatrial.control.coordinator.reports import Report
from seatrial.control.machine.policy import signal_of_exception
from seatrial.control.machine.types import Finish
from seatrial.record import messages as msg
from seatrial.record.folder import RunFolder

_LITTLE_SPACE = 1 << 20  # bytes


@dataclass(frozen=True)
class Ended:
    """A process that failed by itself, not by being stopped."""

    event: str  # kind of the event that records it
    message: str
    cause: str
    signal: str  # key of the policy
    consequence: bool  # it failed only because others did


class Verdicts:
    """Reports of process exits in the current generation."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._generation = 0
        self._reports: list[Report] = []
        self._errors: dict[int, dict[str, Any]] = {}
        self._logs: dict[tuple[int, int | None], tuple[str, str]] = {}  # (node, rank) -> log and tail
        self._lost: tuple[int, str, float] | None = None
        self._blamed: tuple[int, int | None, str, float] | None = None  # node, rank, cause, when

    def began(self, generation: int) -> None:
        """Discard earlier reports: those failures have been handled, and the next one is a new one."""
        self._generation = generation
        self._reports.clear()
        self._errors.clear()
        self._lost = self._blamed = None

    def node_lost(self, node: int, cause: str) -> None:
        self._lost = self._lost or (node, cause, time.time())

    def blamed(self, node: int, rank: int | None, cause: str) -> None:
        """Record the node or rank that the coordinator blames, even if no process exited because of it."""
        self._blamed = self._blamed or (node, rank, cause, time.time())

    def ended(self, node: int, exited: msg.RankExited | msg.ForkServerExited) -> Ended | None:
        """Process an agent's report that a worker or a fork server exited; None if that is not a failure."""
        if exited.generation != self._generation:
            return None
        rank, signalled, error = None, None, None  # of a fork server
        if isinstance(exited, msg.RankExited):
            if exited.never_began:
                return None
            rank, signalled, error = exited.rank, exited.signalled, exited.error
        report = Report(
            "fork_server_exited" if rank is None else "rank_exited",
            node,
            exited.time,
            rank=rank,
            pid=exited.pid,
            status=exited.status,
            signalled=signalled,
            oom_killed=exited.oom_killed,
        )
        self._reports.append(report)
        self._logs[node, rank] = (exited.log, exited.tail)
        if rank is not None and error is not None:
            self._errors[rank] = error
        if not report.failed and not (error and report.status != 0 and not self._stopped(report, error)):
            return None
        what = "fork server" if rank is None else f"rank {rank}"
        ended = status_text(exited.status)
        consequence = bool(error and error.get("consequence"))
        if consequence:
            ended += ", because it lost a peer"
        finding = first_failure([report], {rank: error} if error and rank is not None else {})
        cause = finding.cause if finding is not None else ended
        if rank is None:
            cause = f"its fork server {ended}"  # without it no rank can be started there
        return Ended(
            event="nursery_failed" if rank is None else "rank_failed",
            message=f"{what} on node {node} {ended}",
            cause=cause,
            signal=_signal_of(report, error),
            consequence=consequence,
        )

    def _stopped(self, report: Report, error: dict[str, Any]) -> bool:
        return report.signalled is not None and error["time"] >= report.signalled

    def outcome(self, finish: Finish, term: int) -> msg.Outcome:
        """The outcome for agents and launcher."""
        codes = {"done": EXIT_DONE, "preempted": EXIT_PREEMPTED, "interrupted": EXIT_INTERRUPTED}
        if finish.how != "failed":
            return msg.Outcome(codes[finish.how], term, None)
        finding = first_failure(self._reports, self._errors)
        if finding is not None and not (self._lost and self._followed(finding)):
            failure = self._failure(finding, finish.message)
        else:
            failure = self._plain(finish.message)
        return msg.Outcome(failure["exit_code"], term, failure)

    def _followed(self, finding: FirstFailure) -> bool:
        """Whether it is only a consequence; a lost node then takes precedence."""
        error = self._errors.get(finding.rank) if finding.rank is not None else None
        return bool(error and error.get("consequence"))

    def _failure(self, finding: FirstFailure, message: str) -> dict[str, Any]:
        log, tail = self._logs.get((finding.node, finding.rank), ("", ""))
        gave_up = message if message and finding.message not in message else None
        return {
            "node": finding.node,
            "rank": finding.rank,
            "message": finding.message,
            "cause": finding.cause if finding.rank is not None else f"the {finding.process} {finding.cause}",
            "time": finding.time,
            "exit_code": finding.exit_code,
            "log": log,
            "tail": tail,
            "hint": finding.hint or self._host_hint() or gave_up or f"the whole log is {log}",
        }

    def _plain(self, message: str) -> dict[str, Any]:
        node, rank, cause, when = self._known() or (None, None, message, time.time())
        log = str(self._folder.coordinator_log)
        text = message
        if rank is not None:
            text = f"rank {rank} on node {node}: {cause}"
        elif node is not None:
            text = f"node {node}: {cause}"
        return {
            "node": node,
            "rank": rank,
            "message": text,
            "cause": cause,
            "time": when,
            "exit_code": EXIT_FAILED,
            "log": log,
            "tail": "",
            "hint": self._host_hint()
            or (message if message not in text else f"the reasons for its decision: {log}"),
        }

    def _known(self) -> tuple[int, int | None, str, float] | None:
        """The lost or blamed node that was recorded first, for when no process failed by itself."""
        lost = None if self._lost is None else (self._lost[0], None, *self._lost[1:])
        return min((k for k in (lost, self._blamed) if k is not None), key=lambda k: k[3], default=None)

    def _host_hint(self) -> str | None:
        """Hint at a full disk, which can prevent error files, or a memory limit, which can cause arbitrary errors."""
        try:
            disk = os.statvfs(self._folder.path)
        except OSError:
            return f"{self._folder.path} cannot be reached: was it moved, or unmounted?"
        if disk.f_bavail * disk.f_frsize < _LITTLE_SPACE:
            return f"the disk of {self._folder.path} is full: make room, then run the same command again"
        return address_limit()


def _signal_of(report: Report, error: dict[str, Any] | None) -> str:
    if error is not None:
        return signal_of_exception(str(error.get("type") or ""), str(error.get("message") or ""))
    status = report.status or 0
    if status >= 0:
        return "worker_exit"
    if status == -signals.SIGKILL:
        return "oom" if report.oom_killed else "worker_killed"
    return "worker_crash"
