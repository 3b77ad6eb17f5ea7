"""Calibration from rows: known factors are recovered, outliers have little effect."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
from plan_cases import OtherModel

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.plan.cost.calibration import (
    ARCHITECTURES,
    CELLS,
    FAMILIES,
    SOURCES,
    UNIT_FACTORS,
    Calibration,
    Factors,
    Pace,
    Z,
    shipped,
)
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import step_parts
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

BENCH = Path(__file__).parents[3] / "bench"
STACK, GPU = "llm-foundry", "H100 SXM"
WIDTHS = {"small": 1024, "middle": 2048, "large": 4096, "wide": 8192}


@pytest.fixture(scope="module")
def fit() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import plan_fit

        yield plan_fit


def row(
    fit: ModuleType,
    name: str,
    sequence: int,
    pace: float,
    factors: Factors,
    *,
    source: str = "made",
    stack: str = STACK,
    gpu_name: str = GPU,
) -> Any:
    """A row that took what `pace` and `factors` predict."""
    hidden, gpu = WIDTHS[name], find_gpu(gpu_name)
    assert gpu is not None
    model = OtherModel(
        num_hidden_layers=24,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        head_dim=128,
        vocab_size=50368,
        gated=False,
        tie_word_embeddings=True,
        layer_vectors=2 * hidden,
        learned_positions=0,
    )
    recipe = Recipe(sequence, 64, layout=Layout(shard=16), microbatch=2)
    cluster = Cluster(gpu, 2, 8, find_network("InfiniBand NDR 8x400"))
    step = step_parts(model, recipe, Fabric(cluster), stacks()[stack], pace, factors).total
    return fit.Row(
        source=source,
        name=name,
        gpu=gpu_name,
        model=model,
        recipe=recipe,
        cluster=cluster,
        stack=stack,
        free_microbatch=False,
        free_recompute=False,
        step_s=step,
        memory_bytes=None,
        memory_kind="allocated",
        fits=True,
    )


def found(fit: ModuleType, rows: list[Any]) -> Pace:
    lines = {i: fit.line(r) for i, r in enumerate(rows)}
    known: Calibration = fit.calibrate(enumerate(rows), lines, shipped())
    assert [(e.stack, e.gpu, e.rows) for e in known.entries] == [(STACK, GPU, len(rows))]
    chip = find_gpu(GPU)
    assert chip is not None
    return known.pace(STACK, chip)


TRUE = Factors(operators=0.7, attention=1.15)
MADE = [(name, sequence) for name in WIDTHS for sequence in (1024, 4096, 16384)]


def test_fit_recovers_known_factors(fit: ModuleType) -> None:
    """Near, and not exactly: operators and attention are drawn towards 1."""
    rows = [row(fit, name, length, 1.2, TRUE) for name, length in MADE]
    pace = found(fit, rows)
    assert pace.value == pytest.approx(1.2, rel=0.02)
    assert pace.factors.operators == pytest.approx(0.7, rel=0.1)
    assert pace.factors.attention == pytest.approx(1.15, rel=0.05)
    assert max(abs(fit.predicted(r, pace) / r.step_s - 1) for r in rows) < 0.03
    even = fit.own_pace(rows[0]), fit.own_pace(rows[-1])
    assert abs(even[0] / even[1] - 1) > 0.1  # one number would not do


def test_an_outlier_changes_the_fit_little(fit: ModuleType) -> None:
    rows = [row(fit, name, length, 1.2, UNIT_FACTORS) for name, length in MADE]
    odd = replace(rows[4], step_s=2 * rows[4].step_s)
    pace = found(fit, [*rows[:4], odd, *rows[5:]])
    assert pace.value == pytest.approx(1.2, rel=0.03)


def test_pace_of_two_rows_is_between_them(fit: ModuleType) -> None:
    """The sum of distances alone would be as small anywhere between them."""
    a, b = (row(fit, "large", 4096, pace, UNIT_FACTORS) for pace in (1.0, 1.4))
    assert found(fit, [a, b]).value == pytest.approx(math.sqrt(1.4), rel=0.03)


def test_one_row_does_not_determine_kind_factors(fit: ModuleType) -> None:
    pace = found(fit, [row(fit, "large", 4096, 1.3, UNIT_FACTORS)])
    assert pace.value == pytest.approx(1.3, rel=1e-3)
    assert pace.factors == UNIT_FACTORS


def test_many_rows_of_one_model_do_not_outvote_others(fit: ModuleType) -> None:
    """Nine rows of one model count as three of others: with six of others the pace is nearer to theirs."""
    many = [row(fit, "large", 1024 + 256 * i, 1.0, UNIT_FACTORS) for i in range(9)]
    others = [
        row(fit, n, length, 1.4, UNIT_FACTORS) for n in ("small", "middle", "wide") for length in (2048, 4096)
    ]
    assert found(fit, many + others).value > math.sqrt(1.4)


def test_factors_multiply_only_their_kind() -> None:
    gpu = find_gpu(GPU)
    assert gpu is not None
    at = Fabric(Cluster(gpu, 1, 8))
    model = OtherModel(
        num_hidden_layers=8,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=128,
        vocab_size=32000,
        layer_vectors=4096,
    )
    recipe = Recipe(4096, 64, layout=Layout(shard=8), recompute="none")
    plain = step_parts(model, recipe, at, stacks()[STACK], 1.1)
    other = step_parts(model, recipe, at, stacks()[STACK], 1.1, Factors(operators=2.0, attention=3.0))
    assert other.products == plain.products
    assert other.attention == pytest.approx(3 * plain.attention)
    assert other.operators == pytest.approx(2 * plain.operators)


STACKS, GPUS = ("llm-foundry", "torchtitan", "megatron", "nemo"), ("A100-80GB SXM", GPU, "B200 SXM")


@pytest.mark.parametrize("seed", range(20))
def test_a_source_moves_no_other_beyond_its_interval(fit: ModuleType, seed: int) -> None:
    """Random sources, whose paces differ by family, architecture, stack on a GPU and source as the fit assumes."""
    random, family = Random(seed), shipped().family
    drawn: dict[object, float] = {}

    def factor(of: object, spread: float) -> float:
        return drawn.setdefault(of, math.exp(random.gauss(0, spread)))

    def pace(source: int, stack: str, gpu: str) -> float:
        chip = find_gpu(gpu)
        assert chip is not None
        shared = factor(family[stack], FAMILIES) * factor(chip.architecture, ARCHITECTURES)
        return shared * factor((stack, gpu), CELLS) * factor(source, SOURCES)

    rows = [
        row(fit, *case, pace(n, *at), UNIT_FACTORS, source=str(n), stack=at[0], gpu_name=at[1])
        for n in range(random.randint(2, 5))
        for at in [(random.choice(STACKS), random.choice(GPUS))]
        for case in random.sample(MADE, random.randint(1, 3))
    ]
    lines = {i: fit.line(r) for i, r in enumerate(rows)}
    everything: Calibration = fit.calibrate(enumerate(rows), lines, shipped())
    for left_out in {r.source for r in rows}:
        kept = [(i, r) for i, r in enumerate(rows) if r.source != left_out]
        without: Calibration = fit.calibrate(kept, lines, shipped())
        for _, each in kept:
            before, after = (known.pace(each.stack, each.cluster.gpu) for known in (everything, without))
            moved = math.log(fit.predicted(each, after) / fit.predicted(each, before))
            assert abs(moved) < Z * before.spread
