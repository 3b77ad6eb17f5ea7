"""Where the time of a run's last steps went, for the summary."""

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

_STEPS = 512  # of the end of a run: as many as matter, and few enough to be read for each of many ranks
_LEAST = 0.005  # share of a step that is worth its words
_AHEAD = 0.05  # share of a step by which a rank must exceed the median to be named


def account_of(view: RunView) -> Account | None:
    """The account of the run's last generation; None if there is none. A file that cannot be used is a problem of `view`."""
    # numpy takes longer to import than everything else of a summary, and not every view needs it.
    from seatrial.record.frontier import account
    from seatrial.record.stages import read_generation

    found, problems = read_generation(view.folder, view.generation, most=_STEPS)
    view.problems += [problem for problem in problems if problem not in view.problems]
    return account(found)


def waterfall_of_run(view: RunView, account: Account | None) -> tuple[StepWaterfall | None, str]:
    """(the split in the planner's categories beside its prediction, the reason if there is none); None without a split."""
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
    """The pipeline stages of the ranks of `account`. Raises InputError where plan.json does not say."""
    from seatrial.record.run import read_plan

    try:
        pipeline = int(read_plan(view.folder)["layout"]["pipeline"])
        if account.ranks % pipeline:
            raise ValueError(f"a pipeline of {pipeline} for {account.ranks} ranks")
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise InputError(f"plan.json cannot be used: {error}") from error
    return pipeline


def prediction_of(view: RunView, ranks: int | None) -> tuple[Prediction | None, str]:
    """(what `seatrial plan` predicts for the run, without what this run measured; why it predicts nothing).

    `ranks`: that ran; None if that is not known.
    """
    try:
        return _prediction(view, ranks)
    except InputError as error:
        return None, f"job.toml cannot be used: {error.diagnostics[0].message}"


def _prediction(view: RunView, ranks: int | None) -> tuple[Prediction | None, str]:
    if view.device == "cpu":  # the planner takes a while to import
        return None, "ranks are CPU processes, for which speed is not predicted"
    from seatrial.job.loading import load_job
    from seatrial.plan.cost.calibration import shipped
    from seatrial.plan.model.place import place_of
    from seatrial.plan.model.recipe import Recipe
    from seatrial.plan.report.advice import Asker
    from seatrial.plan.report.measured import measured_rates

    job = load_job(view.folder.job_toml)
    if ranks not in (None, job.layout.world_size):
        return None, f"{ranks} ranks ran of the {job.layout.world_size} in the job"
    rates = measured_rates(view.folder.path, job, without=view.folder.path)
    place = rates.at(place_of(job))
    if place.cluster is None:
        return None, place.why_no_gpu
    found = Asker(job, place.cluster, "seatrial", rates.calibration(shipped())).ask(Recipe.of(job))
    return found, "" if found is not None else place.why_no_network or "it should not fit into memory"


def waterfall_pairs(waterfall: StepWaterfall | None, why: str) -> list[Pair]:
    """The measured waterfall in percent of a step, each part with the ratio of its seconds to those predicted."""
    if waterfall is None:
        return [Pair("waterfall", f"unknown: {why}")] if why else []
    told = []
    for row in waterfall.shown:
        if row.seconds is not None and row.seconds >= _LEAST * waterfall.step_s:
            ratio = "" if row.ratio is None else f" ({row.ratio:.2f} of plan)"
            told.append(f"{row.name} {100 * row.seconds / waterfall.step_s:.0f} %{ratio}")
    planned = waterfall.total.ratio
    told.append(f"no prediction: {why}" if planned is None else f"step {planned:.2f} of plan")
    return [Pair("waterfall", "\n".join((", ".join(told), *waterfall.notes())))]


def split_pairs(account: Account | None) -> list[Pair]:
    """The split of a step in percent, and the rank that sets the pace if one stands out."""
    if account is None:
        return []
    split = account.split
    shares = {name: seconds / split.step_s for name, seconds in account.seconds.items()}
    largest = sorted(shares, key=lambda name: -shares[name])
    told = ", ".join(
        f"{_words(name)} {100 * shares[name]:.0f} %" for name in largest if shares[name] >= _LEAST
    )
    lines = [
        f"{units.duration(split.step_s)} (mean of steps {account.first_step}-{account.last_step}): {told}"
    ]
    if split.pace_ahead_s > _AHEAD * split.step_s:
        ahead = f"{100 * split.pace_ahead_s / split.step_s:.0f} % of a step above the median of the ranks"
        lines.append(f"rank {split.pace_rank} sets the pace: its own work takes {ahead}")
    lines += [f"{_words(name)} is not separated: {why}" for name, why in account.not_separated.items()]
    return [Pair("step time", "\n".join(lines))]


def _words(stage: str) -> str:
    return stage.replace("_", " ")
