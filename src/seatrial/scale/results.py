"""The results of a measurement: sizes with predictions, gates, fits, costs. Unknown values are None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from seatrial.plan.cost.calibration import shipped
from seatrial.plan.measured.rates import measured_rates
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Predictor
from seatrial.plan.report.step_waterfall import StepWaterfall, step_waterfall
from seatrial.plan.search.scaling import Point, scaling
from seatrial.record.folder import RunFolder
from seatrial.scale import groups
from seatrial.scale.cause import Cause
from seatrial.scale.conduct import Measurement
from seatrial.scale.counters import tensor_active
from seatrial.scale.fit import Fit, Law, fit
from seatrial.scale.gain import gains
from seatrial.scale.judge import Gates, Judgement, judge_gates, judge_losses, judge_utilisation
from seatrial.scale.sizes import Size
from seatrial.scale.statistics import Estimate, estimate, ratio
from seatrial.scale.steps import Steps, causes, steps_of
from seatrial.scale.trial import Figures

_LAWS: tuple[Law, ...] = ("Amdahl", "universal scalability law")
_MOST_TRACED = 3  # ranks named by a cause
_FURTHER = 3  # doublings beyond the largest measured size


@dataclass(frozen=True)
class Measured:
    """One size. `tokens_per_s` is the total over all GPUs; None, with the reason in `problem`, without a valid run."""

    size: Size
    runs: int
    warm_up: int  # largest warm-up of a run, steps
    unsettled: int  # runs whose warm-up may not have ended
    tokens_per_s: Estimate | None
    mfu: float | None  # mean over runs
    tensor_active: Estimate | None  # share of the time with active tensor cores; None if unknown
    efficiency: Estimate | None  # tokens/s/GPU over the first size's; None for the first size
    doubling: Estimate | None  # over half the size
    predicted: Point | None
    why_not_predicted: str
    problem: str
    steps: Steps | None  # breakdown of the step time; None without usable records
    waterfall: StepWaterfall | None  # the same in the planner's categories, with its prediction
    causes: tuple[Cause, ...]  # causes of lost efficiency against half the size, else the first size

    @property
    def per_gpu(self) -> float | None:
        return None if self.tokens_per_s is None else self.tokens_per_s.mean / self.size.gpus

    @property
    def gpu_s_per_million(self) -> float | None:
        """GPU seconds per million tokens."""
        return None if self.per_gpu is None else 1e6 / self.per_gpu


@dataclass(frozen=True)
class Results:
    """Results of the whole measurement."""

    measurement: Measurement
    sizes: tuple[Measured, ...]
    gates: tuple[Judgement, ...]
    losses: tuple[Judgement, ...]
    fits: tuple[Fit, ...]
    # Sizes (in nodes) up to which every doubling passes; None without that gate.
    meets: tuple[int, ...] | None
    price: float | None  # per GPU hour, in any currency
    passed: frozenset[int]  # sizes (in nodes) whose doubling passes its gate

    @property
    def failed(self) -> bool:
        """Whether a gate, a loss check or a size failed."""
        wrong = any(j.verdict == "FAIL" for j in (*self.gates, *self.losses))
        return wrong or bool(self.measurement.failed)

    def cost(self, size: Measured) -> float | None:
        """Cost per million tokens at this size; None without a price or a speed."""
        seconds = size.gpu_s_per_million
        return None if self.price is None or seconds is None else seconds * self.price / 3600

    def to_trace(self) -> tuple[int, list[int]] | None:
        """(nodes, ranks) to trace: the ranks named by the first cause that has any, at the largest failing size, and one other."""
        for size in reversed(self.sizes):
            if size.size.nodes not in self.passed:
                for cause in size.causes:
                    if cause.ranks:
                        named = list(cause.ranks[:_MOST_TRACED])
                        peer = next((r for r in range(size.size.gpus) if r not in cause.ranks), None)
                        return size.size.nodes, sorted(named if peer is None else [*named, peer])
        return None

    def why_not_fitted(self) -> str:
        """The reason if there is no fit."""
        return "" if self.fits else "not fitted: needs three sizes with two runs each"


def results_of(measurement: Measurement, gates: Gates, *, price: float | None = None) -> Results:
    """Judge, predict and fit what has been measured so far."""
    known = {size.nodes: measurement.speed(size.nodes) for size in measurement.sizes}
    base = measurement.sizes[0].nodes
    points, predictor, why = _predicted(measurement)
    steps = {
        size.nodes: steps_of(measurement.state.folder, size, measurement.state.good(size.nodes))
        for size in measurement.sizes
    }
    sizes = tuple(
        _measured(measurement, size, steps, points.get(size.nodes), why) for size in measurement.sizes
    )
    sizes = tuple(replace(size, causes=_with_gains(size, predictor)) for size in sizes)
    doublings = {n: measurement.efficiency(n, b) for n, b in measurement.pairs() if 2 * b == n}

    def speedup(nodes: int, of: int) -> Estimate | None:
        above, below = known[nodes], known[of]
        return None if above is None or below is None else ratio(above, below)

    judged = judge_gates(gates, [(s.nodes, s.gpus) for s in measurement.sizes], doublings, speedup)
    losses = {
        n: [t.figures.losses for t in measurement.state.good(n) if t.figures is not None]
        for n, speed in known.items()
        if speed is not None
    }
    if gates.utilisation is not None:
        judged += judge_utilisation(gates.utilisation, {s.size.nodes: s.tensor_active for s in sizes})
    if measurement.options.groups:
        for size in measurement.sizes:
            judged += groups.judge(size.nodes, measurement.groups(size.nodes))
    batches = {size.nodes: size.job.train.global_batch for size in measurement.sizes}
    job = measurement.job
    compared = judge_losses(measurement.options.mode, job.train.precision, batches, losses)
    meets, passed = None, []
    if gates.doubling is not None:
        passed = [n for n, j in zip(doublings, judged, strict=False) if j.verdict == "PASS"]
        missed = [n for n in doublings if n not in passed]
        meets = tuple(n for n in passed if n < min(missed, default=n + 1))
    return Results(
        measurement,
        sizes,
        tuple(judged),
        tuple(compared),
        _fitted(sizes, base),
        meets,
        price,
        frozenset(passed),
    )


def _measured(
    measurement: Measurement,
    size: Size,
    steps: Mapping[int, Steps | None],
    point: Point | None,
    why: str,
) -> Measured:
    base = measurement.sizes[0].nodes
    trials = measurement.state.good(size.nodes)
    figures = [t.figures for t in trials if t.figures is not None]
    shares = [f.mfu for f in figures if f.mfu is not None]
    half = size.nodes // 2 if (size.nodes, size.nodes // 2) in measurement.pairs() else None
    mine, below = steps[size.nodes], steps[half or base]
    problem = measurement.failed.get(size.nodes, "" if figures else measurement.stopped or "not measured yet")
    return Measured(
        size=size,
        runs=len(figures),
        warm_up=max((f.warm_up for f in figures), default=0),
        unsettled=sum(not f.settled for f in figures),
        tokens_per_s=measurement.speed(size.nodes),
        tensor_active=_tensor_active(measurement, size),
        mfu=sum(shares) / len(shares) if figures and len(shares) == len(figures) else None,
        efficiency=None if size.nodes == base else measurement.efficiency(size.nodes, base),
        doubling=None if half is None or 2 * half != size.nodes else measurement.efficiency(size.nodes, half),
        predicted=point,
        why_not_predicted=(point.why_not or "") if point is not None else why,
        problem=problem,
        waterfall=None if mine is None else _waterfall(size, mine, figures, point),
        steps=mine,
        causes=() if mine is None or below is None else causes(below, mine, measurement.options.topology),
    )


def _with_gains(size: Measured, predictor: Predictor | None) -> tuple[Cause, ...]:
    """The causes of a size, each with the predicted gains of its suggested changes."""
    if size.steps is None:
        return ()
    at = (
        None
        if predictor is None
        else replace(predictor, cluster=replace(predictor.cluster, nodes=size.size.nodes))
    )
    job, seen, why = size.size.job, size.steps.observed, size.why_not_predicted
    return tuple(replace(cause, gains=gains(cause, job, seen, at, why)) for cause in size.causes)


def _waterfall(size: Size, steps: Steps, figures: Sequence[Figures], point: Point | None) -> StepWaterfall:
    # Every run of a size has the same model FLOPs in a step.
    mfu = figures[0].mfu
    return step_waterfall(
        steps.account,
        size.job.layout.pipeline,
        model_flops_s=None if mfu is None else mfu * figures[0].step_s,
        prediction=None if point is None or point.why_not is not None else point.prediction,
    )


def _tensor_active(measurement: Measurement, size: Size) -> Estimate | None:
    """Mean over the valid runs of this size; None unless known for all."""
    folders = [RunFolder(measurement.state.folder / t.folder) for t in measurement.state.good(size.nodes)]
    known = [tensor_active(folder, size.nodes, size.gpus) for folder in folders]
    # Estimates need positive values: zero becomes 1e-6.
    values = [max(value, 1e-6) for value in known if value is not None]
    return estimate(values) if values and len(values) == len(known) else None


def _predicted(measurement: Measurement) -> tuple[dict[int, Point], Predictor | None, str]:
    """(nodes -> prediction, the predictor for other layouts, why nothing is predicted)."""
    job = measurement.job
    rates = measured_rates(measurement.runs / job.name, job, without=measurement.state.folder)
    place = rates.at(hardware_of(job))
    if place.cluster is None:
        return {}, None, place.why_no_gpu
    calibration = rates.calibration(shipped())
    predicted = scaling(
        job,
        Recipe.of(job),
        place.cluster,
        mode=measurement.options.mode,
        nodes=[size.nodes for size in measurement.sizes],
        calibration=calibration,
    )
    predictor = Predictor(job, place.cluster, "seatrial", calibration)
    return {point.nodes: point for point in predicted.points}, predictor, ""


def _fitted(sizes: Sequence[Measured], base: int) -> tuple[Fit, ...]:
    """Both laws fitted to the measured sizes, which must include the first."""
    known = [(s.size.nodes / base, s.tokens_per_s) for s in sizes if s.tokens_per_s is not None]
    if not known or known[0][0] != 1:
        return ()
    largest = known[-1][0]
    at = [largest * 2**i for i in range(1, _FURTHER + 1)]
    found = (fit(law, [n for n, _ in known], [x for _, x in known], at) for law in _LAWS)
    return tuple(f for f in found if f is not None)
