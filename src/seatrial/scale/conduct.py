"""Conducts a measurement: picks the next size to run until every interval is narrow enough, or repeats or budget run out."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from seatrial.base.errors import InputError, RunFailed
from seatrial.data.prepare import blend_of, check_stores, data_cache, resolve_stores
from seatrial.job.changed import changed_job
from seatrial.launch import launcher_for
from seatrial.plan.search.scaling import Mode
from seatrial.record import lock, metrics
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Tail
from seatrial.scale.groups import Group, compare
from seatrial.scale.site import Site, site_of
from seatrial.scale.sizes import Size, in_words, sizes_of
from seatrial.scale.state import State, identity_of, open_state
from seatrial.scale.statistics import Estimate, estimate, ratio
from seatrial.scale.trial import Start, Trial, run_trials

if TYPE_CHECKING:
    from seatrial.check.outputs.topology import Topology
    from seatrial.job import Job
    from seatrial.job.changed import Change
    from seatrial.launch.allocation import Allocation

LEAST_STEPS, DEFAULT_STEPS = 12, 30
# Stopping as soon as the interval is narrow lowers its coverage below 95 %, more so with few runs.
# Coverage simulated with normal noise of 0.5 to 4 %: 92 to 96 % with 3 runs, 94 to 96 % with 4 (tests/unit/scale).
LEAST_REPEATS = 4
_LIMIT_S = 24 * 3600.0  # limit of one run without a budget
_SLACK = 1.1  # a run may take this many times as long as earlier ones of its size


@dataclass(frozen=True)
class MeasurementOptions:
    """Parameters of a measurement."""

    nodes: tuple[int, ...]
    mode: Mode = "weak"
    steps: int = DEFAULT_STEPS
    precision: float = 0.02  # target half-width of an efficiency's interval, relative
    repeats: int = 10
    budget: float | None = None  # GPU hours, including resumed runs
    seed: int = 0
    groups: bool = False  # run disjoint groups of nodes in parallel
    topology: Topology | None = None  # for the names of switches of congested ports


@dataclass(frozen=True)
class Progress:
    """Progress of a measurement, for display."""

    nodes: int
    repeat: int  # of this size, from 1
    step: int  # of the slowest run, if several run in parallel
    steps: int
    spent: float  # GPU hours before this run


@dataclass
class Measurement:
    """Measures one job. Writes nothing outside its folder and the data cache of `runs`."""

    job: Job
    runs: Path
    options: MeasurementOptions
    allocation: Allocation | None = None  # the Slurm allocation in which every run is a job step
    model_changes: tuple[Change, ...] = ()  # differences of `job` from the user's
    watch: Callable[[Progress], None] | None = None
    finished: Callable[[Trial], None] | None = None
    sizes: list[Size] = field(init=False)
    state: State = field(init=False)
    site: Site = field(init=False)
    resumed: int = 0  # runs of an earlier start
    stopped: str = ""  # why it ended early
    # nodes -> problem of this start's run, or of all groups.
    failed: dict[int, str] = field(default_factory=dict)
    failed_groups: dict[tuple[str, ...], str] = field(default_factory=dict)  # -> problem of this start's run

    def prepare(self, *, fresh: bool = False) -> None:
        """Validate the request, and open or create the folder; `close` releases it. Raises InputError, RunFailed."""
        job, options = self.job, self.options
        stores = resolve_stores(job.data, data_cache(self.runs), Path.cwd())
        addresses = [store.address for store in stores]
        self.sizes = sizes_of(job, options.nodes, options.mode, steps=options.steps, stores=addresses)
        self.sizes = [replace(size, changes=(*self.model_changes, *size.changes)) for size in self.sizes]
        largest = self.sizes[-1].job
        if self.allocation is None:
            launcher_for(largest).check(largest)
        self.site = site_of(job, largest.cluster.nodes, self.allocation)
        if options.groups and len(self.site.groups(self.sizes[0].nodes)) < 2:
            raise InputError(
                f"--groups compares groups of nodes, and {in_words(self.sizes[0].nodes)} fit only once into the "
                f"{len(self.site.nodes)} that {job.cluster.launcher} has",
                hint="give smaller sizes, or more nodes: [ssh] hosts, a larger allocation, or cluster.nodes of a virtual "
                "cluster",
            )
        check_stores(
            stores,
            blend_of(job.data),
            vocab_size=job.architecture.vocab_size,
            sequence_length=job.train.sequence_length,
            global_batch=largest.train.global_batch,
            tokenizer_spec=job.data.tokenizer,
        )
        identity = identity_of(job, options.mode, options.steps, [store.digest for store in stores])
        if options.groups:  # parallel runs may be slower
            identity |= {"groups": True}
        self.state = open_state(self.runs, job, identity, fresh=fresh)
        self.resumed = len(self.state.trials)
        folder = self.state.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock.acquire(folder / "lock")
        except lock.LockHeld as held:
            raise RunFailed(
                f"process {held.pid} is measuring in {folder}", hint="wait for it to end, or give --fresh"
            ) from None
        except OSError as error:
            raise InputError(
                f"cannot create the folder {folder}: {error.strerror}",
                hint="run it in a writable folder, or give --runs",
            ) from error

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def run_all(self) -> None:
        """Run until nothing is left to measure; the state is saved after each run."""
        while (size := self._next()) is not None:
            groups = self._groups(size)
            gpus = size.gpus * len(groups)
            room_s = self._room_s(gpus)
            if room_s <= self._expected_s(size):
                left = f"{room_s * gpus / 3600:.3g} GPU hours left"
                self.stopped = f"the budget is spent: {left}, too few for a run on {in_words(size.nodes)}"
                return
            for trial in self._run(size, groups, room_s):
                self.state.add(trial)
                if trial.problem and (self.options.budget is None or self.state.spent < self.options.budget):
                    self._failed(size, trial)
                if self.finished is not None:
                    self.finished(trial)

    def _failed(self, size: Size, trial: Trial) -> None:
        """Do not repeat a failed size or group; other groups continue."""
        self.failed_groups[tuple(trial.hosts)] = trial.problem
        if not self.options.groups or not self._groups(size):
            self.failed[size.nodes] = trial.problem

    def _groups(self, size: Size) -> list[tuple[str, ...]]:
        """The groups of nodes for the next parallel runs."""
        if not self.options.groups:
            return [self.site.nodes[: size.nodes]]
        return [group for group in self.site.groups(size.nodes) if group not in self.failed_groups]

    def trace(self, nodes: int, ranks: Sequence[int]) -> None:
        """Trace two late steps of `ranks` in an extra run of this size, which does not count; once, within the budget."""
        if self.traces():
            return
        (size,) = (size for size in self.sizes if size.nodes == nodes)
        why = "the ranks named by the causes, and one more"
        traced = changed_job(
            size.job,
            {
                "train.profile_ranks": (list(ranks), why),
                "train.profile_first_step": (self.options.steps - 2, "after the warm-up"),
                "train.profile_steps": (2, "limits the trace's size"),
            },
        )
        room_s = self._room_s(size.gpus)
        if room_s <= self._expected_s(size):
            self.stopped = self.stopped or "the budget is spent: no trace was recorded"
            return
        for trial in self._run(replace(size, job=traced.job), self._groups(size), room_s):
            self.state.add(replace(trial, problem=trial.problem or "a traced run does not count"))

    def traces(self) -> list[Path]:
        """The traces that `trace` has recorded."""
        return [p for t in self.state.trials for p in RunFolder(self.state.folder / t.folder).traces()]

    def _room_s(self, gpus: int) -> float:
        """The time limit of a run, in seconds, by the budget."""
        left = None if self.options.budget is None else (self.options.budget - self.state.spent) * 3600 / gpus
        return _LIMIT_S if left is None else left

    # -- results

    def speed(self, nodes: int) -> Estimate | None:
        """Tokens/s at this size; None without a valid run."""
        values: dict[int, list[float]] = {}
        for i, trial in enumerate(self.state.good(nodes)):
            if trial.figures is not None:
                # Parallel runs are not independent: the median of the groups is one value.
                values.setdefault(trial.repeat if self.options.groups else i, []).append(
                    trial.figures.tokens_per_s
                )
        return estimate([median(each) for each in values.values()]) if values else None

    def repeats(self, nodes: int) -> int:
        """Number of valid repeats of this size."""
        good = self.state.good(nodes)
        return len({trial.repeat for trial in good}) if self.options.groups else len(good)

    def efficiency(self, nodes: int, base: int) -> Estimate | None:
        """Tokens/s/GPU relative to `base` nodes; None if either has no valid run."""
        here, there = self.speed(nodes), self.speed(base)
        return None if here is None or there is None else ratio(here, there, base / nodes)

    def pairs(self) -> list[tuple[int, int]]:
        """(nodes, base) of every reported efficiency: against the first size, and at each doubling."""
        nodes = [size.nodes for size in self.sizes]
        return list(
            dict.fromkeys(
                (n, b)
                for n in nodes
                for b in (nodes[0], n // 2)
                if b in nodes and (b == nodes[0] or 2 * b == n) and b < n
            )
        )

    def groups(self, nodes: int) -> list[Group]:
        """The comparison of node groups at this size; [] without --groups."""
        return compare([t for t in self.state.trials if t.nodes == nodes]) if self.options.groups else []

    # -- scheduling

    def _next(self) -> Size | None:
        """A random size (by the seed) among those that need another run and have the fewest."""
        wanted = [size for size in self.sizes if self._needs_more(size)]
        if not wanted:
            return None
        counts = {size.nodes: self.repeats(size.nodes) for size in wanted}
        fewest = [size for size in wanted if counts[size.nodes] == min(counts.values())]
        return random.Random(f"{self.options.seed} {len(self.state.trials)}").choice(fewest)

    def _needs_more(self, size: Size) -> bool:
        count = self.repeats(size.nodes)
        if size.nodes in self.failed or count >= self.options.repeats:
            return False
        if count < min(LEAST_REPEATS, self.options.repeats):
            return True
        pairs = [(n, b) for n, b in self.pairs() if size.nodes in (n, b) and not {n, b} & self.failed.keys()]
        found = [self.efficiency(n, b) for n, b in pairs] or [self.speed(size.nodes)]
        return any(e is not None and (e.half or 0.0) > self.options.precision for e in found)

    def _expected_s(self, size: Size) -> float:
        """The longest run of this size so far, else of any size, in seconds; 0 before the first."""
        same = [t.seconds for t in self.state.trials if t.nodes == size.nodes]
        return _SLACK * max(same or [t.seconds for t in self.state.trials] or [0.0])

    def _run(self, size: Size, groups: Sequence[tuple[str, ...]], limit_s: float) -> list[Trial]:
        repeat = 1 + max((t.repeat for t in self.state.trials if t.nodes == size.nodes), default=0)
        first = len(self.state.trials) + 1
        starts = [
            Start(
                size,
                f"{size.nodes}-nodes-{first + i}",
                repeat,
                self.site.job_on(size.job, group),
                group,
                None if self.allocation is None else replace(self.allocation, nodes=group),
                self.site.environment_on(size.job, group) if self.options.groups else {},
            )
            for i, group in enumerate(groups)
        ]
        tails = [Tail(RunFolder(self.state.folder / start.name).metrics, metrics.NOUN) for start in starts]
        seen = [0] * len(tails)
        shown = self.repeats(size.nodes) + 1

        def tick() -> None:
            for i, tail in enumerate(tails):
                seen[i] += len(tail.poll_numbered())
            if self.watch is not None:
                self.watch(Progress(size.nodes, shown, min(seen), self.options.steps, self.state.spent))

        started_at = time.time()
        try:
            return run_trials(self.state.folder, starts, limit_s=limit_s, tick=tick)
        except KeyboardInterrupt:
            # The runs are discarded, but their GPU hours count.
            seconds = time.time() - started_at
            for start in starts:
                self.state.add(
                    Trial(
                        *(size.nodes, size.gpus, started_at, seconds, start.name, "interrupted"),
                        hosts=list(start.nodes),
                        repeat=repeat,
                    )
                )
            raise
