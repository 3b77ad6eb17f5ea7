"""Planted causes in simulated steps: each is found, in its rank or node, and healthy doublings have none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scale_cases import STORE, job

from seatrial.record.frontier import account
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    FORWARD,
    HOST,
    OPTIMIZER,
    PIPELINE,
    REPLICATE,
    SAVE,
    STAGES,
    STEP_SUM,
    RankStages,
)
from seatrial.scale.cause import causes, lines
from seatrial.scale.links import SlowLink
from seatrial.scale.sizes import Size, sizes_of
from seatrial.scale.steps import Steps, steps_of
from seatrial.scale.trial import Figures, Trial

STEPS = 20
DRAWS = 100
OWN = {DATA: 0.002, HOST: 0.01, FORWARD: 0.2, BACKWARD: 0.4, OPTIMIZER: 0.03, SAVE: 0.001}
EXCHANGE_S = 0.05
JOB = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.shard=1", "cluster.gpus_per_node=4")


def size_of(nodes: int, mode: str = "weak", *settings: str) -> Size:
    whole = job(*JOB, "parallel.replicate=8", "train.global_batch=64", "train.microbatch=2", *settings)
    sizes = sizes_of(whole, [nodes], mode, steps=STEPS, stores=[STORE])  # type: ignore[arg-type]
    return sizes[0]


def simulated(
    size: Size,
    seed: int,
    *,
    work: dict[int, float] | None = None,
    late: tuple[int, int, float] | None = None,
    exchange_s: float = EXCHANGE_S,
) -> Steps:
    """Steps in which every rank works, waits for the slowest in one exchange, then updates.

    `work`: seconds of stages in place of OWN. `late`: (rank, stage, seconds) that one rank takes longer.
    """
    random = np.random.default_rng(seed)
    cube = np.zeros((STEPS, size.gpus, len(STAGES)))
    for stage, seconds in (OWN | (work or {})).items():
        cube[:, :, stage] = seconds * random.normal(1, 0.02, cube.shape[:2]).clip(0.5)
    if late is not None:
        cube[:, late[0], late[1]] += late[2] * random.normal(1, 0.1, STEPS).clip(0.5)
    before = cube[:, :, [DATA, HOST, FORWARD, BACKWARD, SAVE]].sum(axis=2)
    arrived = before.max(axis=1, keepdims=True)
    cube[:, :, REPLICATE] = arrived - before + exchange_s * random.normal(1, 0.05, (STEPS, 1)).clip(0.5)
    updated = cube[:, :, OPTIMIZER]
    cube[:, :, STEP_SUM] = updated.max(axis=1, keepdims=True) - updated + 0.001
    steps = np.arange(1, STEPS + 1)
    found = account(
        {
            rank: RankStages(1, rank, size.gpus, "cpu", 1, {}, steps, cube[:, rank])
            for rank in range(size.gpus)
        }
    )
    assert found is not None
    return Steps(size, found, None, float(cube.sum(axis=(0, 2)).mean()))


@pytest.mark.parametrize("nodes", [2, 16])
def test_nothing_is_blamed_where_a_doubling_is_well(nodes: int) -> None:
    small, large = size_of(nodes // 2), size_of(nodes)
    blamed = sum(bool(causes(simulated(small, n), simulated(large, 1000 + n))) for n in range(DRAWS))
    assert blamed <= DRAWS // 100


@pytest.mark.parametrize("nodes", [2, 16])
@pytest.mark.parametrize(
    ("stage", "kind"),
    [(DATA, "data"), (FORWARD, "straggler"), (BACKWARD, "straggler"), (HOST, "host"), (SAVE, "save")],
)
@pytest.mark.parametrize("seconds", [0.06, 0.3])
def test_a_late_rank_is_named_with_what_it_did(nodes: int, stage: int, kind: str, seconds: float) -> None:
    small, large = size_of(nodes // 2), size_of(nodes)
    right = 0
    for n in range(DRAWS):
        rank = n % large.gpus
        base, slow = simulated(small, n), simulated(large, 1000 + n, late=(rank, stage, seconds))
        first = causes(base, slow)[0]
        right += (first.kind, first.rank, first.nodes) == (kind, rank, (rank // 4,))
        # Of many ranks some other one is late by noise, which the frontier does not charge to this one.
        assert seconds / 3 < first.seconds < 1.2 * seconds
    assert right >= 95


@pytest.mark.parametrize("times", [1.1, 2.0])
def test_slower_computation_of_all_is_nobodys(times: float) -> None:
    small, large = size_of(1), size_of(2)
    work = {stage: times * OWN[stage] for stage in (FORWARD, BACKWARD)}
    for n in range(DRAWS):
        first = causes(simulated(small, n), simulated(large, 1000 + n, work=work))[0]
        assert (first.kind, first.rank, first.nodes) == ("computation", None, ())


def test_a_slow_exchange_is_the_networks_and_the_links_where_one_explains_it() -> None:
    small, large = size_of(1), size_of(2)
    link = SlowLink(1, None, 5e6, 1e9, 4.0, 3.9)
    for n in range(DRAWS):
        slow = simulated(large, 1000 + n, exchange_s=4 * EXCHANGE_S)
        first = causes(simulated(small, n), slow)[0]
        assert (first.kind, first.stages, first.nodes) == ("network", ("replicate",), ())
        named = causes(simulated(small, n), replace(slow, slow_link=link))[0]
        assert named.nodes == (1,)
        assert "of node 1 carry at most 40 Mbit/s" in named.evidence
        # A link that is slow and costs little is not why.
        idle = replace(slow, slow_link=replace(link, excess_s=0.5))
        assert causes(simulated(small, n), idle)[0].nodes == ()


def test_fewer_microbatches_are_a_bubble() -> None:
    stages = ("parallel.pipeline=2", "parallel.replicate=4")
    small, large = size_of(1, "strong", *stages), size_of(2, "strong", *stages)
    assert small.job.microbatches == 2 * large.job.microbatches

    def waiting(size: Size, seed: int, share: float) -> Steps:
        """Each rank does `share` of the work, and waits in the pipeline as long as ever."""
        work = {stage: seconds * share for stage, seconds in OWN.items()}
        steps = simulated(size, seed, work=work, exchange_s=EXCHANGE_S * share)
        seconds = steps.account.split.seconds.copy()
        seconds[PIPELINE] = 0.1
        return replace(
            steps, account=replace(steps.account, split=replace(steps.account.split, seconds=seconds))
        )

    found = causes(waiting(small, 1, 1.0), waiting(large, 2, 0.5))
    assert [(c.kind, c.stages) for c in found] == [("bubble", ("pipeline",))]
    assert found[0].seconds == pytest.approx(0.05, rel=0.2)


def test_they_are_read_as_lines() -> None:
    small, large = size_of(1), size_of(2)
    found = causes(simulated(small, 1), simulated(large, 2, late=(5, FORWARD, 0.3)))
    label, text = next(lines(found))
    assert label == "straggler, rank 5 on node 1"
    assert "in rank 5" in text
    assert "Try: `seatrial check`" in text


def test_records_that_cannot_be_used_give_no_steps(tmp_path: Path) -> None:
    figures = Figures(2, 10, 0.5, 100.0, None, [1.0])
    trial = Trial(1, 4, 1.0, 5.0, "1-nodes-1", "", figures)
    (tmp_path / "1-nodes-1/ranks/000001").mkdir(parents=True)
    assert steps_of(tmp_path, size_of(1), [trial]) is None
    assert steps_of(tmp_path, size_of(1), []) is None
    (tmp_path / "1-nodes-1/ranks/000001/rank0.stages").write_bytes(b"\0\xff")
    assert steps_of(tmp_path, size_of(1), [trial]) is None
