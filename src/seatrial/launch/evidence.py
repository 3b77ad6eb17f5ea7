"""Evidence of the failure that ended a launch: the coordinator's report and the logs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from seatrial.base.errors import EXIT_FAILED
from seatrial.control.agent.errors import last_lines, tail_of
from seatrial.launch.agents import AgentHandle
from seatrial.launch.base import Failure
from seatrial.record.folder import RunFolder

_LITTLE_SPACE = 1 << 20  # bytes
_MOST_LINES = 40


def read_failure(told: dict[str, Any], folder: RunFolder) -> Failure:
    """Parse a failure as the coordinator reported it."""
    return Failure(
        node=told["node"],
        rank=told["rank"],
        message=str(told["message"]),
        cause=str(told["cause"]),
        time=float(told["time"]),
        exit_code=int(told["exit_code"]),
        log=Path(told["log"]) if told.get("log") else folder.coordinator_log,
        tail=last_lines(str(told.get("tail") or ""), _MOST_LINES),
        hint=str(told.get("hint") or ""),
    )


def agent_failure(agent: AgentHandle) -> Failure:
    """The failure that describes the death of an agent."""
    node, cause = agent.spec.node, agent.cause
    return Failure(
        node=node,
        rank=None,
        message=f"agent of node {node} {cause}",
        cause=f"the agent {cause}",
        time=agent.ended_at,
        exit_code=EXIT_FAILED,
        log=agent.log,
        tail="",
        hint="",
    )


def completed(failure: Failure, folder: RunFolder) -> Failure:
    """`failure` with the end of its log and a hint, where these are missing."""
    return dataclasses.replace(
        failure,
        tail=failure.tail or tail_of(failure.log),
        hint=failure.hint or _disk_hint(folder) or f"the whole log is {failure.log}",
    )


def _disk_hint(folder: RunFolder) -> str | None:
    """Hint if the run folder is unreachable or its disk full, which may be why no reason was written."""
    try:
        disk = os.statvfs(folder.path)
    except OSError:
        return f"{folder.path} cannot be reached: was it moved, or unmounted?"
    if disk.f_bavail * disk.f_frsize < _LITTLE_SPACE:
        return f"the disk of {folder.path} is full: make room, then run the same command again"
    return None
