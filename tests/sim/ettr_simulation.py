"""An event simulation of a long run on nodes that fail: the oracle of `seatrial.plan.cost.ettr.renewal`, and what docs/ettr.md tells.

Failures are a Poisson process with one rate per node, also during recovery, waiting and saving. Work advances
continuously; nothing is simulated step by step, so a month of 2,048 nodes takes milliseconds.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from seatrial.plan.cost import ettr
from seatrial.plan.cost.ettr import DAY_S, Branch, Remedy, _shrunk, _waits


@dataclass(frozen=True)
class Case(ettr.Case):
    """With what only the simulation distinguishes."""

    disk_extra_s: float = 0.0  # a load from disk takes this much longer than the one in `down_s`


@dataclass
class Outcome:
    """Where the wall-clock time of one simulated run went, in seconds; the first seven add up to `wall_s`."""

    wall_s: float
    productive_s: float = 0.0
    redone_s: float = 0.0
    save_stalls_s: float = 0.0
    snapshots_s: float = 0.0
    recovering_s: float = 0.0
    waiting_s: float = 0.0  # for a node
    reduced_s: float = 0.0  # the speed that a shrunk run lacked
    failures: int = 0  # that stopped training
    during_recovery: int = 0  # of those, struck while recovering from an earlier one
    out_of_spares: int = 0  # a node was lost and none stood by
    from_disk: int = 0  # recoveries that found nothing newer in memory

    @property
    def ettr(self) -> float:
        return self.productive_s / self.wall_s


def simulate(case: Case, days: float, seed: int) -> Outcome:
    """One run of `days` days of wall-clock time. The same arguments give the same outcome."""
    return _Run(case, days * DAY_S, random.Random(seed)).sail()


@dataclass
class _Run:
    """State of one simulated run. `alive` nodes are usable; `world` of them train, the others stand by."""

    case: Case
    end: float
    random: random.Random
    now: float = 0.0
    position: float = 0.0  # seconds of work done and not lost
    saves: int = 0  # disk saves begun: the next one begins at (saves + 1) intervals of work
    stall_left: float = 0.0  # of the save in progress
    saved: float = 0.0  # position of the newest save that can be resumed from
    written: list[tuple[float, float]] = field(default_factory=list)  # (position, usable from) of later saves
    returns: list[float] = field(default_factory=list)  # heap: when nodes come back
    held: float = 0.0  # position of the snapshot resumed from: both nodes hold it while later ones are copied
    memory_lost: bool = False  # both copies of some rank's snapshot are gone
    copied_at: float = 0.0  # from when on each snapshot has two copies again

    def __post_init__(self) -> None:
        self.alive = self.case.nodes + self.case.spares
        self.world = self.case.nodes
        self.out = Outcome(self.end)

    def sail(self) -> Outcome:
        while self.now < self.end:
            failure = self.now + self._until_failure()
            back = self.returns[0] if self.returns else math.inf
            self._train(min(failure, back, self.end) - self.now)
            if self.now >= self.end:
                break
            if back <= failure:
                self._readmit()
                if self._size() > self.world:
                    self.world = self._size()
                    if not self._pause(self.case.grow_s):
                        self._recover()
            elif not self._spare_failed():
                self._recover()
        self.out.productive_s = self.position
        return self.out

    # -- training

    def _train(self, wall_s: float) -> None:
        """Advance by `wall_s`: work, and a stall whenever the work reaches a multiple of the interval."""
        case, out = self.case, self.out
        share = self.world / case.nodes
        speed = share / (1 + case.memory_overhead)
        cycle = case.disk_interval_s / speed + case.disk_stall_s
        finish, start, stalls = self.now + wall_s, self.position, out.save_stalls_s
        while self.now < finish:
            left = finish - self.now
            if self.stall_left > 0:
                part = min(left, self.stall_left)
                self.now += part
                out.save_stalls_s += part
                self.stall_left -= part
                if self.stall_left <= 0:
                    self._save()
                continue
            needed = ((self.saves + 1) * case.disk_interval_s - self.position) / speed
            if needed > left:
                self.position += left * speed
                self.now = finish
                break
            self.now += needed
            self.saves += 1
            # Whole cycles at once, but for those whose save may not be usable yet when this call ends.
            whole = max(0, int((finish - self.now - case.disk_lag_s) / cycle))
            if whole:
                self.now += whole * cycle
                self.saves += whole
                out.save_stalls_s += whole * case.disk_stall_s
                self.saved = (self.saves - 1) * case.disk_interval_s
                self.written.clear()
            self.position = self.saves * case.disk_interval_s
            self.stall_left = case.disk_stall_s
            if self.stall_left <= 0:
                self._save()
        self.now = finish
        working = wall_s - (out.save_stalls_s - stalls)
        out.reduced_s += working * (1 - share)
        out.snapshots_s += working * share - (self.position - start)

    def _save(self) -> None:
        """The stall of a save is over: it becomes usable after the lag."""
        self.stall_left = 0.0
        self.written.append((self.saves * self.case.disk_interval_s, self.now + self.case.disk_lag_s))
        self._settle()

    def _settle(self) -> None:
        while self.written and self.written[0][1] <= self.now:
            self.saved = self.written.pop(0)[0]

    # -- failures

    def _until_failure(self) -> float:
        """Seconds to the next failure of any node, training or standing by."""
        rate = self.case.failures_per_node_s * self.alive
        return self.random.expovariate(rate) if rate else math.inf

    def _spare_failed(self) -> bool:
        """Whether the failure struck a node that stands by: training goes on, the pool is smaller."""
        if self.random.random() * self.alive < self.world:
            return False
        remedy = self._draw().remedy
        if remedy != "process":
            self.alive -= 1
            heapq.heappush(self.returns, self.now + self._away(remedy))
        return True

    def _draw(self) -> Branch:
        x = self.random.random()
        for branch in self.case.branches:
            x -= branch.share
            if x < 0:
                return branch
        return self.case.branches[-1]

    def _away(self, remedy: Remedy) -> float:
        if remedy == "reset":
            return self.case.reset_s
        return self.random.expovariate(1 / self.case.repair_s) if self.case.repair_s else 0.0

    def _recover(self) -> None:
        """From a failure of a training node to the next step, through whatever else fails on the way."""
        case, out, again = self.case, self.out, False
        self._settle()
        self.written.clear()  # what was still being written when the processes ended
        while True:
            out.failures += 1
            out.during_recovery += again
            branch = self._draw()
            self._lose(branch.remedy)
            before = self.world
            if not self._wait_for_nodes():
                break
            down = branch.down_s
            if self._from_disk():
                down += case.disk_extra_s
            if self.world < before:
                down += case.shrink_extra_s
            if self._pause(down):
                out.from_disk += self._from_disk()
                break
            if self.now >= self.end:
                break
            again = True
        self._roll_back()
        self.memory_lost = False
        if math.isinf(self.copied_at):
            self.copied_at = self.now + case.memory_lag_s

    def _lose(self, remedy: Remedy) -> None:
        """Take the node away, where one has to go; another one takes its place sooner or later."""
        if remedy == "process":
            return
        if remedy == "node":  # a GPU reset leaves the host's memory, and so the snapshots, alone
            # Before its snapshots are copied anew, the next node lost holds the other copy with 1 / (world - 1).
            if self.now < self.copied_at and self.random.random() * (self.world - 1) < 1:
                self.memory_lost = True
            self.copied_at = math.inf
        self.alive -= 1
        away = self._away(remedy)
        if self.alive < self.world:
            self.out.out_of_spares += 1
            away = min(away, self.case.replacement_s)
        heapq.heappush(self.returns, self.now + away)

    def _in_memory(self) -> float:
        """Position of the newest snapshot that both nodes hold."""
        case = self.case
        behind = case.memory_lag_s * self.world / case.nodes / (1 + case.memory_overhead)
        # The small number: a position just reached may lie a rounding error below its own snapshot.
        taken = math.floor((self.position - behind) / case.memory_interval_s + 1e-9)
        return min(max(taken * case.memory_interval_s, self.held), self.position)

    def _from_disk(self) -> bool:
        """Whether the newest state that survived is on disk."""
        return not self.case.memory_interval_s or self.memory_lost or self._in_memory() < self.saved

    def _roll_back(self) -> None:
        from_disk = self._from_disk()
        resume = self.saved if from_disk else self._in_memory()
        self.held = 0.0 if from_disk else resume
        self.out.redone_s += self.position - resume
        self.position = resume
        self.saves = math.floor(resume / self.case.disk_interval_s + 1e-9)
        self.stall_left = 0.0

    # -- nodes

    def _size(self) -> int:
        """Nodes that can train: all, or whole replicas of what is alive where the run may shrink; 0: none."""
        if self.alive >= self.case.nodes:
            return self.case.nodes
        return self.alive // self.case.replica_nodes * self.case.replica_nodes if self.case.shrink else 0

    def _readmit(self) -> None:
        while self.returns and self.returns[0] <= self.now:
            heapq.heappop(self.returns)
            self.alive += 1

    def _wait_for_nodes(self) -> bool:
        """Until enough nodes are alive. Nothing runs meanwhile, yet nodes fail. False if the run's time is over."""
        self._readmit()
        while not self._size():
            failure, back = self.now + self._until_failure(), self.returns[0]
            until = min(failure, back, self.end)
            self.out.waiting_s += until - self.now
            self.now = until
            if until >= self.end:
                return False
            if back <= failure:
                self._readmit()
            else:
                self._lose(self._draw().remedy)
        self.world = self._size()
        return True

    def _pause(self, seconds: float) -> bool:
        """Be down for `seconds`; False if a failure of a training node or the end comes first."""
        finish = self.now + seconds
        while True:
            failure = self.now + self._until_failure()
            until = min(failure, finish, self.end)
            self.out.recovering_s += until - self.now
            self.now = until
            self._readmit()
            if until >= self.end or failure >= finish:
                return finish <= self.end
            if not self._spare_failed():
                return False


def first_order(case: Case) -> float:
    """E[ETTR] about (1 - N r (R + tau/2)) / (1 + w/tau) (after Kokolis et al., arXiv:2410.21680), with this case's terms.

    R is the mean over branches, with the wait for a node where there are no spares; tau is the interval of the tier
    that is resumed from, and its lag is lost on top. Snapshots divide by 1 + their overhead. Neither failures during
    recovery nor a pool that runs dry are in it. May fall below 0, where it means nothing.
    """
    lost = (case.memory_interval_s or case.disk_interval_s) / 2
    lost += case.memory_lag_s if case.memory_interval_s else case.disk_lag_s
    for branch, wait in zip(case.branches, _waits(case), strict=True):
        lost += branch.share * branch.down_s
        if not case.spares and branch.remedy != "process":
            lost += branch.share * (_shrunk(case, wait) if case.shrink else wait)
    costs = (1 + case.memory_overhead) * (1 + case.disk_stall_s / case.disk_interval_s)
    return (1 - lost / case.mttf_s) / costs


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95 % confidence interval (Student's t); nan of a single value."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return mean, math.nan
    # Abramowitz and Stegun 26.7.5: t from the normal quantile z; within 0.5 % from five values on.
    z, v = 1.959964, n - 1
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return mean, t * statistics.stdev(values) / math.sqrt(n)
