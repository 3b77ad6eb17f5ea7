"""The fastest layout that fails only for memory, against an exhaustive search, and changes that make it fit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from seatrial.hardware.catalogue import gpus
from seatrial.hardware.networks import reference_node
from seatrial.job.loading import load_job
from seatrial.job.settled import provisional
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.overlap import can_overlap
from seatrial.plan.cost.predict import Prediction, capacity, predict, stack_for
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import Predictor, single_changes
from seatrial.plan.report.answer import answer
from seatrial.plan.report.beyond_memory import BeyondMemory, beyond_memory
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import MOST_OVER, TIE_MARGIN, Found, search
from seatrial.ui.plan_html import page
from seatrial.ui.plan_json import document
from seatrial.ui.plan_table import lines
from seatrial.ui.plan_words import gib, too_large

pytestmark = pytest.mark.cluster  # for its time: it starts no cluster
PLANS = Path(__file__).parents[2] / "fixtures" / "plans"


@cache
def asked(name: str, *overrides: str) -> tuple[Predictor, Found, BeyondMemory | None]:
    job = load_job(PLANS / f"{name}.toml", overrides)
    cluster = hardware_of(job).cluster
    assert cluster is not None
    job = provisional(job) if job.is_open else job
    predictor = Predictor(job, cluster, "seatrial", None)
    found = search(job, cluster, own=False)
    return predictor, found, beyond_memory(predictor, found)


def predicted(predictor: Predictor, recipe: Recipe) -> Prediction:
    return predict(predictor.job.architecture, recipe, predictor.cluster)


@pytest.mark.parametrize("name", ["7b-one-h200", "70b-64-h100", "405b-16384-h100"])
def test_beyond_memory_matches_an_exhaustive_search(name: str) -> None:
    predictor, found, beyond = asked(name)
    best = found.choices[0].prediction.step_s
    ways = [*found.outsized]
    ways += [replace(r, async_tensor=True) for r in found.outsized if can_overlap(r, stack_for(r))]
    legal = [
        (r, predicted(predictor, r)) for r in ways if refusal(predictor.job, predictor.cluster, r) is None
    ]
    tried = [(r, p) for r, p in legal if p.memory.reserved <= MOST_OVER * p.available]
    fastest = min(p.step_s for _, p in tried)
    most = min(fastest * (1 + TIE_MARGIN), best / (1 + TIE_MARGIN))
    near = [(p.memory.reserved, r) for r, p in tried if p.step_s < most]
    # There the best layout recomputes little, and none that does not fit is much faster.
    assert bool(near) == (name != "405b-16384-h100")
    if beyond is None:
        assert not near
        return
    assert beyond.recipe == min(near, key=lambda n: n[0])[1]
    assert beyond.prediction.step_s == predicted(predictor, beyond.recipe).step_s < best / (1 + TIE_MARGIN)
    assert beyond.gain == pytest.approx(best / beyond.prediction.step_s - 1)
    assert beyond.over == pytest.approx(beyond.prediction.memory.reserved / capacity(predictor.cluster) - 1)
    assert not beyond.prediction.fits


def test_each_change_makes_it_fit_and_is_the_fastest_of_its_kind() -> None:
    predictor, found, beyond = asked("70b-64-h100", "cluster.nodes=4")
    assert beyond is not None
    again, card = beyond.suggestions
    assert (again.what, again.built, card.built) == ("full recomputation", True, False)
    assert again.recipe == replace(beyond.recipe, recompute="full")
    there = predicted(predictor, again.recipe)
    assert there.fits
    changes = [r for kind in single_changes(beyond.recipe, stack_for(beyond.recipe)) for _, r in kind]
    assert {"full", "none", "selective"} == {r.recompute for r in changes}
    assert there.step_s == min(p.step_s for r in changes if (p := predictor.try_predict(r)) is not None)
    assert again.gain == pytest.approx(found.choices[0].prediction.step_s / there.step_s - 1)
    # The GPU is the one with the least memory that it fits, in nodes of eight.
    needs = beyond.prediction.memory.reserved
    rooms = {
        g.name: capacity(replace(predictor.cluster, gpu=g))
        for g in gpus()
        if (node := reference_node(g.name)) is not None and node.gpus_per_node == 8
    }
    name = min((n for n in rooms if judge(needs, rooms[n]).word != "does not fit"), key=lambda n: rooms[n])
    assert card.what.startswith(f"{name} (")
    assert card.recipe == beyond.recipe


def test_twice_the_nodes_are_more_shards() -> None:
    predictor, _, _ = asked("70b-64-h100", "cluster.nodes=1", "cluster.gpu=B300 SXM")
    # With selective recomputation the best is so fast that only much larger layouts are faster.
    found = search(predictor.job, predictor.cluster, own=False, recomputes=(("none", 1), ("full", 1)))
    beyond = beyond_memory(predictor, found)
    assert beyond is not None
    (way,) = (w for w in beyond.suggestions if w.what == "2 nodes")
    assert way.recipe == replace(
        beyond.recipe, layout=replace(beyond.recipe.layout, shard=2 * beyond.recipe.layout.shard)
    )
    twice = replace(predictor.cluster, nodes=2)
    assert predict(predictor.job.architecture, way.recipe, twice).fits


def test_the_nearest_if_none_fits() -> None:
    predictor, found, beyond = asked("70b-64-h100", "cluster.nodes=1", "model.num_hidden_layers=48")
    assert found.choices == ()
    assert beyond is not None
    needs = beyond.prediction.memory.reserved
    assert capacity(predictor.cluster) < needs <= found.least_bytes * (1 + TIE_MARGIN)
    near = [(r, predicted(predictor, r)) for r in found.outsized]
    fastest = min(p.step_s for _, p in near if p.memory.reserved <= found.least_bytes * (1 + TIE_MARGIN))
    assert beyond.prediction.step_s <= fastest  # with async_tensor it may be faster
    assert beyond.gain is None
    nodes, card = beyond.suggestions
    assert nodes.what == "2 nodes"
    assert predict(predictor.job.architecture, nodes.recipe, replace(predictor.cluster, nodes=2)).fits
    assert (card.what, card.recipe) == ("H200 SXM (141 GB)", beyond.recipe)
    words = too_large(beyond)
    assert "(none does, to compare with)" in words
    assert words.endswith(" fits on 2 nodes, tight or on H200 SXM (141 GB)")
    job = predictor.job
    told = answer(job, hardware_of(job))
    shown = " ".join(" ".join(text for text, _ in lines(told, width=100)).split())
    assert told.beyond is not None
    assert (
        f"none fits the smallest needs {gib(found.least_bytes)} per GPU nearest {too_large(told.beyond)}"
        in shown
    )
    assert f"Nearest: {too_large(told.beyond)}." in page(told)
    document_of = document(told)["search"]["beyond_memory"]
    assert (document_of["gain"], len(document_of["ways"])) == (None, 2)


def test_none_if_no_faster_layout_fails_for_memory() -> None:
    _, found, beyond = asked("7b-one-h200", "model.preset=qwen2.5-72b")
    assert (found.choices, beyond) == ((), None)  # nothing fits, and all need more than twice the memory
    _, found, beyond = asked("8b-128k-64-h100", "train.sequence_length=512", "cluster.gpu=B300 SXM")
    assert found.choices
    assert beyond is None
