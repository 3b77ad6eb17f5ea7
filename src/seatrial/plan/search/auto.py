"""`parallel = "auto"`: the layout that the planner chooses for an open job, with reasons and runners-up for plan.json.

If the speeds of GPU and network are known, it is the layout with the shortest predicted step. If not (CPU ranks, a GPU
outside the catalogue, fp32), it is, of the layouts with the smallest pipeline bubble, the one with the least product of
bytes held and bytes sent: twice the memory must save half of the communication. The product needs no conversion factor
between the two, which is unknown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from seatrial.base import units
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.schedules import Times, schedule_named
from seatrial.job.schema import ParallelSection
from seatrial.job.settled import CHOSEN_TOO, fixed, provisional, settled
from seatrial.plan.cost.accumulate import adapted, chosen
from seatrial.plan.cost.calibration import Calibration
from seatrial.plan.cost.collectives import Fabric, UnknownNetworkError
from seatrial.plan.cost.kernels import UnknownSpeedError
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import MemoryFit, judge
from seatrial.plan.cost.predict import capacity, stack_for
from seatrial.plan.cost.step import traffic
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import Hardware
from seatrial.plan.model.recipe import Recipe, Recompute
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import MICROBATCHES, RECOMPUTES, TIE_MARGIN, Choice, legal, pair, search

RUNNERS_UP = 4
Basis = Literal["speed", "memory and traffic"]


@dataclass(frozen=True)
class Candidate:
    """One possible layout. Bytes are of the GPU that has most of them; `sent_bytes` is per step."""

    recipe: Recipe
    held_bytes: float
    sent_bytes: float
    idle: float | None = None  # bubble: share of the ranks' time, by the schedule alone
    choice: Choice | None = None  # the prediction, if speeds are known
    verdict: MemoryFit | None = None  # whether it fits, if a GPU's memory is known

    def document(self, best: Candidate) -> dict[str, Any]:
        """For plan.json; `slower` is relative to the chosen one, `best`."""
        r = self.recipe
        values: dict[str, Any] = {
            "layout": r.job_layout.as_dict(),
            "reshard_after_forward": r.reshard,
            "async_tensor": r.async_tensor,
            "ring_attention": r.parallel["ring_attention"],
            **r.train,
            "memory_bytes": round(self.held_bytes),
            "sent_bytes": round(self.sent_bytes),
            "memory_verdict": None if self.verdict is None else self.verdict.document(),
        }
        if self.choice is not None and best.choice is not None:
            p = self.choice.prediction
            values |= {
                "step_s": p.step_s,
                "step_low_s": p.low_s,
                "step_high_s": p.high_s,
                "tokens_per_s_per_gpu": p.tokens_per_s_per_gpu,
                "mfu": p.mfu,
                "slower": p.step_s / best.choice.prediction.step_s - 1,
                "limit": self.choice.limit,
            }
        else:
            values["idle"] = self.idle
        return values


@dataclass(frozen=True)
class Chosen:
    """Result of `choose`; `candidates` best first, one per tensor and pipeline size (without speeds, and replicate)."""

    candidates: tuple[Candidate, ...]
    basis: Basis
    reasons: tuple[str, ...]
    tried: int  # legal combinations
    too_large: int  # of them, those that do not fit
    place: Hardware

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def runners_up(self) -> tuple[Candidate, ...]:
        return self.candidates[1 : 1 + RUNNERS_UP]

    @property
    def parallel(self) -> ParallelSection:
        """The whole [parallel] section."""
        return ParallelSection(**self.best.recipe.parallel)

    @property
    def train(self) -> Mapping[str, Any]:
        """Keys of [train] that were chosen with the layout or set by the job."""
        return self.best.recipe.train

    def document(self) -> dict[str, Any]:
        """The value of `chosen` in plan.json."""
        return {
            "basis": self.basis,
            "cluster": fingerprint(self.place),
            **self.best.document(self.best),
            "reasons": list(self.reasons),
            "tried": self.tried,
            "too_large": self.too_large,
            "runners_up": [c.document(self.best) for c in self.runners_up],
        }

    def settle(self, job: Job) -> Job:
        """`job` with this layout."""
        return settled(job, self.parallel, self.train, self.document())


def fingerprint(place: Hardware) -> dict[str, Any]:
    """The cluster properties that a choice depends on and that may differ at another start."""
    return {
        "nodes": place.nodes,
        "gpus_per_node": place.gpus_per_node,
        "gpu": None if place.gpu is None else place.gpu.name,
        "network": None if place.network is None or not place.shape.several_domains else place.network.name,
    }


def choose(job: Job, place: Hardware, *, calibration: Calibration | None = None) -> Chosen:
    """The best layout of an open `job` at `place`. Microbatch and recomputation stay as the job sets them.

    Raises InputError, located at `parallel`, if the rules allow no layout or none fits into the GPU's memory.
    """
    job, why = provisional(job), place.why_no_gpu
    if place.cluster is not None:
        try:
            return _fastest(job, place, place.cluster, calibration)
        except UnknownNetworkError:
            why = place.why_no_network or "the network between the nodes is unknown"
        except UnknownSpeedError as error:
            why = str(error)
    return _leanest(job, place, why)


def _written(job: Job) -> list[str]:
    """A reason that lists the keys of [train] that the job sets."""
    kept = [f"{k} = {getattr(job.train, k)}" for k in CHOSEN_TOO if fixed(job, k)]
    return [f"set in [train], so not chosen: {', '.join(kept)}"] if kept else []


def _accumulates(job: Job, best: Recipe, available: float | None) -> list[str]:
    """The reason for the chosen layout's gradient accumulation, if that was open."""
    if job.train.accumulate != "auto" or best.microbatches == 1:
        return []
    how, why = chosen(job.architecture, best, available)
    return [f"gradients accumulate {how}: {why}"] if how == best.accumulate else []


def _free(job: Job) -> tuple[tuple[int, ...], tuple[tuple[Recompute, int], ...]]:
    """(microbatches, kinds of recomputation) that may be chosen."""
    train = job.train
    micro = (train.microbatch,) if job.wrote("train.microbatch") else MICROBATCHES
    if not job.wrote("train.activation_checkpointing"):
        return micro, RECOMPUTES
    return micro, ((train.activation_checkpointing, train.recompute_every_layers),)


def _fastest(job: Job, place: Hardware, cluster: Cluster, calibration: Calibration | None) -> Chosen:
    micro, recomputes = _free(job)
    found = search(
        job, cluster, calibration=calibration, own=False, microbatches=micro, recomputes=recomputes
    )
    if not found.tried:
        raise _no_layout(job, cluster)
    if not found.choices:
        raise _no_room(job, cluster, found.tried, found.least_bytes)
    ranked, why = _safest(found.choices, found.sure)
    candidates = tuple(
        Candidate(
            c.recipe,
            c.prediction.memory.reserved,
            c.prediction.traffic.sent,
            choice=c,
            verdict=c.prediction.verdict,
        )
        for c in ranked
    )
    best, p = ranked[0], ranked[0].prediction
    reasons = [
        f"of {found.tried:,} layouts that the rules allow, {found.too_large:,} do not fit; {why}: "
        f"{p.step_s:.3g} s ({p.low_s:.3g} to {p.high_s:.3g}), {p.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
    ]
    if len(ranked) > 1:
        second = ranked[1]
        more = second.prediction.step_s / p.step_s - 1
        close = (
            f"; {TIE_MARGIN:.0%} is what releases of one stack differ by" if abs(more) < TIE_MARGIN else ""
        )
        reasons.append(
            f"next is {second.recipe.job_layout} with {more:+.1%}{close}; that one is limited by {second.limit}"
        )
    reasons += [
        f"it is limited by {best.limit}",
        f"it needs {units.memory(p.memory.reserved)} of the {units.memory(p.available)} of a GPU{_doubt(best, found.sure)}",
        f"its pace is {p.pace.kind}: {p.pace.source}",
        *_accumulates(job, best.recipe, p.available),
        *_written(job),
        *place.provenance,
    ]
    return Chosen(candidates, "speed", tuple(reasons), found.tried, found.too_large, place)


def _safest(choices: Sequence[Choice], sure: Sequence[Choice]) -> tuple[list[Choice], str]:
    """The chosen layout, then the others by speed; and why it was chosen.

    The fastest, unless it is tight and an equally fast one fits with margin. `sure` are those that do, by speed; one per
    pair of sizes.
    """
    fastest = choices[0]
    if not fastest.prediction.verdict.sure and sure:
        safe = sure[0]
        less = 1 - fastest.prediction.step_s / safe.prediction.step_s
        if safe.prediction.step_s < (1 + TIE_MARGIN) * fastest.prediction.step_s:
            here, there = ({**c.recipe.parallel, **c.recipe.train} for c in (safe, fastest))
            changed = ", ".join(f"{key} {str(there[key]).lower()}" for key in here if here[key] != there[key])
            why = (
                f"with {changed} a step would be {less:.1%} shorter (releases of one stack differ by {TIE_MARGIN:.0%}), but it {fastest.prediction.verdict.why}; "
                "this one fits with margin"
            )
            others = (c for c in choices if pair(c.recipe) != pair(safe.recipe))
            return [safe, *others], why
    return list(choices), "this one has the shortest predicted step"


def _doubt(best: Choice, sure: Sequence[Choice]) -> str:
    """Text about a tight choice: how often such predictions were exceeded, and the fastest layout that fits with margin."""
    p = best.prediction
    if p.verdict.sure:
        return ""
    if not sure:
        return f": tight, {p.verdict.why}; no layout fits with margin"
    more = sure[0].prediction.step_s / p.step_s - 1
    return (
        f": tight, {p.verdict.why}; the fastest that fits with margin is {sure[0].recipe.job_layout} with microbatch {sure[0].recipe.microbatch}, "
        f"{more:+.1%}"
    )


def _leanest(job: Job, place: Hardware, why: str) -> Chosen:
    """Choose by memory and traffic, see the module docstring."""
    layers, cluster = job.architecture.num_hidden_layers, place.shape
    available = None if place.cluster is None else capacity(place.cluster)
    found = list(_weighed(job, cluster, available))
    if not found:
        raise _no_layout(job, cluster)
    fitting = [c for c in found if available is None or c.held_bytes <= available]
    if not fitting:
        assert available is not None
        raise _no_room(job, cluster, len(found), min(c.held_bytes for c in found))
    too_large = len(found) - len(fitting)
    # Without speeds there is no reason to choose a layout that may run out of memory.
    if roomy := [c for c in fitting if c.verdict is not None and c.verdict.sure]:
        fitting = roomy
    if straight := [c for c in fitting if c.recipe.layout.pipeline == 1]:
        fitting = straight  # no pipeline, no bubble
    fitting.sort(key=lambda c: (_idle(c.recipe, layers), c.held_bytes * c.sent_bytes, c.held_bytes))
    kept: dict[tuple[int, int, int], Candidate] = {}
    for c in fitting:
        idle = _idle(c.recipe, layers)
        kept.setdefault((*pair(c.recipe), c.recipe.layout.replicate), replace(c, idle=idle))
    best = next(iter(kept.values()))
    reasons = [
        f"no speed is known: {why}",
        f"of {len(found):,} layouts that the rules allow it has the smallest pipeline bubble ({best.idle:.0%} of the ranks' time), and of those "
        f"the least product of bytes held and bytes sent: {units.memory(best.held_bytes)} on the rank that holds most, "
        f"{units.memory(best.sent_bytes)} a step from the rank that sends most",
    ]
    if available is None:
        reasons.append("the memory limit of a rank is unknown")
    elif best.verdict is not None and best.verdict.why:
        reasons.append(f"it is tight, {best.verdict.why}; no layout fits with margin")
    reasons += _accumulates(job, best.recipe, available)
    reasons += _written(job)
    return Chosen(tuple(kept.values()), "memory and traffic", tuple(reasons), len(found), too_large, place)


def _weighed(job: Job, cluster: Cluster, available: float | None) -> Iterator[Candidate]:
    """Candidates without speeds: with the job's microbatch, and recomputation only if nothing else fits with margin."""
    _, recomputes = _free(job)
    for recompute in recomputes:
        any_fits = False
        for layout in legal(job, cluster, Counter(), (job.train.microbatch,), (recompute,)):
            recipe = adapted(job, layout, available)
            stack = stack_for(recipe)
            held = memory(job.architecture, recipe, stack)
            needs = held.allocated if available is None else held.reserved
            verdict = None if available is None else judge(needs, available)
            any_fits |= verdict is None or verdict.sure
            yield Candidate(
                recipe,
                needs,
                traffic(job.architecture, recipe, Fabric.of(cluster, recipe), stack).sent,
                verdict=verdict,
            )
        if any_fits:
            return


def _idle(recipe: Recipe, layers: int) -> float:
    """Bubble of the schedule as a share of the ranks' time, counting layers only, backward as two forward passes."""
    at = recipe.layout
    return _idle_share(
        at.schedule, at.pipeline, at.stages_per_rank, recipe.microbatches, at.layer_counts(layers)
    )


@cache
def _idle_share(
    schedule: str, ranks: int, per_rank: int, microbatches: int, counts: tuple[int, ...]
) -> float:
    if ranks == 1:
        return 0.0
    times = [Times(float(n), 2.0 * n) for n in counts]
    whole = schedule_named(schedule).span(ranks, per_rank, microbatches, times)
    return 1 - 3.0 * sum(counts) * microbatches / ranks / whole


def _no_layout(job: Job, cluster: Cluster) -> Exception:
    shard = replace(Recipe.of(job), layout=Layout(shard=cluster.gpus), reshard=True, async_tensor=False)
    why = refusal(job, cluster, shard)
    text = "" if why is None else f"; with shard {cluster.gpus} alone: {why.message}"
    hint = "change the batch or the number of nodes" if why is None else why.hint
    return job.refusal(
        "parallel", f'parallel = "auto": no layout is legal for these {cluster.gpus} ranks{text}', hint
    )


def _no_room(job: Job, cluster: Cluster, tried: int, least: float) -> Exception:
    written = [k for k in CHOSEN_TOO if fixed(job, k)]
    hint = "`seatrial plan JOB --fit` lists the smallest clusters that do"
    if written:
        hint += f"; or leave {' and '.join(written)} out of [train], so that the planner chooses them too"
    return job.refusal(
        "parallel",
        f'parallel = "auto": none of {tried:,} layouts fits: the smallest needs {units.memory(least)} on a '
        f"{cluster.gpu.name}, which has {units.memory(capacity(cluster))}",
        hint,
    )
