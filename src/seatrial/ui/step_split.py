"""Breakdown of the last steps' time, for the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seatrial.base import units
from seatrial.base.errors import InputError
from seatrial.record.view import RunView
from seatrial.ui.out import Pair

if TYPE_CHECKING:
    from seatrial.plan.cost.predict import Prediction
    from seatrial.plan.report.step_waterfall import StepWaterfall
    from seatrial.record.frontier import Account

_STEPS = 512  # last steps that are read of each rank
_LEAST = 0.005  # minimum share of a step that is shown
_AHEAD = 0.05  # minimum excess over the median, in shares of a step, for a rank to be named


def account_of(view: RunView) -> Account | None:
    """The account of the run's last generation; None if there is none. Unusable files are added to the problems of `view`."""
    # numpy takes longer to import than the rest of a summary, and not every view needs it.
    from seatrial.record.frontier import account
    from seatrial.record.stages import read_generation

    found, problems = read_generation(view.folder, view.generation, most=_STEPS)
    view.problems += [problem for problem in problems if problem not in view.problems]
    return account(found)


def waterfall_of_run(view: RunView, account: Account | None) -> tuple[StepWaterfall | None, str]:
    """(step waterfall in the planner's categories with its prediction, or None; reason for a missing prediction)."""
    if account is None or view.last is None:
        return None, ""
    from seatrial.plan.report.step_waterfall import step_waterfall

    try:
        pipeline = pipeline_of(view, account)
    except InputError as error:
        return None, error.diagnostics[0].message
    prediction, why = prediction_of(view, account.ranks)
    last = view.last
    seconds = None if last.mfu is None else last.mfu * last.step_time_s
    return step_waterfall(account, pipeline, model_flops_s=seconds, prediction=prediction), why


def pipeline_of(view: RunView, account: Account) -> int:
    """Number of pipeline stages. Raises InputError if plan.json does not have it."""
    from seatrial.record.run import read_plan

    try:
        pipeline = int(read_plan(view.folder)["layout"]["pipeline"])
        if account.ranks % pipeline:
            raise ValueError(f"a pipeline of {pipeline} for {account.ranks} ranks")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"plan.json cannot be used: {error}") from error
    return pipeline


def prediction_of(view: RunView, ranks: int | None) -> tuple[Prediction | None, str]:
    """(prediction for the run, not calibrated by its own measurements; reason if there is none).

    `ranks`: number of ranks that ran; None if unknown.
    """
    try:
        return _prediction(view, ranks)
    except InputError as error:
        return None, f"job.toml cannot be used: {error.diagnostics[0].message}"


def _prediction(view: RunView, ranks: int | None) -> tuple[Prediction | None, str]:
    if view.device == "cpu":  # avoid importing the planner, which is slow
        return None, "ranks are CPU processes, for which speed is not predicted"
    from seatrial.job.loading import load_job
    from seatrial.plan.cost.calibration import shipped
    from seatrial.plan.measured.rates import measured_rates
    from seatrial.plan.model.hardware import hardware_of
    from seatrial.plan.model.recipe import Recipe
    from seatrial.plan.report.advice import Predictor

    job = load_job(view.folder.job_toml)
    if view.last is not None and view.last.step <= job.train.batches.ramp:
        return (
            None,
            f"the batch is still growing, and the prediction is of steps of {job.train.global_batch:,} sequences",
        )
    if ranks not in (None, job.layout.world_size):
        return None, f"{ranks} ranks ran, the job has {job.layout.world_size}"
    rates = measured_rates(view.folder.path, job, without=view.folder.path)
    place = rates.at(hardware_of(job))
    if place.cluster is None:
        return None, place.why_no_gpu
    found = Predictor(job, place.cluster, "seatrial", rates.calibration(shipped())).try_predict(
        Recipe.of(job)
    )
    return (
        found,
        "" if found is not None else place.why_no_network or "by the prediction it does not fit into memory",
    )


def waterfall_pairs(waterfall: StepWaterfall | None, why: str) -> list[Pair]:
    """The measured waterfall in percent of a step, each part with its ratio to the prediction."""
    if waterfall is None:
        return [Pair("waterfall", f"unknown: {why}")] if why else []
    parts = []
    for row in waterfall.shown:
        if row.seconds is not None and row.seconds >= _LEAST * waterfall.step_s:
            ratio = "" if row.ratio is None else f" ({row.ratio:.2f} x plan)"
            parts.append(f"{row.name} {100 * row.seconds / waterfall.step_s:.0f} %{ratio}")
    planned = waterfall.total.ratio
    parts.append(f"no prediction: {why}" if planned is None else f"step {planned:.2f} x plan")
    return [Pair("waterfall", "\n".join((", ".join(parts), *waterfall.notes())))]


def split_pairs(account: Account | None) -> list[Pair]:
    """The step time by stage in percent, and the slowest rank if it stands out."""
    if account is None:
        return []
    split = account.split
    shares = {name: seconds / split.step_s for name, seconds in account.seconds.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    parts = ", ".join(
        f"{_stage_name(name)} {100 * shares[name]:.0f} %" for name in largest if shares[name] >= _LEAST
    )
    lines = [
        f"{units.duration(split.step_s)} (mean of steps {account.first_step}-{account.last_step}): {parts}"
    ]
    if split.pace_ahead_s > _AHEAD * split.step_s:
        ahead = f"{100 * split.pace_ahead_s / split.step_s:.0f} % of a step above the median of the ranks"
        lines.append(f"rank {split.pace_rank} is the slowest: its own work takes {ahead}")
    lines += [f"{_stage_name(name)} is not separated: {why}" for name, why in account.not_separated.items()]
    return [Pair("step time", "\n".join(lines))]


def _stage_name(stage: str) -> str:
    return stage.replace("_", " ")
