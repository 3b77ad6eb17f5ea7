"""Scaling: data parallel grows, no size is dropped, efficiencies match their definitions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from presets import preset_job
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.plan.cost.predict import predict
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.scaling import Mode, Scaling, best_scaling, exposed, resized, scaling
from seatrial.plan.search.search import search

B300, A100 = find_gpu("B300 SXM"), find_gpu("A100-40GB SXM")
assert B300 is not None
assert A100 is not None
CLUSTER = Cluster(B300, 16, 8, find_network("InfiniBand NDR 8x400"))
NODES = (1, 2, 4, 8, 16, 32, 64, 128)
MODES: tuple[Mode, ...] = ("weak", "strong")


job = cache(partial(preset_job, "qwen2.5-72b-b300"))


@cache
def reference(mode: Mode) -> Scaling:
    return scaling(job(), Recipe.of(job()), CLUSTER, mode=mode, nodes=NODES)


def small(mode: Mode, **changes: object) -> Scaling:
    """7B without tensor parallel: runs on any number of nodes."""
    base = preset_job("qwen2.5-7b-h200")
    gpu = find_gpu("H200 SXM")
    assert gpu is not None
    cluster = Cluster(gpu, base.cluster.nodes, 8, find_network("InfiniBand NDR 8x400"))
    recipe = replace(Recipe.of(base), **changes)  # type: ignore[arg-type]
    return scaling(base, recipe, cluster, mode=mode, nodes=NODES)


@pytest.mark.parametrize("mode", MODES)
def test_no_size_is_dropped_and_each_has_a_reason(mode: Mode) -> None:
    points = reference(mode).points
    assert [p.nodes for p in points] == list(NODES)
    assert points[0].why_not == "a replica needs TP8 x PP2 = 16 GPUs, only 8 available"
    for p in points:
        figures = (p.tokens_per_s, p.efficiency, p.speedup, p.exposed)
        assert all((f is None) == (p.why_not is not None) for f in figures)


@pytest.mark.parametrize("mode", MODES)
def test_the_jobs_own_size_is_its_own_prediction(mode: Mode) -> None:
    own = predict(job().architecture, Recipe.of(job()), CLUSTER)
    at = next(p for p in reference(mode).points if p.nodes == 16)
    assert at.global_batch == 2048
    assert at.prediction is not None
    assert at.prediction.step_s == own.step_s
    assert at.tokens_per_s == pytest.approx(own.tokens_per_s_per_gpu * 128)
    assert at.exposed == exposed(own)


def test_weak_keeps_the_microbatches_and_strong_the_batch() -> None:
    for p in reference("weak").known:
        assert p.recipe is not None
        assert p.recipe.microbatches == 32
        assert p.global_batch == 32 * 8 * p.recipe.layout.data_parallel
    assert {p.global_batch for p in reference("strong").known} == {2048}


@pytest.mark.parametrize("mode", MODES)
def test_efficiency_speedup_and_doubling_agree(mode: Mode) -> None:
    known = reference(mode).known
    first = known[0]
    assert first.tokens_per_s is not None
    assert (first.efficiency, first.speedup, first.doubling, first.costs) == (1.0, 1.0, None, None)
    for before, p in itertools.pairwise(known):
        assert p.tokens_per_s is not None
        assert p.efficiency is not None
        assert p.speedup == pytest.approx(p.tokens_per_s / first.tokens_per_s)
        assert p.speedup == pytest.approx(p.efficiency * p.gpus / first.gpus)
        if p.gpus == 2 * before.gpus:
            assert before.efficiency is not None
            assert p.doubling == pytest.approx(p.efficiency / before.efficiency)


def test_strong_scaling_ends_at_the_batch_size() -> None:
    """512 sequences, a pipeline of 2: no replica may have fewer microbatches than stages."""
    found = scaling(
        job("train.global_batch=512"), replace(Recipe.of(job()), global_batch=512, microbatch=1), CLUSTER,
        mode="strong", nodes=(512, 1024),
    )  # fmt: skip
    assert found.points[0].why_not is None
    assert found.points[1].why_not is not None
    assert "microbatches, fewer than the 2 pipeline ranks" in found.points[1].why_not


def test_strong_never_beats_weak() -> None:
    """Fewer microbatches have the same bubble and the same gradients to send."""
    weak = {p.gpus: p.efficiency for p in reference("weak").known}
    for p in reference("strong").known:
        if p.gpus >= 128:
            assert p.tokens_per_s is not None
            assert weak[p.gpus] is not None
    at = {s.mode: next(p for p in s.points if p.gpus == 1024) for s in map(reference, MODES)}
    assert at["strong"].tokens_per_s < at["weak"].tokens_per_s  # type: ignore[operator]


@pytest.mark.parametrize("mode", MODES)
def test_the_worst_doubling_is_named_or_why_there_is_none(mode: Mode) -> None:
    found = small(mode)
    assert found.worst is not None
    assert found.worst.doubling == min(p.doubling for p in found.known if p.doubling is not None)
    assert found.unknown == ""
    one = replace(found, points=found.points[:1])
    assert (one.worst, one.unknown) == (None, "only one size was asked for")


def test_shows_at_is_5_points_of_exposed_communication() -> None:
    found = small("strong")
    shows = found.shows_at
    first = found.known[0].exposed
    assert first is not None
    grown = [p.gpus for p in found.known if p.exposed is not None and p.exposed - first > 0.05]
    assert (shows.gpus if shows else None) == (grown[0] if grown else None)


def test_what_does_not_fit_keeps_its_memory() -> None:
    cluster = replace(CLUSTER, gpu=A100)
    found = scaling(job(), Recipe.of(job()), cluster, mode="weak", nodes=(2, 4))
    assert all(p.why_not is not None and p.why_not.startswith("does not fit") for p in found.points)
    assert all(p.prediction is not None for p in found.points)
    assert found.known == ()
    assert found.shows_at is None
    assert found.worst is None
    assert found.unknown.startswith("16 GPUs: does not fit")


def test_with_an_unknown_network_two_nodes_are_unknown() -> None:
    base = preset_job("qwen2.5-7b-h200")
    cluster = Cluster(B300, 1, 8)  # type: ignore[arg-type]
    recipe = replace(Recipe.of(base), layout=replace(base.layout, shard=8))
    found = scaling(base, recipe, cluster, mode="weak", nodes=(1, 2))
    assert [p.why_not for p in found.points] == [None, "the network between the nodes is unknown"]


def test_an_unknown_speed_is_stated_at_every_size() -> None:
    fp32 = job("train.precision=fp32")
    found = scaling(fp32, Recipe.of(fp32), CLUSTER, mode="weak", nodes=(2, 4))
    assert all(p.why_not is not None and "fp32" in p.why_not for p in found.points)


def test_a_layout_with_replicas_grows_by_replicas() -> None:
    base = replace(Recipe.of(job()), layout=replace(job().layout, shard=4, replicate=2))
    grown, why = resized(base, 256, mode="weak")
    assert why is None
    assert grown is not None
    assert (grown.layout.shard, grown.layout.replicate, grown.global_batch) == (4, 4, 4096)
    fewer, _ = resized(base, 32, mode="weak")
    assert fewer is not None
    assert (fewer.layout.shard, fewer.layout.replicate) == (2, 1)


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.integers(1, 5),
    shard=st.integers(1, 12),
    replicate=st.integers(1, 6),
    gpus=st.integers(1, 600),
    mode=st.sampled_from(MODES),
)
@settings(max_examples=200, deadline=None)
def test_resized_fills_the_cluster_or_gives_the_reason(
    tensor: int, pipeline: int, shard: int, replicate: int, gpus: int, mode: Mode
) -> None:
    base = Recipe(
        4096,
        7 * shard * replicate,
        layout=Layout(tensor=tensor, pipeline=pipeline, shard=shard, replicate=replicate),
    )
    found, why = resized(base, gpus, mode=mode)
    assert (found is None) == (why is not None)
    assert (found is None) == (gpus % (tensor * pipeline) != 0)
    if found is not None:
        assert found.world == gpus
        assert (found.layout.tensor, found.layout.pipeline) == (tensor, pipeline)
        # Weak: the same work for each replica, whatever the size.
        assert found.global_batch == (7 * found.layout.data_parallel if mode == "weak" else base.global_batch)
        assert replicate == 1 or found.layout.shard <= base.layout.shard


@pytest.mark.cluster  # slow
def test_best_scaling_matches_the_search() -> None:
    there = search(job(), replace(CLUSTER, nodes=2), own=False)
    found = best_scaling(job(), CLUSTER, nodes=(1, 2), known={2: there})
    one, two = found.points
    assert found.name == "best layouts"
    assert (one.gpus, two.gpus, two.prediction) == (8, 16, there.choices[0].prediction)
    assert one.recipe is not None
    assert one.recipe.world == 8
    assert one.tokens_per_s is not None
    assert two.tokens_per_s is not None
    assert two.speedup == pytest.approx(two.tokens_per_s / one.tokens_per_s)
    # No layout grown from 16 GPUs can be better than the best of 16.
    own = next(p for p in reference("strong").points if p.gpus == 16)
    assert own.tokens_per_s is not None
    assert own.tokens_per_s <= two.tokens_per_s


@pytest.mark.cluster  # slow
def test_best_scaling_when_nothing_fits_or_network_is_unknown() -> None:
    small = best_scaling(job(), replace(CLUSTER, gpu=A100), nodes=(1,))
    assert small.points[0].why_not is not None
    assert small.points[0].why_not.startswith("no layout fits: the smallest needs")
    alone = best_scaling(job(), replace(CLUSTER, network=None), nodes=(1, 2))
    assert alone.points[0].why_not is None
    assert alone.points[1].why_not == "the network between the nodes is unknown"


def test_zero_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="no cluster of 0 nodes"):
        best_scaling(job(), CLUSTER, nodes=(0,))
    with pytest.raises(ValueError, match="no cluster of 0 nodes"):
        scaling(job(), Recipe.of(job()), CLUSTER, mode="weak", nodes=(0, 1))
