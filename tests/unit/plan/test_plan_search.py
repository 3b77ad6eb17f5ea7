"""The search: only legal layouts, sorted, with the job's own for comparison, in a few seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest

from presets import preset_job
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.finding import Facts
from seatrial.job.rules_layout import LAYOUT_RULES
from seatrial.plan.cost.predict import capacity, predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.report.advice import short
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import Found, legal, search

pytestmark = pytest.mark.cluster  # slow

B300, A100 = find_gpu("B300 SXM"), find_gpu("A100-40GB SXM")
assert B300 is not None
assert A100 is not None
CLUSTER = Cluster(B300, 16, 8, find_network("InfiniBand NDR 8x400"))


job = partial(preset_job, "qwen2.5-72b-b300")


@cache
def reference() -> Found:
    return search(job(), CLUSTER)


def test_the_reference_cluster_is_searched() -> None:
    found = reference()
    assert 1000 < found.tried < 10_000  # its time is theirs: bench/plan_speed.py
    steps = [c.prediction.step_s for c in found.choices]
    assert steps == sorted(steps)
    assert len({(c.recipe.layout.tensor, c.recipe.layout.pipeline) for c in found.choices}) == len(steps) > 8
    assert all(c.prediction.fits and c.limit for c in found.choices)


def test_the_jobs_layout_is_compared_with_the_best() -> None:
    """TP 8 x PP 2 is not the best for 72B on 128 B300: part of its tensor-parallel traffic stays in sight, however it is sent."""
    found = reference()
    assert found.own is not None
    assert (
        found.own.recipe.layout.tensor,
        found.own.recipe.layout.pipeline,
        found.own.recipe.layout.shard,
    ) == (8, 2, 8)
    assert found.own_costs is not None
    assert found.own_costs > 0.1
    best = found.choices[0]
    assert found.own.prediction.parts.tensor > 3 * best.prediction.parts.tensor
    assert best.recipe.layout.tensor < 8


def test_search_returns_only_legal_layouts() -> None:
    base = job()
    for choice in reference().choices:
        recipe = choice.recipe
        parallel = base.parallel.model_copy(
            update=vars(recipe.layout)
            | {"reshard_after_forward": recipe.reshard, "async_tensor": recipe.async_tensor}
        )
        train = base.train.model_copy(update={"microbatch": recipe.microbatch})
        file = base.file.model_copy(update={"parallel": parallel, "train": train})
        facts = Facts(file, base.architecture, recipe.layout)
        assert [f for rule in LAYOUT_RULES for f in rule(facts)] == []
        assert recipe.world == 128
        assert predict_again(recipe) == choice.prediction.step_s


def predict_again(recipe: Recipe) -> float:

    return predict(job().architecture, recipe, CLUSTER).step_s


def test_zero_bubble_without_compilation() -> None:
    found = search(job("train.compile=false", "cluster.nodes=2"), replace(CLUSTER, nodes=2))
    assert found.own is not None  # shard takes the ranks that are left
    plain = job("train.compile=false")
    own = Recipe.of(plain)
    layout = replace(own.layout, schedule="zero-bubble", stages_per_rank=2)
    split = replace(own, layout=layout, async_tensor=False)
    assert refusal(plain, CLUSTER, split) is None
    resharding = refusal(plain, CLUSTER, replace(split, reshard=True))
    assert resharding is not None
    assert "parallel.reshard_after_forward" in resharding.keys
    compiled = refusal(plain, CLUSTER, replace(split, compiled=True))
    assert compiled is not None
    assert "with compile = true gives wrong gradients" in compiled.message


def test_without_the_key_layouts_are_compiled_that_can_be() -> None:
    section = job().train.model_copy(update={"compile": None})
    open_job = replace(job(), file=job().file.model_copy(update={"train": section}))
    found = {(r.layout.schedule, r.compiled) for r in legal(open_job, CLUSTER, Counter(), (1,))}
    assert found == {("1f1b", True), ("interleaved-1f1b", True), ("zero-bubble", False)}


def test_error_states_the_least_memory_if_nothing_fits() -> None:
    small = Cluster(A100, 1, 8)
    found = search(job("cluster.nodes=1", "parallel.pipeline=1"), small)
    assert found.choices == ()
    assert found.too_large == found.tried > 0
    assert found.least_bytes > capacity(small)
    assert found.own is not None
    assert found.own.limit.startswith("memory")
    assert found.own_costs is None


def test_search_at_another_size_than_the_jobs() -> None:
    found = search(job(), replace(CLUSTER, nodes=8))
    assert found.own is None
    assert found.choices
    with pytest.raises(ValueError, match="128 ranks"):
        predict_again_on(8)


def predict_again_on(nodes: int) -> None:

    predict(job().architecture, Recipe.of(job()), replace(CLUSTER, nodes=nodes))


def test_context_parallel_is_searched_only_where_a_stack_has_it() -> None:
    keys = ("train.sequence_length=65536", "model.preset=llama3.1-8b", "train.global_batch=8")
    long = preset_job("llama3-8b-h100", *keys)
    card = find_gpu("H100 SXM")
    assert card is not None
    cluster = Cluster(card, 1, 8)
    sizes = {
        stack: {r.context for r in legal(long, cluster, Counter(), (1,), (("none", 1),), stack)}
        for stack in ("nemo", "seatrial", "megascale")
    }
    assert sizes == {"nemo": {1, 2, 4, 8}, "seatrial": {1, 2, 4, 8}, "megascale": {1}}
    assert all(r.world == 8 for r in legal(long, cluster, Counter(), (1,), (("none", 1),), "nemo"))
    assert "CP" in short(search(long, cluster, stack="nemo").choices[0].recipe)
