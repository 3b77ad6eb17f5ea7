"""The Slurm allocation that this process runs in, for runs that are job steps of it."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.errors import InputError
from seatrial.check.names import hostlist
from seatrial.launch.slurm import run_command, salloc_command
from seatrial.record.folder import RunFolder

if TYPE_CHECKING:
    from seatrial.job import Job

_COMMANDS = ("srun", "squeue")


@dataclass(frozen=True)
class Allocation:
    """A running job of Slurm, and the nodes that it still has, in Slurm's order."""

    job: str
    nodes: tuple[str, ...]


def allocation_for(
    job: Job, nodes: int, runs: Path, command: str, environment: Mapping[str, str]
) -> Allocation:
    """The allocation of this process; InputError if there is none, or it has fewer than `nodes` nodes.

    The hint is the salloc line with the options of `job` that runs `command` in one that suffices. Raises RunFailed if
    Slurm does not answer.
    """
    line = f"{shlex.join(salloc_command(job, RunFolder(runs / job.name), nodes))} {command}"
    number, key = environment.get("SLURM_JOB_ID", ""), "cluster.launcher"
    if not number:
        why = "this process is not in an allocation of Slurm (SLURM_JOB_ID is not set)"
        raise job.refusal(key, why, f"in one: {line}")
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        why = f"not found on this machine: {', '.join(missing)}"
        raise job.refusal(key, why, "start it where Slurm's commands are in PATH")
    # Asked and not read from SLURM_JOB_NODELIST: a node that was lost is still in that.
    done = run_command(["squeue", "--noheader", f"--jobs={number}", "--format=%T %N"])
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    state, _, listed = lines[0].partition(" ") if len(lines) == 1 else ("", "", "")
    if state != "RUNNING":
        answer = state or " ".join(done.stderr.split()) or f"{len(lines)} jobs of that number"
        raise job.refusal(key, f"the allocation {number} cannot be used: {answer}", f"in a new one: {line}")
    try:
        names = tuple(hostlist(listed.strip()))
    except ValueError as error:
        raise InputError(f"the nodes of the allocation {number} are unknown: {error}") from None
    if len(names) < nodes:
        why = f"the allocation {number} has {len(names)} nodes, but the largest size needs {nodes}"
        raise job.refusal(key, why, f"leave that size out of --nodes, or in a larger one: {line}")
    return Allocation(number, names)
