"""How verbs that start something read a job: with a layout, and with names that the catalogues know."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from seatrial.job import Job


def read_job(file: Path, overrides: Sequence[str], runs: Path, *, fresh: bool = False) -> Job:
    """The job of `file` with `--set` overrides, to be run below `runs`.

    With `parallel = "auto"` it has the layout that its run has already, or one that is chosen now; with `fresh` always the
    latter. Raises InputError.
    """
    from seatrial.job import load_job
    from seatrial.plan.place import place_of

    job = load_job(file, overrides)
    place_of(job)  # refuses a network that is not in the catalogue
    if not job.is_open:
        return job
    from seatrial.plan.settle import settle
    from seatrial.record.folder import RunFolder

    return settle(job, RunFolder(runs / job.name), fresh=fresh)
