"""The job that the drill's tests copy."""

from __future__ import annotations

from functools import partial

from presets import preset_job
from seatrial.drill.copies import Cadence, Plan, copy_of
from seatrial.job import Job
from seatrial.job.changed import Copy

STORE = "/nowhere/store"


job = partial(preset_job, "first-voyage")


def copy(of: Job, *, steps: int = 16, seconds: float = 0.0, replicas: bool = False, spares: int = 0) -> Copy:
    plan = Plan(Cadence(steps), steps, seconds=seconds)
    return copy_of(of, name="a_scenario", stores=[STORE], plan=plan, replicas=replicas, spares=spares)
