"""Starts measured runs, waits for them, reads their figures and deletes their checkpoints."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.base import process
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord, current_history, read_metrics
from seatrial.scale import run
from seatrial.scale.sizes import Size
from seatrial.scale.statistics import warm_up

if TYPE_CHECKING:
    from seatrial.job import Job
    from seatrial.launch.allocation import Allocation

_POLL_S = 0.1
_ENDING_S = 45.0  # grace for interrupted runs to end their agents, on other hosts too; srun may take 40 s
_ALARMS = ("recovering", "run_failed", "gave_up", "corruption", "step_skipped")


@dataclass(frozen=True)
class Figures:
    """The figures of one run."""

    warm_up: int  # warm-up steps left out
    steady: int  # steps that were measured
    step_s: float  # mean over the measured steps
    tokens_per_s: float
    mfu: float | None  # 0..1; None if the device's peak FLOP/s is unknown
    losses: list[float]  # of every step, including warm-up

    @property
    def settled(self) -> bool:
        """Whether the end of the warm-up was found before the last step searched."""
        return self.warm_up < (self.warm_up + self.steady) // 2


@dataclass(frozen=True)
class Trial:
    """One run. With a `problem` it is not valid and has no figures."""

    nodes: int
    gpus: int
    began: float  # unix seconds
    seconds: float  # lifetime of its process
    folder: str  # name of the run folder
    problem: str = ""
    figures: Figures | None = None
    hosts: list[str] = field(default_factory=list)  # names of its nodes, if known
    repeat: int = 0  # from 1, the same for parallel runs of one size; 0: not recorded

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600


@dataclass(frozen=True)
class Start:
    """One run to start."""

    size: Size
    name: str  # of its run folder
    repeat: int
    job: Job  # of `size`, on `nodes`
    nodes: tuple[str, ...]
    allocation: Allocation | None = None  # Slurm allocation restricted to these nodes
    environment: Mapping[str, str] = field(default_factory=dict)


def run_trials(
    root: Path, starts: Sequence[Start], *, limit_s: float, tick: Callable[[], None]
) -> list[Trial]:
    """Run all `starts` in parallel, each in its folder below `root`; runs are interrupted after `limit_s`.

    `tick` is called about ten times per second. No process is left when this returns or raises.
    """
    running: list[_Running] = []
    try:
        for start in starts:
            running.append(_Running(root, start))
        while not all(each.over(limit_s) for each in running):
            tick()
            time.sleep(_POLL_S)
    finally:
        _end([each.child for each in running])
    return [each.trial() for each in running]


class _Running:
    """A run whose process has been started."""

    def __init__(self, root: Path, start: Start) -> None:
        self._root, self._start, name = root, start, start.name
        self._folder = RunFolder(root / name)
        # Left by a killed measurement: it would be resumed.
        shutil.rmtree(self._folder.path, ignore_errors=True)
        file = root / f"{name}.toml"
        text = start.job.to_toml()
        file.write_text(text.replace(f'name = "{start.job.name}"', f'name = "{name}"', 1), encoding="utf-8")
        self._began, self._clock = time.time(), time.monotonic()
        self._seconds = 0.0
        self._problem = ""
        with open(process.open_log(root / f"{name}.log"), "ab") as log:
            self.child = subprocess.Popen(
                run.command(file, root, start.allocation, parent=os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **start.environment},
                process_group=0,
            )

    def over(self, limit_s: float) -> bool:
        """Whether its process has ended, or `limit_s` is over."""
        seconds = time.monotonic() - self._clock
        ended = self.child.poll() is not None
        if self._seconds == 0 and (ended or seconds > limit_s):
            self._seconds = seconds
            self._problem = "" if ended else f"it was stopped after its limit of {limit_s:.0f} s"
        return self._seconds > 0

    def trial(self) -> Trial:
        """The result. The process must have ended. Deletes the run's checkpoints."""
        start, problem = self._start, self._problem
        if not problem and self.child.returncode:
            log = self._root / f"{start.name}.log"
            problem = f"its run {process.status_text(self.child.returncode)}: see {log}"
        size, nodes = start.size, list(start.nodes)
        trial = Trial(
            *(size.nodes, size.gpus, self._began, self._seconds, start.name, problem),
            hosts=nodes,
            repeat=start.repeat,
        )
        if not problem:
            trial = _read(trial, self._folder, size)
        shutil.rmtree(self._folder.checkpoints, ignore_errors=True)
        return trial


def _end(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt running processes, and wait for all."""
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
    until = time.monotonic() + _ENDING_S
    for child in children:
        try:
            child.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()  # its agents on this host end with it
            child.wait()


def _read(trial: Trial, folder: RunFolder, size: Size) -> Trial:
    """`trial` with the figures from its records, or with their problem."""
    records, problems = read_metrics(folder)
    records = current_history(records)
    ledger, wrong = read_ledger(folder)
    events, _ = read_events(folder)
    job = size.job
    alarm = next((e for e in events if e.kind in _ALARMS), None)
    faults = [str(p) for p in (*problems, *wrong)] + ledger_gaps(ledger, job.train.batches)
    if alarm is not None:
        faults.insert(0, alarm.message)
    if [r.step for r in records] != list(range(1, job.train.steps + 1)):
        faults.append(f"{len(records)} of {job.train.steps} steps are recorded")
    if faults:
        return replace(trial, problem="; ".join(faults))
    return replace(trial, figures=figures_of(records, size.tokens_per_step))


def figures_of(records: Sequence[MetricsRecord], tokens_per_step: int) -> Figures:
    """The figures of a run from its step records."""
    cut = warm_up([r.step_time_s for r in records])
    steady = records[cut:]
    step_s = math.fsum(r.step_time_s for r in steady) / len(steady)
    last = steady[-1]
    return Figures(
        warm_up=cut,
        steady=len(steady),
        step_s=step_s,
        tokens_per_s=tokens_per_step / step_s,
        mfu=None if last.mfu is None else last.mfu * last.step_time_s / step_s,
        losses=[r.loss for r in records],
    )
