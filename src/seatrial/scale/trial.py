"""One measured run of one size: started, waited for, read from its records, its checkpoint deleted."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from seatrial.base import process
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.ledger import ledger_gaps, read_ledger
from seatrial.record.metrics import MetricsRecord, current_history, read_metrics
from seatrial.scale import run
from seatrial.scale.sizes import Size
from seatrial.scale.statistics import warm_up

_POLL_S = 0.1
_ENDING_S = 20.0  # for an interrupted run to end its agents, on other hosts too
_ALARMS = ("recovering", "run_failed", "gave_up", "corruption", "step_skipped")


@dataclass(frozen=True)
class Figures:
    """What one run measured."""

    warm_up: int  # first steps that were left out
    steady: int  # steps that were measured
    step_s: float  # mean of these
    tokens_per_s: float
    mfu: float | None  # 0..1; None if the peak of the device is not known
    losses: list[float]  # of every step, warm-up too

    @property
    def settled(self) -> bool:
        """Whether the warm-up ended before the last step at which its end was looked for."""
        return self.warm_up < (self.warm_up + self.steady) // 2


@dataclass(frozen=True)
class Trial:
    """One run. With a `problem` it does not count, and has no figures."""

    nodes: int
    gpus: int
    began: float  # unix seconds
    seconds: float  # of its process, start to end
    folder: str  # name of the run folder
    problem: str = ""
    figures: Figures | None = None

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.seconds / 3600


def run_trial(root: Path, size: Size, name: str, *, limit_s: float, tick: Callable[[], None]) -> Trial:
    """Run `size` in `root`/`name`; after `limit_s` it is interrupted. `tick` is called about ten times a second.

    Nothing of it is left when this returns or raises.
    """
    folder = RunFolder(root / name)
    shutil.rmtree(folder.path, ignore_errors=True)  # of a measurement that was killed: it would be resumed
    file = root / f"{name}.toml"
    text = size.job.to_toml()
    file.write_text(text.replace(f'name = "{size.job.name}"', f'name = "{name}"', 1), encoding="utf-8")
    began, clock = time.time(), time.monotonic()
    with open(process.open_log(root / f"{name}.log"), "ab") as log:
        child = subprocess.Popen(
            run.command(file, root, parent=os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=0,
        )
    problem = ""
    try:
        while child.poll() is None:
            if time.monotonic() - clock > limit_s:
                problem = f"it did not end within {limit_s:.0f} s, and was ended"
                break
            tick()
            time.sleep(_POLL_S)
    finally:
        _end(child)
    seconds = time.monotonic() - clock
    if not problem and child.returncode:
        problem = f"its run {process.status_text(child.returncode)}: see {root / f'{name}.log'}"
    trial = Trial(size.nodes, size.gpus, began, seconds, name, problem)
    if not problem:
        trial = _read(trial, folder, size)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)
    return trial


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.send_signal(signal.SIGINT)
    try:
        child.wait(_ENDING_S)
    except subprocess.TimeoutExpired:
        child.kill()  # its agents on this host end with it
        child.wait()


def _read(trial: Trial, folder: RunFolder, size: Size) -> Trial:
    """`trial` with the figures of the records, or with what is wrong with them."""
    records, problems = read_metrics(folder)
    records = current_history(records)
    ledger, wrong = read_ledger(folder)
    events, _ = read_events(folder)
    job = size.job
    alarm = next((e for e in events if e.kind in _ALARMS), None)
    told = [str(p) for p in (*problems, *wrong)] + ledger_gaps(ledger, job.train.global_batch)
    if alarm is not None:
        told.insert(0, alarm.message)
    if [r.step for r in records] != list(range(1, job.train.steps + 1)):
        told.append(f"{len(records)} of {job.train.steps} steps are recorded")
    if told:
        return replace(trial, problem="; ".join(told))
    return replace(trial, figures=figures_of(records, size.tokens_per_step))


def figures_of(records: Sequence[MetricsRecord], tokens_per_step: int) -> Figures:
    """The figures of a run from the records of all its steps."""
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
