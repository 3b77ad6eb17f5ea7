"""The best layout that fails only for memory, and the single changes that would make it fit; each is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from seatrial.hardware.catalogue import gpus
from seatrial.hardware.networks import reference_node
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.overlap import can_overlap
from seatrial.plan.cost.predict import Prediction, stack_for
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Predictor, Suggestion, single_changes
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.scaling import resized
from seatrial.plan.search.search import MOST_OVER, TIE_MARGIN, Found
from seatrial.plan.search.step_lower_bound import StepLowerBound


@dataclass(frozen=True)
class BeyondMemory:
    """A layout that does not fit, and changes that make it fit.

    `gain`, also in `suggestions`: speedup over the best that fits. If none does, `gain` is None and those in `suggestions`
    are over this layout.
    """

    recipe: Recipe
    prediction: Prediction
    gain: float | None
    suggestions: tuple[Suggestion, ...]  # the fastest change of a setting, twice the nodes, another GPU

    @property
    def over(self) -> float:
        """Needed over available memory, minus 1."""
        return self.prediction.memory.reserved / self.prediction.available - 1


def beyond_memory(predictor: Predictor, found: Found) -> BeyondMemory | None:
    """The fastest of `found.outsized`, if it is faster than the best layout that fits by more than `TIE_MARGIN`.

    Of equally fast ones it is the one that needs the least memory. If none fits, it is `_nearest`.
    """
    if not found.choices:
        return _nearest(predictor, found)
    best = found.choices[0].prediction.step_s
    most = best / (1 + TIE_MARGIN)
    tried: list[tuple[Recipe, Prediction]] = []
    lower_bound = StepLowerBound(
        predictor.job.architecture, predictor.cluster, predictor.stack, predictor.calibration
    )
    ways = (r for recipe in found.outsized for r in _with_async_tensor(predictor, recipe))
    for least_s, recipe in sorted(((lower_bound(r), r) for r in ways), key=lambda way: way[0]):
        if least_s > most:
            break
        if recipe.async_tensor and refusal(predictor.job, predictor.cluster, recipe) is not None:
            continue
        p = predictor.predict(recipe)
        if p.memory.reserved <= MOST_OVER * p.available:
            tried.append((recipe, p))
            most = min(most, p.step_s * (1 + TIE_MARGIN))
    near = [(r, p) for r, p in tried if p.step_s < most]
    if not near:
        return None
    recipe, p = min(near, key=lambda n: (n[1].memory.reserved, n[0].async_tensor))
    return BeyondMemory(recipe, p, best / p.step_s - 1, tuple(_fitting(predictor, recipe, best)))


def _nearest(predictor: Predictor, found: Found) -> BeyondMemory | None:
    """The fastest of `found.outsized` that need the least memory, or at most `TIE_MARGIN` more; None if all need too much."""
    model, stack = predictor.job.architecture, predictor.stack
    needs = [(memory(model, r, stack_for(r, stack)).reserved, r) for r in found.outsized]
    most = min((n for n, _ in needs), default=0.0) * (1 + TIE_MARGIN)
    ways = [way for n, r in needs if n <= most for way in _with_async_tensor(predictor, r)]
    tried = [(r, predictor.predict(r)) for r in ways if refusal(predictor.job, predictor.cluster, r) is None]
    if not tried:
        return None
    recipe, p = min(tried, key=lambda t: t[1].step_s)
    return BeyondMemory(recipe, p, None, tuple(_fitting(predictor, recipe, p.step_s)))


def _with_async_tensor(predictor: Predictor, recipe: Recipe) -> Iterator[Recipe]:
    """The recipe without asynchronous tensor parallel, and with it if possible."""
    yield recipe
    if can_overlap(recipe, stack_for(recipe, predictor.stack)):
        yield replace(recipe, async_tensor=True)


def _fitting(predictor: Predictor, recipe: Recipe, best: float) -> Iterator[Suggestion]:
    """Changes that make it fit: the fastest change of one setting; twice the nodes; another GPU."""

    def suggestion(what: str, r: Recipe, p: Prediction, *, built: bool = True) -> Suggestion:
        return Suggestion(what, r, p, best / p.step_s - 1, built)

    changes = (c for kind in single_changes(recipe, stack_for(recipe, predictor.stack)) for c in kind)
    tried = [(what, r, p) for what, r in changes if (p := predictor.try_predict(r)) is not None]
    if tried:
        yield suggestion(*min(tried, key=lambda t: t[2].step_s))
    twice = replace(predictor.cluster, nodes=2 * predictor.cluster.nodes)
    more, _ = resized(recipe, twice.gpus, mode="strong")
    if more is not None and (p := predictor.try_predict(more, cluster=twice)) is not None:
        yield suggestion(f"{twice.nodes:,} nodes", more, p, built=False)
    here = reference_node(predictor.cluster.gpu.name)
    for gpu in sorted(gpus(), key=lambda g: g.hbm_gb):
        node = reference_node(gpu.name)
        # Only nodes of the same size: a layout for nodes of eight may not suit trays of four.
        if here is None or node is None or node.gpus_per_node != here.gpus_per_node:
            continue
        p = predictor.try_predict(recipe, cluster=replace(predictor.cluster, gpu=gpu))
        if gpu.hbm_gb > predictor.cluster.gpu.hbm_gb and p is not None:
            yield suggestion(f"{gpu.name} ({gpu.hbm_gb:g} GB)", recipe, p, built=False)
            return
