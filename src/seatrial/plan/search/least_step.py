"""Lower bound of a layout's step time: from the work of one microbatch, which most layouts of a search share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.schedules import schedule_named
from seatrial.plan.cost.calibration import Calibration, shipped
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.predict import stack_for
from seatrial.plan.cost.stacks import Stack
from seatrial.plan.cost.step import slowest
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.model.work import work


@dataclass(frozen=True)
class LeastStep:
    """Lower bounds of the step times of one model's layouts on all of `cluster`, with one of the built-in schedules.

    A step takes the slowest rank's passes, and filling and draining the pipeline. Left out are data parallel, messages
    between stages, and the optimizer, whose time is far above rounding: every step takes longer than its bound.
    """

    model: Architecture
    cluster: Cluster
    stack: str | Stack
    calibration: Calibration | None
    _known: dict[tuple[object, ...], tuple[float, float, float]] = field(default_factory=dict)

    def __call__(self, recipe: Recipe) -> float:
        """Seconds. Raises UnknownNetworkError, UnknownSpeedError."""
        layout, layers = recipe.layout, self.model.num_hidden_layers
        forward, backward, ends = self._passes(recipe)
        most, fill, drain = _layers(layout.stages, layout.pipeline, layers)
        each = forward + backward
        rank = max(most * each, (layers * each + ends) / layout.pipeline)
        if schedule_named(layout.schedule).split_backward:
            return recipe.microbatches * rank  # weight gradients fill the idle time
        return recipe.microbatches * rank + fill * forward + drain * backward

    def _passes(self, recipe: Recipe) -> tuple[float, float, float]:
        """Seconds of one microbatch: forward and backward of a layer, and both of embedding and head."""
        layout, fabric = recipe.layout, Fabric.of(self.cluster, recipe)
        split = layout.pipeline > 1 and schedule_named(layout.schedule).split_backward
        # The sizes that `work` does not depend on are the same in all keys.
        alike = Layout(2 if split else 1, tensor=layout.tensor, schedule=layout.schedule if split else "1f1b")
        key = (replace(recipe, layout=alike, reshard=True), recipe.microbatches > 1, fabric.cluster.domain)
        if key not in self._known:
            stack = stack_for(recipe, self.stack)
            pace = (self.calibration or shipped()).pace(stack.name, self.cluster.gpu, recipe.precision)
            w = work(self.model, recipe, fabric, stack, pace.value * slowest(self.cluster.gpus), pace.factors)
            ends = w.head_forward.total + w.head_backward.total + w.embedding.total
            self._known[key] = w.forward.total, (w.backward + w.again).total, ends
        return self._known[key]


@cache
def _layers(stages: int, ranks: int, layers: int) -> tuple[int, int, int]:
    """Layers of the rank with the most, and those that at least fill and drain a pipeline while the slowest rank waits."""
    counts = Layout(stages).layer_counts(layers)
    first, last = counts[:ranks], counts[-ranks:]
    most = max(sum(counts[r::ranks]) for r in range(ranks))
    return most, sum(first) - max(first), sum(last) - max(last)
