"""Lower bound of a layout's step time: from the work of one microbatch, which most layouts of a search share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.plan.cost.calibration import Calibration, shipped
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.cost.step import data_once, exposed_send, gathered_layer, slowest
from seatrial.plan.cost.work import Work, work
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe


@dataclass(frozen=True)
class _Passes:
    """Seconds of one microbatch, of `work`: forward and backward of a layer; both passes of the head, of the embedding."""

    work: Work
    forward: float
    backward: float
    head: float
    embedding: float


@dataclass(frozen=True)
class StepLowerBound:
    """Lower bounds of the step times of one model's layouts on all of `cluster`, with one of the built-in schedules.

    A step takes the slowest rank's passes, and filling and draining the pipeline. Left out is the optimizer, whose time
    is far above rounding: every step takes longer than its bounds.
    """

    model: Architecture
    cluster: Cluster
    stack: str | Stack
    calibration: Calibration | None
    _known: dict[tuple[object, ...], _Passes] = field(default_factory=dict)

    def __call__(self, recipe: Recipe) -> float:
        """Seconds without data parallel and messages between stages. Raises UnknownNetworkError, UnknownSpeedError."""
        return self._step(recipe, self._passes(recipe), 0.0, 0.0, 0.0)

    def closer(self, recipe: Recipe) -> float:
        """Seconds with them; takes longer to compute, but far less than a prediction."""
        passes = self._passes(recipe)
        at = self.model, recipe, Fabric.of(self.cluster, recipe), stack_for(recipe, self.stack), passes.work
        forward, backward, slowed = gathered_layer(*at)
        once = data_once(*at)
        step = self._step(recipe, passes, forward, backward + slowed, exposed_send(*at))
        return step + once.exposed + once.slowed

    def _step(self, recipe: Recipe, passes: _Passes, gather: float, regather: float, send: float) -> float:
        """`gather`, `regather`: data parallel's seconds of a layer's forward and backward pass; `send`: of a message."""
        layout, layers, ranks = recipe.layout, self.model.num_hidden_layers, recipe.layout.pipeline
        forward, backward = passes.forward + gather, passes.backward + regather
        most, last, fill, drain = _layers(layout.stages, ranks, layers)
        each = forward + backward
        # A stage waits for a message in both passes, but the first and the last one only in one of them.
        messages = (2 * layout.stages_per_rank - 1) * send
        ends = passes.head + passes.embedding
        mean = (layers * each + ends + 2 * (layout.stages - 1) * send) / ranks
        rank = max(most * each + messages, last * each + passes.head + messages, mean)
        if ranks == 1 or layout.splits_backward:
            return recipe.microbatches * rank  # weight gradients fill the idle time
        return recipe.microbatches * rank + fill * forward + drain * backward + 2 * (ranks - 2) * send

    def _passes(self, recipe: Recipe) -> _Passes:
        layout, fabric = recipe.layout, Fabric.of(self.cluster, recipe)
        split = layout.splits_backward
        # All settings but those that `work` does not depend on. A tuple of values is hashed faster than a Recipe.
        stages = layout.stages if recipe.recompute_every > 1 else 0  # the share of layers that are recomputed
        sizes = (layout.tensor, layout.schedule if split else "", stages)
        settings = {**vars(recipe), "layout": sizes, "reshard": None}
        key = (*settings.values(), recipe.microbatches > 1, fabric.cluster.domain)
        if key not in self._known:
            stack = stack_for(recipe, self.stack)
            pace = (self.calibration or shipped()).pace(stack.name, self.cluster.gpu, recipe.precision)
            slower = pace.value * slowest(self.cluster.gpus)
            w = work(self.model, recipe, fabric, stack, slower, pace.factors)
            head = w.head_forward.total + w.head_backward.total
            self._known[key] = _Passes(
                w, w.forward.total, (w.backward + w.again).total, head, w.embedding.total
            )
        return self._known[key]


@cache
def _layers(stages: int, ranks: int, layers: int) -> tuple[int, int, int, int]:
    """Layers of the rank with the most; of the last one; that fill a pipeline, that drain it, while the slowest waits.

    The slowest rank is not known here, so the latter two leave out the largest stage.
    """
    counts = Layout(stages).layer_counts(layers)
    of_ranks = [sum(counts[r::ranks]) for r in range(ranks)]
    first, last = counts[:ranks], counts[-ranks:]
    return max(of_ranks), of_ranks[-1], sum(first) - max(first), sum(last) - max(last)
