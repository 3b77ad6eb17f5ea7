"""The nodes that a measurement may use, for one run, or as disjoint groups for parallel runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seatrial.check.live.hosts import ssh_hosts
from seatrial.hardware.devices import choose_device, visible_devices
from seatrial.job.changed import changed_job

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.launch.allocation import Allocation


@dataclass(frozen=True)
class Site:
    """Node names in the order in which runs use them; empty if only the launcher knows them."""

    nodes: tuple[str, ...]
    allocation: Allocation | None = None

    def groups(self, size: int) -> list[tuple[str, ...]]:
        """As many disjoint groups of `size` nodes as possible."""
        last = len(self.nodes) - size
        return [self.nodes[first : first + size] for first in range(0, last + 1, size)]

    def job_on(self, job: Job, group: tuple[str, ...]) -> Job:
        """`job` restricted to the nodes of `group`, if the job file lists nodes."""
        if job.cluster.launcher != "ssh" or group == self.nodes[: len(group)]:
            return job
        why = "its group of nodes"
        return changed_job(job, {"ssh.hosts": (list(group), why), "ssh.hostfile": (None, why)}).job

    def environment_on(self, job: Job, group: tuple[str, ...]) -> Mapping[str, str]:
        """Environment for `job` so that parallel runs of virtual nodes do not share a GPU."""
        if job.cluster.launcher != "local" or choose_device(job.cluster)[0] != "cuda":
            return {}
        each, first = job.cluster.gpus_per_node, self.nodes.index(group[0])
        mine = visible_devices()[first * each : (first + len(group)) * each]
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def site_of(job: Job, nodes: int, allocation: Allocation | None) -> Site:
    """The nodes of `job`, at least `nodes` of a virtual cluster. Raises InputError for invalid names."""
    launcher = job.cluster.launcher
    if allocation is not None:
        return Site(allocation.nodes, allocation)
    if launcher == "ssh":
        return Site(tuple(host.name for host in ssh_hosts(job)))
    count = max(nodes, job.cluster.nodes) if launcher == "local" else 0
    return Site(tuple(f"node{n}" for n in range(count)))
