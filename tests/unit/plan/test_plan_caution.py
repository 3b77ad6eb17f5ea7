"""Warning about layers shorter than any measured one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import NDR, gpu

from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.predict import predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.caution import SHORTEST_LAYER_S, layer_s, too_short

SCORES = Path(__file__).parents[3] / "bench" / "plan_accuracy.json"
CLUSTER = Cluster(gpu("H100 SXM"), 1, 8, NDR)


def test_seconds_of_a_layer_of_a_microbatch() -> None:
    model = model_presets()["llama3-8b"]
    recipe = Recipe(8192, 64, layout=Layout(shard=8), recompute="full")
    found = predict(model, recipe, CLUSTER)
    one = layer_s(model, recipe, found)
    parts = found.parts
    assert one * 32 * 8 == pytest.approx(parts.products + parts.attention + parts.operators)
    assert too_short(model, recipe, found) is None
    # The same work in other parts is the same for each of them.
    many = predict(model, replace(recipe, global_batch=128), CLUSTER)
    assert layer_s(model, replace(recipe, global_batch=128), many) == pytest.approx(one)


def test_layers_of_a_tiny_model_are_below_the_measured_range() -> None:
    model, recipe = model_presets()["qwen2.5-tiny"], Recipe(256, 32, layout=Layout(shard=8))
    told = too_short(model, recipe, predict(model, recipe, CLUSTER))
    assert told is not None
    assert "kernel launches" in told


def test_the_limit_is_the_shortest_measured_layer() -> None:
    """Which bench/plan_accuracy.py writes down; rounded to a tenth of a millisecond."""
    measured = json.loads(SCORES.read_text(encoding="utf-8")).get("shortest_layer_ms")
    if measured is not None:
        assert pytest.approx(measured, abs=0.35) == SHORTEST_LAYER_S * 1e3
