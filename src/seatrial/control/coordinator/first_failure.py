"""Determine which of many failures was the first. Pure: reports and error files in, one failure out.

When one rank exits, its peers fail too because of closed connections, and often report it sooner. Time alone
would therefore blame the wrong rank: a rank's own failure precedes consequences, and only among equals the
earlier one comes first.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from seatrial.base.errors import EXIT_BAD_INPUT, EXIT_FAILED
from seatrial.base.process import status_text
from seatrial.control.coordinator.reports import Report

_OOM_HINT = "the kernel's out-of-memory killer did it: use a smaller microbatch, activation checkpointing, or more ranks a model"
_PERHAPS_OOM_HINT = "somebody's kill -9, or perhaps the kernel's out-of-memory killer: `dmesg` tells"
_KILLED_HINT = "somebody's kill -9: the kernel's out-of-memory killer has killed nothing here"
_CRASH_HINT = "a crash in native code: the log's end, or `coredumpctl` where it runs, may tell where"


@dataclass(frozen=True)
class FirstFailure:
    """The first failure: who, what, when. `traceback` is None where the process could not write one."""

    node: int
    rank: int | None
    process: str  # "rank", "fork server" or "agent"
    cause: str
    raised: bool  # the process wrote an error itself; otherwise `cause` is its exit status from the kernel
    time: float  # unix seconds
    exit_code: int
    hint: str | None
    traceback: str | None

    @property
    def subject(self) -> str:
        return (
            f"rank {self.rank} on node {self.node}"
            if self.rank is not None
            else f"{self.process} of node {self.node}"
        )

    @property
    def message(self) -> str:
        """One line: "rank 3 on node 0 was killed by SIGKILL", "rank 3 on node 0: ValueError: ..."."""
        return f"{self.subject}: {self.cause}" if self.raised else f"{self.subject} {self.cause}"


def first_failure(reports: Iterable[Report], errors: Mapping[int, Mapping[str, Any]]) -> FirstFailure | None:
    """The failure that caused all others, or None if nothing failed by itself.

    `errors` are the ranks' error files, by rank.
    """
    judged = []
    for report in reports:
        if report.kind not in ("rank_exited", "fork_server_exited", "agent_exited") or report.status == 0:
            continue
        error = errors.get(report.rank) if report.rank is not None else None
        when = float(error["time"]) if error else report.time
        stopped = report.signalled is not None and when >= report.signalled
        if stopped:
            continue
        consequence = bool(error and error.get("consequence"))
        judged.append(((consequence, when, -1 if report.rank is None else report.rank), report, error))
    if not judged:
        return None
    (_, when, _), report, error = min(judged, key=lambda j: j[0])
    return _finding(report, error, when)


def _finding(report: Report, error: Mapping[str, Any] | None, when: float) -> FirstFailure:
    assert report.status is not None
    process = report.kind.removesuffix("_exited").replace("_", " ")
    if error is None:
        cause, hint, code, traceback = status_text(report.status), _signal_hint(report), EXIT_FAILED, None
        if report.oom_killed:
            cause += " (out of memory)"
    else:
        message = str(error.get("message") or "").strip()
        code = EXIT_BAD_INPUT if error.get("exit_code") == EXIT_BAD_INPUT else EXIT_FAILED
        # For bad input the worker's own message is shown; for anything else, the exception's type as well.
        kind = str(error.get("type") or "error")
        cause = message if code == EXIT_BAD_INPUT and message else f"{kind}: {message}" if message else kind
        hint, traceback = error.get("hint"), error.get("traceback")
    return FirstFailure(
        report.node, report.rank, process, cause, error is not None, when, code, hint, traceback
    )


def _signal_hint(report: Report) -> str | None:
    assert report.status is not None
    if report.status == -signal.SIGKILL:
        return {True: _OOM_HINT, False: _KILLED_HINT, None: _PERHAPS_OOM_HINT}[report.oom_killed]
    if -report.status in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT):
        return _CRASH_HINT
    return None
