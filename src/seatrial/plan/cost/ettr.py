"""Effective training time ratio (ETTR) of a long run on nodes that fail, as the expectation of a renewal process.

ETTR = productive training time / wall-clock time. Productive is work done once, at the full number of nodes: not redone
steps, stalls for saves, snapshot copies, recoveries, waits, nor the speed that a shrunk run lacks.
Failures are a Poisson process with one rate per node. `renewal` is compared with tests/sim/ettr_simulation.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DAY_S = 86400.0

Remedy = Literal["process", "reset", "node"]
"""The recovery from a failure: new processes on the same node; a GPU reset with requalification; another node."""


@dataclass(frozen=True)
class Branch:
    """One kind of failure: its share of all, its remedy, and the seconds from the failure to the next step.

    `down_s` excludes waiting for nodes: detection, decision, new processes, communicators, loading.
    """

    share: float
    remedy: Remedy
    down_s: float


@dataclass(frozen=True)
class Case:
    """The parameters of one run. Times in seconds; intervals are seconds of work at full speed."""

    nodes: int
    failures_per_node_s: float
    branches: tuple[Branch, ...]
    disk_interval_s: float
    disk_stall_s: float  # a save stalls training this long
    disk_lag_s: float = 0.0  # until a save can be resumed from
    memory_interval_s: float = 0.0  # 0: no memory tier
    memory_stall_s: float = 0.0  # cost of a snapshot, spread over its interval
    memory_lag_s: float = 0.0  # until its copy is on the other node
    spares: int = 0
    replacement_s: float = 0.0  # until another node is found if there is no spare
    repair_s: float = 0.0  # mean (exponential) time to repair a lost node of the pool
    reset_s: float = 0.0  # until a node whose GPU was reset is back
    shrink: bool = False  # continue without the node if there is no spare
    replica_nodes: int = 1  # nodes of one data-parallel replica
    shrink_extra_s: float = 0.0  # a recovery at fewer nodes takes this much longer
    grow_s: float = 0.0  # a planned restart at more nodes: nothing is redone

    def __post_init__(self) -> None:
        assert self.nodes > 0
        assert self.disk_interval_s > 0
        assert math.isclose(sum(b.share for b in self.branches), 1.0), "shares must add up to 1"
        assert not self.shrink or self.nodes % self.replica_nodes == 0

    @property
    def memory_overhead(self) -> float:
        """Seconds that snapshots add to a second of work."""
        return self.memory_stall_s / self.memory_interval_s if self.memory_interval_s else 0.0

    @property
    def mttf_s(self) -> float:
        """Mean time to failure of all nodes, 1 / (N r); infinite without failures."""
        rate = self.nodes * self.failures_per_node_s
        return 1 / rate if rate else math.inf


def _waits(case: Case) -> list[float]:
    """Mean wait of each branch for a node without spares: the shorter of repair and replacement."""
    swap = case.repair_s * -math.expm1(-case.replacement_s / case.repair_s) if case.repair_s else 0.0
    by_remedy = {"process": 0.0, "reset": min(case.reset_s, case.replacement_s), "node": swap}
    return [by_remedy[b.remedy] for b in case.branches]


def _shrunk(case: Case, wait: float) -> float:
    """Seconds that a shrunk run loses while a node is missing: one replica's speed, and the cost of both restarts."""
    return wait * case.replica_nodes / case.nodes + case.shrink_extra_s + case.grow_s


def renewal(case: Case) -> float:
    """E[ETTR] of the renewal process, failures during recovery included; exact for one tier and enough spares.

    The time from a recovery to the next failure is exponential with mean M. It completes an interval of work for each S
    seconds (interval, overhead, stalls) beyond the lag L: exp(-L/M) / (exp(S/M) - 1) on average.
    A recovery is retried until no failure occurs within it: with p = E[exp(-R/M)], M / p is the mean length of a cycle.
    (Daly's complete model, FGCS 22(3), 2006, is the case L = 0 and a single R.) Two approximations: with a memory
    tier the stalls of disk saves are spread evenly, and a wait for a node counts as part of R.
    """
    interval = case.memory_interval_s or case.disk_interval_s
    lag = case.memory_lag_s if case.memory_interval_s else case.disk_lag_s
    wall = interval * (1 + case.memory_overhead) * (1 + case.disk_stall_s / case.disk_interval_s)
    if math.isinf(case.mttf_s):
        return interval / wall
    rate, survive, away = 1 / case.mttf_s, 0.0, 0.0
    for branch, wait in zip(case.branches, _waits(case), strict=True):
        short = not case.spares and branch.remedy != "process"
        down = branch.down_s + (wait if short and not case.shrink else 0.0)
        survive += branch.share * math.exp(-rate * down)
        if short and case.shrink:
            away += rate * branch.share * _shrunk(case, wait)
    return interval * rate * survive * math.exp(-rate * lag) / math.expm1(rate * wall) * (1 - away)
