"""The job that the drill's tests copy."""

from __future__ import annotations

from pathlib import Path

from seatrial.drill.copies import Cadence, Plan, copy_of
from seatrial.job import Job, job_from_text, preset_text
from seatrial.job.changed import Copy

STORE = "/nowhere/store"


def job(*overrides: str) -> Job:
    return job_from_text(
        preset_text("first-voyage"), name="job.toml", base_folder=Path("/nowhere"), overrides=overrides
    )


def copy(of: Job, *, steps: int = 16, seconds: float = 0.0, replicas: bool = False, spares: int = 0) -> Copy:
    plan = Plan(Cadence(steps), steps, seconds=seconds)
    return copy_of(of, name="a_scenario", stores=[STORE], plan=plan, replicas=replicas, spares=spares)
