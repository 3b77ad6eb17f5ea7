"""Everything that `seatrial plan` reports about a job, as data. Unknown values are None, with a reason next to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from seatrial.hardware.failures import RATES, Rate
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.plan.cost.accumulate import chosen
from seatrial.plan.cost.calibration import Calibration
from seatrial.plan.cost.collectives import Fabric, UnknownNetworkError
from seatrial.plan.cost.finish import Finish, finish
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.memory import Memory, memory
from seatrial.plan.cost.memory_fit import MemoryFit, judge
from seatrial.plan.cost.overlap import SOURCE as OVERLAP_SOURCE
from seatrial.plan.cost.predict import Prediction, Share, capacity, predict, stack_for
from seatrial.plan.cost.step import Traffic, traffic
from seatrial.plan.cost.work import RING_SOURCE
from seatrial.plan.model.cluster import HOST_SOURCE, Cluster
from seatrial.plan.model.hardware import Hardware
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Advice, Predictor, Target, TargetValue, advice, targets
from seatrial.plan.report.beyond_memory import BeyondMemory, beyond_memory
from seatrial.plan.search.caution import SHORTEST_SOURCE, too_short
from seatrial.plan.search.scaling import MODES, Scaling, best_scaling, scaling
from seatrial.plan.search.search import Choice, Found, limit, own_recipe, search

# Rate of shared storage if not measured. It determines the time of a checkpoint write, and little else: see `slow`.
STORAGE_GB_S = 20.0
DETERMINISTIC_SOURCE = "train.deterministic: its cost is in the prediction only if a run with it was measured; attention runs without cuDNN"
STORAGE_SOURCE = "assumption"
# A tenth of that rate shows the sensitivity to this assumption.
_SLOW = 0.1
# The published failure rate of a single large job.
FAILURES = next(r for r in RATES if r.name == "llama-3")
# A network is fast enough if a step is at most this much longer than with an unlimited one.
ENOUGH = 0.05
_MOST_GPUS = 1024


@dataclass(frozen=True)
class JobEstimate:
    """The job's own layout. `prediction` and fields derived from it are None if a speed is unknown."""

    recipe: Recipe
    memory: Memory
    available: float | None  # bytes available to a process on one GPU
    traffic: Traffic
    prediction: Prediction | None
    why_unknown: str
    limit: str
    why_accumulate: str = ""  # why gradients accumulate as they do, if the planner chose it

    @property
    def fits(self) -> bool | None:
        return None if self.available is None else self.memory.reserved <= self.available

    @property
    def verdict(self) -> MemoryFit | None:
        """Whether it fits, and with margin; None if a GPU's memory is unknown."""
        return None if self.available is None else judge(self.memory.reserved, self.available)


@dataclass(frozen=True)
class NetworkDemand:
    """Load and capacity of the network between nodes; bytes, and bytes/s of one node in one direction."""

    nodes: int
    a_gpu: float  # bytes a step that a GPU of the busiest pipeline rank sends out of its NVLink domain
    a_card: float | None  # the same over one NIC; None if the network is unknown
    mean: float | None  # rate of its node, averaged over the step
    capacity: float | None
    enough: float | None  # with this rate a step is at most `ENOUGH` longer than with an unlimited network


@dataclass(frozen=True)
class RunForecast:
    """Forecast of the whole run, with the job's own checkpoint interval, and with the best one."""

    finish: Finish
    every_steps: int
    best: Finish
    slow: Finish  # as `finish`, with a tenth of the storage's rate
    storage_gb_s: float
    storage_source: str
    rate: Rate
    price: float | None  # of a GPU hour, in whatever currency it was given

    @property
    def cost(self) -> float | None:
        """Cost of the run; None without a price."""
        return None if self.price is None else self.price * self.finish.gpu_hours


@dataclass(frozen=True)
class Answer:
    """The result of `answer`."""

    job: Job
    place: Hardware
    stack: str
    own: JobEstimate
    found: Found | None
    network_demand: NetworkDemand
    forecast: RunForecast | None
    weak: Scaling | None
    strong: Scaling | None
    best_scaled: Scaling | None  # the best layout on one node and on all of them
    advice: Advice | None
    targets: tuple[Target, ...]
    provenance: tuple[str, ...]
    beyond: BeyondMemory | None = None  # the best layout that fails only for memory

    @property
    def best(self) -> Choice | None:
        """The fastest layout that fits; None if none does, or none was searched."""
        return self.found.choices[0] if self.found and self.found.choices else None

    @property
    def waterfall(self) -> tuple[Share, ...] | None:
        """The waterfall of the whole run, else of a step; None if a speed is unknown."""
        if self.forecast is not None:
            return self.forecast.finish.waterfall
        return None if self.own.prediction is None else self.own.prediction.waterfall


@dataclass(frozen=True)
class PlanOptions:
    """User options besides the job. `storage_gb_s` is decimal GB/s of the whole storage; `price` of a GPU hour."""

    stack: str = "seatrial"
    storage_gb_s: float | None = None
    storage_source: str = "as given"
    price: float | None = None
    nodes: Sequence[int] = ()
    rate: Rate = FAILURES
    targets: Sequence[TargetValue] = ()
    look_further: bool = True  # search other layouts too; otherwise only the job's own is reported


def answer(
    job: Job,
    place: Hardware,
    wishes: PlanOptions | None = None,
    *,
    calibration: Calibration | None = None,
) -> Answer:
    """The job's own layout, the best ones, the whole run, scaling, network demand, suggestions and targets."""
    w = wishes or PlanOptions()
    cluster = place.cluster
    mine = _own(job, place, w, calibration)
    found, more = None, None
    if cluster is not None and w.look_further:
        try:
            found = search(job, cluster, calibration=calibration, stack=w.stack)
        except (UnknownNetworkError, UnknownSpeedError):
            found = None  # `mine.why_unknown` says what is not known
    prediction = mine.prediction
    entries: tuple[Target, ...] = ()
    curves: list[Scaling] = []
    best = forecast = beyond = None
    if cluster is not None and prediction is not None:
        sizes = w.nodes or usual_nodes(cluster)
        for mode in MODES:
            at = (job.without_ramp(), mine.recipe, cluster)  # other sizes might not divide its batches
            curves.append(scaling(*at, mode=mode, nodes=sizes, calibration=calibration, stack=w.stack))
        if found is not None:
            beyond = beyond_memory(Predictor(job, cluster, w.stack, calibration), found)
        if found is not None and cluster.nodes > 1:
            known = {cluster.nodes: found}
            best = best_scaling(
                job.without_ramp(),
                cluster,
                nodes=(1, *known),
                known=known,
                calibration=calibration,
                stack=w.stack,
            )
        forecast = _forecast(job, mine.recipe, cluster, prediction, w, calibration)
        if w.look_further or w.targets:
            more = advice(job, mine.recipe, prediction, cluster, found, w.stack, calibration)
            end = None if forecast is None else forecast.finish
            entries = tuple(targets(prediction, more.suggestions, w.targets, end))
    return Answer(
        job=job,
        place=place,
        stack=stack_for(mine.recipe, w.stack).name,
        own=mine,
        found=found,
        network_demand=_network_demand(job.architecture, mine, place, w, calibration),
        forecast=forecast,
        weak=curves[0] if curves else None,
        strong=curves[1] if curves else None,
        best_scaled=best,
        advice=more if w.look_further else None,
        targets=entries,
        provenance=_provenance(job, mine, found, forecast, place),
        beyond=beyond,
    )


def usual_nodes(cluster: Cluster) -> tuple[int, ...]:
    """The cluster's number of nodes, halved while even, and doubled up to 1,024 GPUs."""
    nodes = cluster.nodes
    most, least = max(nodes, _MOST_GPUS // cluster.gpus_per_node), nodes // (nodes & -nodes)
    return tuple(least * 2**i for i in range((most // least).bit_length()))


def _own(job: Job, place: Hardware, w: PlanOptions, calibration: Calibration | None) -> JobEstimate:
    model, cluster = job.architecture, place.cluster
    available = None if cluster is None else capacity(cluster)
    recipe = own_recipe(job, available, w.stack)
    why_accumulate = ""
    if job.train.accumulate == "auto" and recipe.microbatches > 1:
        why_accumulate = chosen(model, recipe, available, w.stack)[1]
    behaviour = stack_for(recipe, w.stack)
    held = memory(model, recipe, behaviour)
    prediction, why = None, place.why_no_gpu
    if cluster is not None:
        try:
            prediction = predict(model, recipe, cluster, stack=w.stack, calibration=calibration)
        except UnknownNetworkError:
            why = f"the network between the nodes is unknown: {place.why_no_network}"
        except UnknownSpeedError as error:
            why = str(error)
    if prediction is not None and available is not None:
        limited = limit(prediction, available)
    else:
        limited = (
            "memory: it does not fit" if available is not None and held.reserved > available else "unknown"
        )
    sent = traffic(model, recipe, Fabric.of(place.shape, recipe), behaviour)
    return JobEstimate(recipe, held, available, sent, prediction, why, limited, why_accumulate)


def _network_demand(
    model: Architecture, mine: JobEstimate, place: Hardware, w: PlanOptions, calibration: Calibration | None
) -> NetworkDemand:
    network, step = place.network, mine.prediction
    each = mine.traffic.leaving.sent
    able = None if network is None else network.gb_s_per_gpu * place.gpus_per_node * 1e9
    mean = None if step is None else each * place.gpus_per_node / step.step_s
    enough = None
    if place.shape.several_domains and step is not None and place.cluster is not None and network is not None:
        enough = _enough(model, mine.recipe, place.cluster, w, calibration)
    card = None if network is None else each * network.gpus_per_node / network.nics_per_node
    return NetworkDemand(place.nodes, each, card, mean, able, enough)


def _enough(
    model: Architecture, recipe: Recipe, cluster: Cluster, w: PlanOptions, calibration: Calibration | None
) -> float | None:
    """The rate, by bisection (steps get no longer with a faster network); None if a millionth of the rate is enough."""
    assert cluster.network is not None
    network, each = cluster.network, cluster.network.gb_s_per_gpu * cluster.gpus_per_node * 1e9

    def step(factor: float) -> float:
        at = replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor))
        return predict(model, recipe, at, stack=w.stack, calibration=calibration).step_s

    most = step(1e6) * (1 + ENOUGH)
    low, high = 1e-6, 1e6
    if step(low) <= most:
        return None
    for _ in range(30):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if step(middle) > most else (low, middle)
    return high * each


def _forecast(
    job: Job,
    recipe: Recipe,
    cluster: Cluster,
    prediction: Prediction,
    w: PlanOptions,
    calibration: Calibration | None,
) -> RunForecast | None:
    """Forecast the run; None if saves or failures leave no time for training."""
    rate = w.storage_gb_s or STORAGE_GB_S
    every = job.checkpoint.every_steps
    steps = job.train.steps
    *growing, (last_steps, _) = job.train.batches.within(steps)
    ramp = [
        (
            n,
            predict(
                job.architecture,
                replace(recipe, global_batch=size),
                cluster,
                stack=w.stack,
                calibration=calibration,
            ),
        )
        for n, size in growing
    ]

    def ended(gb_s: float, at: int | None) -> Finish:
        return finish(
            prediction,
            job.architecture,
            recipe,
            cluster,
            last_steps,
            rate=w.rate,
            storage_gb_s=gb_s,
            max_unsaved_s=job.checkpoint.max_unsaved_s,
            every_steps=at,
            ramp=ramp,
        )

    try:
        best = ended(rate, None)
        # A run that ends before its first save saves at the end.
        own = min(best.interval.steps if every == "auto" else every, steps)
        whole, slow = ended(rate, own), ended(rate * _SLOW, None if every == "auto" else own)
    except (OverflowError, ZeroDivisionError):
        return None
    source = STORAGE_SOURCE if w.storage_gb_s is None else w.storage_source
    return RunForecast(whole, own, best, slow, rate, source, w.rate, w.price)


def _provenance(
    job: Job, mine: JobEstimate, found: Found | None, forecast: RunForecast | None, place: Hardware
) -> tuple[str, ...]:
    sources = place.provenance
    if mine.prediction is not None:
        sources += mine.prediction.provenance
        chosen = () if found is None else tuple(c.recipe for c in found.choices)
        if any(r.async_tensor for r in (mine.recipe, *chosen)):
            sources += (OVERLAP_SOURCE,)
        if any(r.rings for r in (mine.recipe, *chosen)):
            sources += (RING_SOURCE,)
        if job.train.deterministic:
            sources += (DETERMINISTIC_SOURCE,)
        if short := too_short(job.architecture, mine.recipe, mine.prediction):
            sources += (f"{short}; {SHORTEST_SOURCE}",)
    if forecast is not None:
        sources += (
            f"failures: {forecast.rate.per_node_day:g} a node and day, {forecast.rate.label}: {forecast.rate.source}",
            f"storage: {forecast.storage_gb_s:g} GB/s, {forecast.storage_source}; GPU memory to host: {HOST_SOURCE}",
        )
    return sources
