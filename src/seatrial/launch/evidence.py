"""The death of an agent as the failure that ended a launch, and the evidence that only the logs hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from seatrial.control.agent.errors import tail_of
from seatrial.launch.agents import AgentHandle
from seatrial.record.failure import Failure, disk_hint
from seatrial.record.folder import RunFolder


def agent_failure(agent: AgentHandle) -> Failure:
    """The failure that describes the death of an agent."""
    node, cause = agent.spec.node, agent.cause
    return Failure(
        node=node,
        rank=None,
        message=f"agent of node {node} {cause}",
        cause=f"the agent {cause}",
        time=agent.ended_at,
        log=str(agent.log),
    )


def completed(failure: Failure, folder: RunFolder) -> Failure:
    """`failure` with the end of its log and a hint, where these are missing."""
    return dataclasses.replace(
        failure,
        tail=failure.tail or tail_of(Path(failure.log)),
        hint=failure.hint or disk_hint(folder) or f"the whole log is {failure.log}",
    )
