"""Everything that `seatrial plan` says about a job, as data. What is not known is None, with the reason beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from seatrial.hardware.failures import RATES, Rate
from seatrial.job.job import Job
from seatrial.plan.advice import Advice, Target, Wanted, advice, targets
from seatrial.plan.calibration import Calibration
from seatrial.plan.caution import SHORTEST_SOURCE, too_short
from seatrial.plan.cluster import Cluster
from seatrial.plan.collectives import Fabric, UnknownNetworkError
from seatrial.plan.finish import HOST_SOURCE, Finish, finish
from seatrial.plan.kernels import UnknownSpeedError
from seatrial.plan.memory import Memory, memory
from seatrial.plan.model import Model
from seatrial.plan.overlap import SOURCE as OVERLAP_SOURCE
from seatrial.plan.place import Place
from seatrial.plan.predict import Prediction, capacity, predict, stack_for
from seatrial.plan.recipe import Recipe
from seatrial.plan.room import Verdict, judge
from seatrial.plan.scaling import Scaling, best_scaling, scaling
from seatrial.plan.search import Choice, Found, limit, own_recipe, search
from seatrial.plan.step import Traffic, traffic

# Of shared storage, where nobody measured it. It decides how long a checkpoint is under way, and little else: `slow` tells how much.
STORAGE_GB_S = 20.0
STORAGE_SOURCE = "assumption"
# A tenth of it: how much a wrong assumption matters.
_SLOW = 0.1
# Of the published rates that of a single large job.
FAILURES = next(r for r in RATES if r.name == "llama-3")
# "Enough" is the network with which a step takes this much longer than with one that has no limit.
ENOUGH = 0.05
_MOST_GPUS = 1024


@dataclass(frozen=True)
class Own:
    """The job's own layout. `prediction` and what follows from it is None where a speed is not known."""

    recipe: Recipe
    memory: Memory
    room: float | None  # bytes that a process can have on one GPU
    traffic: Traffic
    prediction: Prediction | None
    why_unknown: str
    limit: str

    @property
    def fits(self) -> bool | None:
        return None if self.room is None else self.memory.reserved <= self.room

    @property
    def verdict(self) -> Verdict | None:
        """How sure it is that it fits; None where a GPU's memory is not known."""
        return None if self.room is None else judge(self.memory.reserved, self.room)


@dataclass(frozen=True)
class Carried:
    """What the network between nodes has to carry and what it can; bytes, and bytes/s of one node in one direction."""

    nodes: int
    a_gpu: float  # sent to other nodes by a GPU of the busiest pipeline rank, a step
    mean: float | None  # of its node, over the whole step
    capacity: float | None
    enough: float | None  # with this a step is at most `ENOUGH` longer than with a network without limit


@dataclass(frozen=True)
class Ending:
    """To the end of the run, with the job's own checkpoint interval, and with the best one."""

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
        """Unknown without a price."""
        return None if self.price is None else self.price * self.finish.gpu_hours


@dataclass(frozen=True)
class Answer:
    """See `answer`."""

    job: Job
    place: Place
    model: Model
    stack: str
    own: Own
    found: Found | None
    carried: Carried
    ending: Ending | None
    weak: Scaling | None
    strong: Scaling | None
    best_scaled: Scaling | None  # the best layout on one node and on all of them
    advice: Advice | None
    targets: tuple[Target, ...]
    provenance: tuple[str, ...]

    @property
    def best(self) -> Choice | None:
        """The fastest layout that fits; None where none does, or none was looked for."""
        return self.found.choices[0] if self.found and self.found.choices else None


@dataclass(frozen=True)
class Wishes:
    """What a person may say beside the job. `storage_gb_s` is decimal GB/s of the whole storage; `price` of a GPU hour."""

    stack: str = "seatrial"
    storage_gb_s: float | None = None
    storage_source: str = "as given"
    price: float | None = None
    nodes: Sequence[int] = ()
    rate: Rate = FAILURES
    targets: Sequence[Wanted] = ()
    look_further: bool = True  # search other layouts; without, what is known of the job's own


def answer(
    job: Job,
    place: Place,
    wishes: Wishes | None = None,
    *,
    calibration: Calibration | None = None,
) -> Answer:
    """The job's own layout, the best ones, the end of the run, scaling, the network, and what would change any of it."""
    w = wishes or Wishes()
    model, cluster = Model.of(job.architecture), place.cluster
    mine = _own(job, place, model, w, calibration)
    found, more = None, None
    if cluster is not None and w.look_further:
        try:
            found = search(job, cluster, calibration=calibration, stack=w.stack)
        except (UnknownNetworkError, UnknownSpeedError):
            found = None  # `mine.why_unknown` says what is not known
    prediction = mine.prediction
    told: tuple[Target, ...] = ()
    weak = strong = best = ending = None
    if cluster is not None and prediction is not None:
        sizes = w.nodes or usual_nodes(cluster)
        weak = scaling(
            job, mine.recipe, cluster, mode="weak", nodes=sizes, calibration=calibration, stack=w.stack
        )
        strong = scaling(
            job, mine.recipe, cluster, mode="strong", nodes=sizes, calibration=calibration, stack=w.stack
        )
        if found is not None and cluster.nodes > 1:
            known = {cluster.nodes: found}
            best = best_scaling(
                job, cluster, nodes=(1, *known), known=known, calibration=calibration, stack=w.stack
            )
        ending = _ending(job, model, mine.recipe, cluster, prediction, w)
        told = targets(job, model, mine.recipe, cluster, found, w.targets, w.stack, calibration)
        if w.look_further:
            more = advice(job, model, mine.recipe, cluster, found, w.stack, calibration)
    return Answer(
        job=job,
        place=place,
        model=model,
        stack=stack_for(mine.recipe, w.stack).name,
        own=mine,
        found=found,
        carried=_carried(model, mine, place, w, calibration),
        ending=ending,
        weak=weak,
        strong=strong,
        best_scaled=best,
        advice=more,
        targets=told,
        provenance=_provenance(model, mine, found, ending, place),
    )


def usual_nodes(cluster: Cluster) -> tuple[int, ...]:
    """1, 2, 4, ... up to 1,024 GPUs, and the cluster's own number."""
    most = max(cluster.nodes, _MOST_GPUS // cluster.gpus_per_node)
    powers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return tuple(sorted({*powers, cluster.nodes}))


def _own(job: Job, place: Place, model: Model, w: Wishes, calibration: Calibration | None) -> Own:
    recipe, cluster = own_recipe(job, w.stack), place.cluster
    behaviour = stack_for(recipe, w.stack)
    held = memory(model, recipe, behaviour)
    prediction, why = None, place.why_no_gpu
    room = None if cluster is None else capacity(cluster)
    if cluster is not None:
        try:
            prediction = predict(model, recipe, cluster, stack=w.stack, calibration=calibration)
        except UnknownNetworkError:
            why = f"the network between the nodes is not known: {place.why_no_network}"
        except UnknownSpeedError as error:
            why = str(error)
    if prediction is not None and room is not None:
        limited = limit(prediction, room)
    else:
        limited = "memory: it does not fit" if room is not None and held.reserved > room else "unknown"
    sent = traffic(model, recipe, Fabric(place.shape), behaviour)
    return Own(recipe, held, room, sent, prediction, why, limited)


def _carried(model: Model, mine: Own, place: Place, w: Wishes, calibration: Calibration | None) -> Carried:
    network, step = place.network, mine.prediction
    each = mine.traffic.between_nodes
    able = None if network is None else network.gb_s_per_gpu * place.gpus_per_node * 1e9
    mean = None if step is None else each * place.gpus_per_node / step.step_s
    enough = None
    if place.nodes > 1 and step is not None and place.cluster is not None and network is not None:
        enough = _enough(model, mine.recipe, place.cluster, w, calibration)
    return Carried(place.nodes, each, mean, able, enough)


def _enough(
    model: Model, recipe: Recipe, cluster: Cluster, w: Wishes, calibration: Calibration | None
) -> float | None:
    """By halving: steps get no longer with a faster network. None where even a millionth of its rate does."""
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


def _ending(
    job: Job, model: Model, recipe: Recipe, cluster: Cluster, prediction: Prediction, w: Wishes
) -> Ending | None:
    """None where saving or failing leaves no time for training at all."""
    rate = w.storage_gb_s or STORAGE_GB_S
    every = job.checkpoint.every_steps
    steps = job.train.steps

    def ended(gb_s: float, at: int | None) -> Finish:
        return finish(
            prediction,
            model,
            recipe,
            cluster,
            steps,
            rate=w.rate,
            storage_gb_s=gb_s,
            max_unsaved_s=job.checkpoint.max_unsaved_s,
            every_steps=at,
        )

    try:
        best = ended(rate, None)
        # A run that ends before its first save saves at the end.
        own = min(best.interval.steps if every == "auto" else every, steps)
        whole, slow = ended(rate, own), ended(rate * _SLOW, None if every == "auto" else own)
    except (OverflowError, ZeroDivisionError):
        return None
    source = STORAGE_SOURCE if w.storage_gb_s is None else w.storage_source
    return Ending(whole, own, best, slow, rate, source, w.rate, w.price)


def _provenance(
    model: Model, mine: Own, found: Found | None, ending: Ending | None, place: Place
) -> tuple[str, ...]:
    told = place.told
    if mine.prediction is not None:
        told += mine.prediction.provenance
        chosen = () if found is None else tuple(c.recipe for c in found.choices)
        if any(r.async_tensor for r in (mine.recipe, *chosen)):
            told += (OVERLAP_SOURCE,)
        if short := too_short(model, mine.recipe, mine.prediction):
            told += (f"{short}; {SHORTEST_SOURCE}",)
    if ending is not None:
        told += (
            f"failures: {ending.rate.per_node_day:g} a node and day, {ending.rate.label}: {ending.rate.source}",
            f"storage: {ending.storage_gb_s:g} GB/s, {ending.storage_source}; GPU memory to host: {HOST_SOURCE}",
        )
    return told
