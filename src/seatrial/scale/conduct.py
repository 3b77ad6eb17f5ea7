"""A whole measurement: which size runs next, until every interval is narrow enough, or the repeats or the budget end."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base.errors import InputError, RunFailed
from seatrial.data.prepare import blend_of, check_stores, data_cache, resolve_stores
from seatrial.launch import launcher_for
from seatrial.plan.search.scaling import Mode
from seatrial.record import lock, metrics
from seatrial.record.folder import RunFolder
from seatrial.record.jsonl import Tail
from seatrial.scale.sizes import Size, in_words, sizes_of
from seatrial.scale.state import State, identity_of, open_state
from seatrial.scale.statistics import Estimate, estimate, ratio
from seatrial.scale.trial import Trial, run_trial

if TYPE_CHECKING:
    from seatrial.job import Job

LEAST_STEPS, DEFAULT_STEPS = 12, 30
# Stopping as soon as the interval is narrow makes it cover less often than 95 times of 100, the more so from few runs.
# Simulated with normal noise of 0.5 to 4 %: 92 to 96 % from 3 runs, 94 to 96 % from 4 (tests/unit/scale).
LEAST_REPEATS = 4
_LIMIT_S = 24 * 3600.0  # of one run, if there is no budget
_SLACK = 1.1  # a run may take this many times what earlier ones of its size did


@dataclass(frozen=True)
class Terms:
    """What was asked for."""

    nodes: tuple[int, ...]
    mode: Mode = "weak"
    steps: int = DEFAULT_STEPS
    precision: float = 0.02  # half the width of an efficiency's interval, relative
    repeats: int = 10
    budget: float | None = None  # GPU hours, those of resumed runs included
    seed: int = 0


@dataclass(frozen=True)
class Progress:
    """The state of a measurement, for its watcher."""

    nodes: int
    repeat: int  # of this size, from 1
    step: int
    steps: int
    spent: float  # GPU hours before this run


@dataclass
class Measurement:
    """Measures one job. Writes nothing outside its folder and the data cache of `runs`."""

    job: Job
    runs: Path
    terms: Terms
    watch: Callable[[Progress], None] | None = None
    finished: Callable[[Trial], None] | None = None
    sizes: list[Size] = field(init=False)
    state: State = field(init=False)
    resumed: int = 0  # runs of an earlier start
    stopped: str = ""  # why it ended before every interval was narrow enough
    failed: dict[int, str] = field(default_factory=dict)  # nodes -> the problem of this start's run

    def prepare(self, *, fresh: bool = False) -> None:
        """Check what can be checked, and open or make the folder; `close` releases it. Raises InputError, RunFailed."""
        job, terms = self.job, self.terms
        stores = resolve_stores(job.data, data_cache(self.runs), Path.cwd())
        addresses = [store.address for store in stores]
        self.sizes = sizes_of(job, terms.nodes, terms.mode, steps=terms.steps, stores=addresses)
        largest = self.sizes[-1].job
        launcher_for(largest).check(largest)
        check_stores(
            stores,
            blend_of(job.data),
            vocab_size=job.architecture.vocab_size,
            sequence_length=job.train.sequence_length,
            global_batch=largest.train.global_batch,
            tokenizer_spec=job.data.tokenizer,
        )
        identity = identity_of(job, terms.mode, terms.steps, [store.digest for store in stores])
        self.state = open_state(self.runs, job, identity, fresh=fresh)
        self.resumed = len(self.state.trials)
        folder = self.state.folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock.acquire(folder / "lock")
        except lock.LockHeld as held:
            raise RunFailed(
                f"{folder} is measured by process {held.pid}", hint="wait for its end, or give --fresh"
            ) from None
        except OSError as error:
            raise InputError(
                f"cannot make the folder {folder}: {error.strerror}",
                hint="run it in a folder that you may write to, or give --runs",
            ) from error

    def close(self) -> None:
        """Release the folder."""
        os.close(self._lock)

    def run_all(self) -> None:
        """Run until nothing is left to measure; the state grows by one run at a time."""
        while (size := self._next()) is not None:
            room_s = self._room_s(size)
            if room_s is not None and room_s <= self._expected_s(size):
                left = f"{room_s * size.gpus / 3600:.3g} GPU hours left"
                self.stopped = f"the budget is spent: {left}, too few for a run on {in_words(size.nodes)}"
                return
            trial = self._run(size, _LIMIT_S if room_s is None else room_s)
            self.state.add(trial)
            if trial.problem and (self.terms.budget is None or self.state.spent < self.terms.budget):
                self.failed[size.nodes] = trial.problem
            if self.finished is not None:
                self.finished(trial)

    # -- what is known

    def speed(self, nodes: int) -> Estimate | None:
        """Tokens/s at this size; None if it has no run that counts."""
        values = [t.figures.tokens_per_s for t in self.state.good(nodes) if t.figures is not None]
        return estimate(values) if values else None

    def efficiency(self, nodes: int, base: int) -> Estimate | None:
        """Tokens/s/GPU over that at `base` nodes; None if one of them has no run that counts."""
        here, there = self.speed(nodes), self.speed(base)
        return None if here is None or there is None else ratio(here, there, base / nodes)

    def pairs(self) -> list[tuple[int, int]]:
        """(nodes, base) of every efficiency that is reported: against the first size, and at each doubling."""
        nodes = [size.nodes for size in self.sizes]
        return list(
            dict.fromkeys(
                (n, b)
                for n in nodes
                for b in (nodes[0], n // 2)
                if b in nodes and (b == nodes[0] or 2 * b == n) and b < n
            )
        )

    # -- what is next

    def _next(self) -> Size | None:
        """Of the sizes that need another run, one of those with the fewest, in an order that the seed shuffles."""
        wanted = [size for size in self.sizes if self._needs_more(size)]
        if not wanted:
            return None
        counts = {size.nodes: len(self.state.good(size.nodes)) for size in wanted}
        fewest = [size for size in wanted if counts[size.nodes] == min(counts.values())]
        return random.Random(f"{self.terms.seed} {len(self.state.trials)}").choice(fewest)

    def _needs_more(self, size: Size) -> bool:
        count = len(self.state.good(size.nodes))
        if size.nodes in self.failed or count >= self.terms.repeats:
            return False
        if count < min(LEAST_REPEATS, self.terms.repeats):
            return True
        pairs = [(n, b) for n, b in self.pairs() if size.nodes in (n, b) and not {n, b} & self.failed.keys()]
        found = [self.efficiency(n, b) for n, b in pairs] or [self.speed(size.nodes)]
        return any(e is not None and (e.half or 0.0) > self.terms.precision for e in found)

    def _room_s(self, size: Size) -> float | None:
        if self.terms.budget is None:
            return None
        return (self.terms.budget - self.state.spent) * 3600 / size.gpus

    def _expected_s(self, size: Size) -> float:
        """Seconds that a run of this size took at most, else one of any size; 0 before the first."""
        same = [t.seconds for t in self.state.trials if t.nodes == size.nodes]
        return _SLACK * max(same or [t.seconds for t in self.state.trials] or [0.0])

    def _run(self, size: Size, limit_s: float) -> Trial:
        repeat, seen = len(self.state.good(size.nodes)) + 1, 0
        name = f"{size.nodes}-nodes-{len(self.state.trials) + 1}"
        tail = Tail(RunFolder(self.state.folder / name).metrics, metrics.NOUN)

        def tick() -> None:
            nonlocal seen
            seen += len(tail.poll_numbered())
            if self.watch is not None:
                self.watch(Progress(size.nodes, repeat, seen, self.terms.steps, self.state.spent))

        began = time.time()
        try:
            return run_trial(self.state.folder, size, name, limit_s=limit_s, tick=tick)
        except KeyboardInterrupt:
            # It does not count, but its GPU hours do.
            self.state.add(Trial(size.nodes, size.gpus, began, time.time() - began, name, "interrupted"))
            raise
