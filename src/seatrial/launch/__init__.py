"""Starting a job's ranks on a cluster; the local one is embedded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.launch.base import Failure, Launcher, Outcome
from seatrial.launch.local import LocalLauncher

if TYPE_CHECKING:
    from seatrial.job import Job

__all__ = ["Failure", "Launcher", "LocalLauncher", "Outcome", "launcher_for"]


def launcher_for(job: Job) -> Launcher:
    """The launcher that the job file names. Raises InputError for one that this version does not have."""
    if job.cluster.launcher == LocalLauncher.name:
        return LocalLauncher()
    raise job.refusal(
        "cluster.launcher",
        f'launcher = "{job.cluster.launcher}" is not in this version',
        'set launcher = "local" under [cluster] to run on this machine',
    )
