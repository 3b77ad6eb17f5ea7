"""The machine's settings, derived from the job and the agent's spec."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.control.machine.types import Settings
from seatrial.control.node.spec import AgentSpec
from seatrial.job import Job
from seatrial.job.shapes import Shape

STOP_GRACE_S = 1.0  # for ranks to abandon their peers, before those that have not are killed
_FENCE_S = 0.5  # an agent stops its ranks before we count it as lost (see Member); this is for killing them


def machine_settings(spec: AgentSpec, job: Job, shapes: Sequence[Shape]) -> Settings:
    """Settings for the machine of any term of this launch."""
    r = job.resilience
    return Settings(
        slots=spec.nodes,
        spares=spec.spares,
        shapes=tuple(s.slots for s in shapes),
        first_generation=spec.generation,
        max_restarts=r.max_restarts,
        max_same_failure=r.max_same_failure,
        # With a fixed port a parked process would get the old store again: torch shares stores within a process.
        in_place=r.in_place and spec.device == "cpu" and job.cluster.port is None,
        shrink=r.shrink,
        grow=r.grow,
        evict_after=r.evict_after,
        join_wait_s=r.join_wait_s,
        node_wait_s=r.node_wait_s,
        silence_s=r.silence_s,
        fence_s=_FENCE_S,
        stop_grace_s=STOP_GRACE_S,
        preempt_grace_s=r.preempt_grace_s,
    )
