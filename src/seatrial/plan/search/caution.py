"""Warning about predictions outside the measured range: layers shorter than any measured one."""

from __future__ import annotations

from seatrial.job.architecture import Architecture
from seatrial.plan.cost.predict import Prediction
from seatrial.plan.model.recipe import Recipe

# Kernels of one layer and microbatch, forward and backward. Shorter ones may be launch-bound, which is not modelled: of
# the published cases below 6 ms most are slower than predicted, by up to 29 %.
SHORTEST_LAYER_S = 2.0e-3
SHORTEST_SOURCE = "the shortest among published step times (bench/plan_accuracy.json: shortest_layer_ms)"


def layer_s(model: Architecture, recipe: Recipe, prediction: Prediction) -> float:
    """Seconds of one layer's kernels for one microbatch, forward and backward; the head's are spread over layers."""
    p = prediction.parts
    kernels = (p.products + p.attention + p.operators) * recipe.layout.pipeline
    return kernels / (model.num_hidden_layers * recipe.microbatches)


def too_short(model: Architecture, recipe: Recipe, prediction: Prediction) -> str | None:
    """A warning if layers are shorter than any that was measured; otherwise None."""
    each = layer_s(model, recipe, prediction)
    if each >= SHORTEST_LAYER_S:
        return None
    return (
        f"a layer takes {each * 1e3:.2g} ms per microbatch, less than the {SHORTEST_LAYER_S * 1e3:g} ms of any measured run: "
        "kernel launches, which are not modelled, may take longer"
    )
