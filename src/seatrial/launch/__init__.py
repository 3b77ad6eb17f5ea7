"""Launchers: each starts one agent on every node; from there on the agents run the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.base.errors import InputError
from seatrial.base.registry import Registry
from seatrial.launch.base import Attended, Launcher, Outcome, Scheduled
from seatrial.launch.kubernetes import KubernetesLauncher
from seatrial.launch.local import LocalLauncher
from seatrial.launch.slurm import SlurmLauncher
from seatrial.launch.ssh import SshLauncher
from seatrial.record.failure import Failure

if TYPE_CHECKING:
    from seatrial.job import Job

__all__ = ["Failure", "Launcher", "LocalLauncher", "Outcome", "launcher_for", "named"]

LAUNCHERS: Registry[type[Launcher]] = Registry(
    "launcher",
    "seatrial.launchers",
    {cls.name: cls for cls in (LocalLauncher, SlurmLauncher, KubernetesLauncher, SshLauncher)},
    of=type,  # called without arguments
)


def named(name: str) -> Launcher:
    """The launcher of this name, built in or from an installed package. Raises InputError."""
    launcher = LAUNCHERS.named(name)()
    if isinstance(launcher, (Attended, Scheduled)):
        return launcher
    cls = type(launcher)
    raise InputError(
        f'the launcher "{name}" of {cls.__module__}:{cls.__qualname__} is neither attended nor scheduled',
        hint="seatrial/launch/base.py names the methods of both, and the attributes `name` and `restarts`",
    )


def launcher_for(job: Job) -> Launcher:
    """The launcher that the job file names. Raises InputError that points at its line."""
    with job.about("cluster.launcher"):
        return named(job.cluster.launcher)
