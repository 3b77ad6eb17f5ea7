"""The lower bound by which a search skips layouts: below every prediction, and near most of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest

from seatrial.job.loading import load_job
from seatrial.job.settled import provisional
from seatrial.plan.cost.accumulate import accumulate_options
from seatrial.plan.cost.overlap import can_overlap
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.model.place import hardware_of
from seatrial.plan.search.least_step import LeastStep
from seatrial.plan.search.search import RECOMPUTES, legal

PLANS = Path(__file__).parents[2] / "fixtures" / "plans"


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
    job = load_job(PLANS / f"{name}.toml", overrides)
    job = provisional(job) if job.is_open else job
    cluster = hardware_of(job).cluster
    assert cluster is not None
    least_step = LeastStep(job.architecture, cluster, "seatrial", None)
    shares: list[float] = []
    for layout in legal(job, cluster, Counter(), (1, 4), RECOMPUTES):
        for recipe in accumulate_options(job, layout):
            ways = [recipe]
            if can_overlap(recipe, stack_for(recipe)):
                ways.append(replace(recipe, async_tensor=True))
            for way in ways:
                step_s = predict(job.architecture, way, cluster).step_s
                assert least_step(way) <= least_step.closer(way) < step_s
                shares.append(least_step.closer(way) / step_s)
    assert len(shares) > 100
    assert mean(shares) > 0.9
