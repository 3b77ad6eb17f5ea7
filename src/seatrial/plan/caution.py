"""Where a prediction has no ground, though every number in it is known: work that is shorter than anything that was measured."""

from __future__ import annotations

from seatrial.plan.model import Model
from seatrial.plan.predict import Prediction
from seatrial.plan.recipe import Recipe

# Kernels of one layer and microbatch, forward and backward. Shorter ones may end before the next is launched, and that time is in
# no prediction: of the published cases below 6 ms most are slower than predicted, by up to 29 %.
SHORTEST_LAYER_S = 2.0e-3
SHORTEST_SOURCE = "the shortest among published step times (bench/plan_accuracy.json: shortest_layer_ms)"


def layer_s(model: Model, recipe: Recipe, prediction: Prediction) -> float:
    """Seconds that the kernels of one layer take for one microbatch, forward and backward; the head's are shared out."""
    p = prediction.parts
    return (p.products + p.attention + p.operators) * recipe.pipeline / (model.layers * recipe.microbatches)


def too_short(model: Model, recipe: Recipe, prediction: Prediction) -> str | None:
    """A sentence about layers that are shorter than any that was measured; None where they are not."""
    each = layer_s(model, recipe, prediction)
    if each >= SHORTEST_LAYER_S:
        return None
    return (
        f"a layer takes {each * 1e3:.2g} ms for a microbatch, and none below {SHORTEST_LAYER_S * 1e3:g} ms was ever measured: "
        "launching kernels, which is not predicted, may take longer than that"
    )
