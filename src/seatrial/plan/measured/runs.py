"""The pace of our own trainer on a cluster, from measured step times of earlier runs there.

A run is usable if it has the same model on the same kind of GPU and its step times reflect computation: enough steps after
warm-up (compilation, caches), with all its ranks, not waiting for data. Its pace is the one for which the prediction of
that run, in its own layout, equals its median step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from seatrial.base.errors import InputError
from seatrial.base.files import read_json
from seatrial.hardware.catalogue import Gpu, find_gpu
from seatrial.job.job import Job
from seatrial.job.loading import load_job
from seatrial.plan.cost.calibration import ROWS, Entry, shipped
from seatrial.plan.cost.collectives import Fabric, UnknownNetworkError
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.cost.step import step_parts
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder
from seatrial.record.metrics import MetricsRecord
from seatrial.record.recent import recent_metrics

# Warm-up steps of a generation, which are ignored: compilation, allocator, first connections between ranks.
FIRST_STEPS = 5
ENOUGH_STEPS = 20
NEWEST_STEPS = 200
# A run that waits longer than this share of a step for data measures its storage.
MOST_WAITING = 0.05
# The spread of few runs is shrunk towards the usual one of stacks, as if four more runs had that (bench/plan_accuracy.py).
USUAL_SPREAD, PRIOR_RUNS = 0.08, 4
# The spread after a single run.
ONE_RUN = math.hypot(USUAL_SPREAD * math.sqrt(PRIOR_RUNS / (PRIOR_RUNS + 1)), ROWS)
_MOST_RUNS = 8
_LATEST = 1e11  # seconds since 1970 (the year 5138): a later record is damaged
_PACES = (0.05, 20.0)


@dataclass(frozen=True)
class _Run:
    """One usable run: its median step in seconds, over `steps` of them, in its own layout."""

    name: str
    job: Job
    step_s: float
    steps: int
    time: float  # unix seconds of its last step


class _UnusableError(Exception):
    """Why a run cannot be used."""


def paces(
    folder: Path, job: Job, gpu: Gpu, apply: Callable[[Cluster], Cluster], *, without: Path | None = None
) -> tuple[tuple[Entry, ...], tuple[str, ...], tuple[str, ...]]:
    """(paces by stack, their provenance, unused runs and why), from `folder`, its sibling run folders and those of `scale` there.

    Runs in or below `without` are left out.
    `apply` sets a cluster's measured rates: a pace is valid only with the rates it was derived with.
    """
    found: dict[str, list[tuple[_Run, float]]] = {}
    unused = []
    for candidate in _same_model(folder, job):
        name = str(candidate.path.relative_to(folder.parent))
        if without is not None and candidate.path.is_relative_to(without):
            continue
        try:
            run = _read(candidate, gpu, name, job.train.deterministic)
            stack, pace = _pace(run, gpu, apply)
        except _UnusableError as error:
            unused.append(f"run {name}: {error}")
            continue
        found.setdefault(stack, []).append((run, pace))
    entries = tuple(_entry(stack, gpu, runs) for stack, runs in found.items())
    parts = tuple(f"pace {e.pace:.3g} of {e.stack}: {e.source}" for e in entries)
    return entries, parts, tuple(unused)


def _same_model(folder: Path, job: Job) -> Iterator[RunFolder]:
    """The newest runs below the same root whose plan.json has the same architecture."""
    wanted = json.loads(json.dumps(job.architecture.as_dict()))
    try:
        paths = (*folder.parent.iterdir(), *folder.parent.glob(".scale/*/*"))
        near = [RunFolder(p) for p in paths if p.is_dir() and not p.name.startswith(".")]
    except OSError:
        return
    dated: list[tuple[float, RunFolder]] = []
    for run in near:
        try:
            plan = read_json(run.plan_json)
            if isinstance(plan, dict) and plan.get("architecture") == wanted:
                dated.append((run.metrics.stat().st_mtime, run))
        except (OSError, ValueError):
            continue
    for _, run in sorted(dated, key=lambda d: -d[0])[:_MOST_RUNS]:
        yield run


def _read(folder: RunFolder, gpu: Gpu, name: str, deterministic: bool) -> _Run:
    events, _ = read_events(folder)
    device = next((e.data for e in reversed(events) if e.kind == "device" and e.data), {})
    ran_on = find_gpu(str(device.get("device")))
    if ran_on != gpu:
        raise _UnusableError(f"it ran on {device.get('device') or 'an unknown device'}")
    try:
        job = load_job(folder.job_toml)
    except InputError as error:
        raise _UnusableError(f"its job.toml cannot be read: {error.diagnostics[0].message}") from None
    if job.train.deterministic != deterministic:
        raise _UnusableError(f"train.deterministic = {str(job.train.deterministic).lower()} there")
    launched = max((e.generation for e in events if e.kind == "run_started"), default=0)
    records = [r for r in recent_metrics(folder, NEWEST_STEPS) if r.generation >= launched]
    # The planner's step has the whole batch.
    steady = [r for r in _steady(records, job.layout.world_size) if r.step > job.train.batches.ramp]
    if len(steady) < ENOUGH_STEPS:
        raise _UnusableError(f"it has {len(steady)} usable steps, {ENOUGH_STEPS} are needed")
    step = median(r.step_time_s for r in steady)
    waiting = median(r.data_wait_s for r in steady) / step
    if waiting > MOST_WAITING:
        raise _UnusableError(f"it spent {waiting:.0%} of the time waiting for data")
    return _Run(name, job, step, len(steady), steady[-1].time)


def _steady(records: list[MetricsRecord], ranks: int) -> list[MetricsRecord]:
    """Records of steps with all ranks of the job's own layout, without the warm-up of each generation."""
    first: dict[int, int] = {}
    for r in records:
        first[r.generation] = min(r.step, first.get(r.generation, r.step))
    return [
        r
        for r in records
        if r.step >= first[r.generation] + FIRST_STEPS
        and 0 < r.step_time_s < math.inf
        and r.tokens_per_s_per_gpu > 0
        and abs(r.tokens_per_s / r.tokens_per_s_per_gpu - ranks) < 0.5
        and 0 <= r.data_wait_s < math.inf
        and 0 < r.time < _LATEST
    ]


def _pace(run: _Run, gpu: Gpu, apply: Callable[[Cluster], Cluster]) -> tuple[str, float]:
    """(stack, pace), by bisection of the logarithm: a step gets no shorter with a slower pace."""
    job = run.job
    recipe = Recipe.of(job)
    stack = stack_for(recipe)
    at = replace(hardware_of(job), gpu=gpu)
    fabric = Fabric.of(apply(at.shape), recipe)
    factors = shipped().pace(stack.name, gpu).factors

    def seconds(pace: float) -> float:
        return step_parts(job.architecture, recipe, fabric, stack, pace, factors).total

    low, high = _PACES
    try:
        if not seconds(low) < run.step_s < seconds(high):
            raise _UnusableError(
                f"no pace reproduces its steps of {run.step_s:.3g} s: {seconds(low):.3g} to {seconds(high):.3g} are predicted"
            )
        for _ in range(30):
            middle = math.sqrt(low * high)
            low, high = (low, middle) if seconds(middle) > run.step_s else (middle, high)
    except (UnknownNetworkError, UnknownSpeedError) as error:
        raise _UnusableError(str(error)) from None
    return stack.name, math.sqrt(low * high)


def _entry(stack: str, gpu: Gpu, runs: list[tuple[_Run, float]]) -> Entry:
    value = median(pace for _, pace in runs)
    squares = sum(math.log(pace / value) ** 2 for _, pace in runs)
    spread = math.sqrt((PRIOR_RUNS * USUAL_SPREAD**2 + squares) / (PRIOR_RUNS + len(runs)))
    named = ", ".join(
        f"{run.name} ({run.steps} steps, {time.strftime('%Y-%m-%d', time.gmtime(run.time))})"
        for run, _ in runs
    )
    text = f"runs made here: {named}"
    return Entry(stack, gpu.name, value, len(runs), text, gpu.architecture, spread=math.hypot(spread, ROWS))
