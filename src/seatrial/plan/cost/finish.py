"""Forecast of a whole run from its step time: saves, failures, wall-clock time and GPU hours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from seatrial.hardware.failures import Rate
from seatrial.job.architecture import Architecture
from seatrial.job.optimizers import optimizer_named
from seatrial.plan.cost.ettr import DAY_S, Branch, Case, renewal
from seatrial.plan.cost.predict import Prediction, Share
from seatrial.plan.model.cluster import HOST_GB_S, Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.record.interval import Interval, choose_interval

NEW_PROCESS_S = 30.0  # assumption: Python, CUDA context, compiled code from its cache, first step
# 2.5 min above some thousands of GPUs, NVIDIA/nccl#1156; linear from there is an assumption.
COMMUNICATORS_S_PER_GPU = 0.01


@dataclass(frozen=True)
class Finish:
    """Seconds of wall-clock time unless a name says otherwise. `low_s` and `high_s` follow from the step's interval."""

    wall_s: float
    low_s: float
    high_s: float
    ettr: float  # productive training time over wall-clock time
    failures: float  # expected number during the run
    checkpoint_bytes: float
    stall_s: float  # of one save
    down_s: float  # from a failure to the next step
    joining_s: float  # part of it: creating communicators
    every_s: float  # between saves
    interval: Interval  # the best one
    gpu_hours: float
    waterfall: tuple[Share, ...]  # of the wall-clock time: the step's parts, saving, failures

    @property
    def mfu(self) -> float:
        """MFU of the whole run, failures included."""
        return self.waterfall[0].share

    def within(self, seconds: float, spread: float, faster: float = 1.0) -> float:
        """Probability that the run ends within `seconds` of wall-clock time; `faster`: speedup of a step.

        Step time is lognormal around the prediction with `spread` (`Pace.spread`), as in its interval. Failures are a
        Poisson process of the expected rate, each with the average cost. Uncertainty of the rate is not included.
        """
        *_, failing = self.waterfall
        work = (self.wall_s - failing.seconds) / faster
        each = failing.seconds / self.failures
        expected = seconds / self.wall_s * self.failures
        likely, normal = 0.0, NormalDist()
        most = expected + 12 * math.sqrt(expected) + 30  # more failures have negligible probability
        n = 0
        while n < most and (left := seconds - n * each) > 0:  # for the work, after n failures
            often = math.exp(n * math.log(expected) - expected - math.lgamma(n + 1))
            likely += often * normal.cdf(math.log(left / work) / spread)
            n += 1
        return likely


def finish(
    prediction: Prediction,
    model: Architecture,
    recipe: Recipe,
    cluster: Cluster,
    steps: int,
    *,
    rate: Rate,
    storage_gb_s: float,
    max_unsaved_s: float = 14400.0,
    every_steps: int | None = None,
    ramp: Sequence[tuple[int, Prediction]] = (),
) -> Finish:
    """Forecast `steps` steps, after those of a batch `ramp` with predictions of their own, on nodes that fail at `rate`, with storage that reads and writes `storage_gb_s`.

    The chances of a failure and the costs of saves are those of the steps after the ramp. It saves every `every_steps`, or at Young's interval, which is `interval` in both cases.

    ETTR is the renewal process of `ettr.py` with one kind of failure: a restart from the newest checkpoint, in new
    processes on available nodes. ValueError if steps, rate or bandwidth are not above 0.
    """
    if steps < 1 or storage_gb_s <= 0:
        raise ValueError(f"no run of {steps} steps with storage of {storage_gb_s} GB/s")
    # fp32 weights and state, each once
    size = float(4 * model.parameters() + optimizer_named(recipe.optimizer).bytes_of(model))
    # Every shard is saved by one rank: replicas save nothing.
    stall = size / (recipe.world / recipe.layout.replicate) / (HOST_GB_S * 1e9)
    write = size / (storage_gb_s * 1e9)
    nodes = -(-recipe.world // cluster.gpus_per_node)
    chosen = choose_interval(
        save_cost_s=stall,
        write_s=write,
        step_time_s=prediction.step_s,
        nodes=nodes,
        failures=0,
        node_days=0.0,
        prior=rate,
        max_unsaved_s=max_unsaved_s,
    )
    interval_s = chosen.interval_s if every_steps is None else every_steps * prediction.step_s
    joining = COMMUNICATORS_S_PER_GPU * recipe.world
    down = NEW_PROCESS_S + joining + write
    case = Case(
        nodes=nodes,
        failures_per_node_s=rate.per_node_day / DAY_S,
        branches=(Branch(1.0, "process", down),),
        disk_interval_s=interval_s,
        disk_stall_s=stall,
        disk_lag_s=write,
    )
    ettr = renewal(case)
    phases = [*ramp, (steps, prediction)]
    work = math.fsum(n * step.step_s for n, step in phases)
    wall = work / ettr
    saving = ettr * stall / interval_s
    seconds = [
        math.fsum(n * part.seconds for (n, _), part in zip(phases, parts, strict=True))
        for parts in zip(*(step.waterfall for _, step in phases), strict=True)
    ]
    shares = [Share(s.name, took / wall, took) for s, took in zip(prediction.waterfall, seconds, strict=True)]
    shares.append(Share("saving checkpoints", saving, saving * wall))
    shares.append(Share("failures and recovery", 1 - ettr - saving, (1 - ettr - saving) * wall))
    return Finish(
        wall_s=wall,
        low_s=wall * prediction.low_s / prediction.step_s,
        high_s=wall * prediction.high_s / prediction.step_s,
        ettr=ettr,
        failures=wall / case.mttf_s,
        checkpoint_bytes=size,
        stall_s=stall,
        down_s=down,
        joining_s=joining,
        every_s=interval_s,
        interval=chosen,
        gpu_hours=wall / 3600 * recipe.world,
        waterfall=tuple(shares),
    )
