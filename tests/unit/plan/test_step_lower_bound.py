"""The lower bound by which a search skips layouts: below every prediction, and near most of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from seatrial.job import Job
from seatrial.job.loading import load_job
from seatrial.job.settled import provisional
from seatrial.plan.cost.accumulate import accumulate_options
from seatrial.plan.cost.overlap import can_overlap
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import hardware_of
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import RECOMPUTES, legal, pair, search
from seatrial.plan.search.step_lower_bound import StepLowerBound

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"


def asked(name: str, *overrides: str) -> tuple[Job, Cluster]:
    job = load_job(PLANS / f"{name}.toml", overrides)
    cluster = hardware_of(job).cluster
    assert cluster is not None
    return provisional(job) if job.is_open else job, cluster


def ways(job: Job, cluster: Cluster) -> Iterator[Recipe]:
    """Every legal layout, with every recomputation, accumulation and tensor parallel."""
    for layout in legal(job, cluster, Counter(), (1, 4), RECOMPUTES):
        for recipe in accumulate_options(job, layout):
            yield recipe
            if can_overlap(recipe, stack_for(recipe)):
                yield replace(recipe, async_tensor=True)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("70b-64-h100", ("cluster.nodes=2",)),  # 80 layers in stages of different sizes
        ("8b-128k-64-h100", ("cluster.nodes=2",)),  # context parallel
        (
            "70b-gb200-nvl72",
            ("cluster.nodes=6", "cluster.nvlink_domain=12"),
        ),  # layouts choose a domain's GPUs
    ],
)
def test_every_step_takes_longer_than_its_bound(name: str, overrides: tuple[str, ...]) -> None:
    job, cluster = asked(name, *overrides)
    lower_bound = StepLowerBound(job.architecture, cluster, "seatrial", None)
    shares: list[float] = []
    for way in ways(job, cluster):
        step_s = predict(job.architecture, way, cluster).step_s
        assert lower_bound(way) <= lower_bound.closer(way) < step_s
        shares.append(lower_bound.closer(way) / step_s)
    assert len(shares) > 100
    assert mean(shares) > 0.9


@pytest.mark.parametrize(("name", "gpu"), [("70b-64-h100", "H200 SXM"), ("8b-128k-64-h100", "H100 SXM")])
def test_a_search_finds_the_fastest_of_all_recomputations(name: str, gpu: str) -> None:
    """Of which it predicts only those that may be the fastest."""
    job, cluster = asked(name, "cluster.nodes=2", f"cluster.gpu={gpu}")
    fastest: dict[tuple[int, int], float] = {}
    sure: dict[tuple[int, int], float] = {}
    for way in ways(job, cluster):
        found = predict(job.architecture, way, cluster)
        if found.fits and refusal(job, cluster, way) is None:
            for kept in (fastest, sure) if found.verdict.sure else (fastest,):
                kept[pair(way)] = min(found.step_s, kept.get(pair(way), found.step_s))
    result = search(job, cluster, own=False, microbatches=(1, 4))
    # Where whole gradients fit with margin it does not try sharded ones, which are faster by 0.01 % in some pipelines.
    for choices, expected in ((result.choices, fastest), (result.sure, sure)):
        found_s = {pair(c.recipe): c.prediction.step_s for c in choices}
        assert found_s == pytest.approx(expected, rel=2e-4)
    kinds = {(c.recipe.recompute, c.recipe.recompute_every) for c in (*result.choices, *result.sure)}
    assert ("selective", 1) in kinds
