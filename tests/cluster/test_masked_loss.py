"""A loss in which some targets do not count: every layout against one process, with masks that are very unequal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from parity import (
    BF16,
    FULL,
    GRADIENT_OF_LARGEST,
    LAYOUTS,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    RECOMPUTE,
    Case,
    Ran,
    assert_trains_alike,
    compare,
    run_layouts,
)
from parity_ranks import ARCH, LENGTH, NoisyWeights, batch, counted

from seatrial.model.generate import load_whole

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

EXPERTS = {"family": "qwen3_moe", "peer": "one-experts"}
WITH_LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]}, "peer": "one-lora"}
MASKED: dict[str, Case] = {
    **{
        name: {"layout": LAYOUTS[name]}
        for name in ("tp2", "pp2", "fsdp2", "replicate2-fsdp2", "pp2-interleaved", "pp2-zero-bubble", "pp4")
    },
    "one-microbatch": {"microbatch": 16},
    "replicate4": {"layout": {"replicate": 4}},
    "tp2-pp2-fsdp2-sharded": {"layout": FULL, "accumulate": "sharded", "tied": True, "peer": "one-tied"},
    "cp2-tp2": {"layout": {"tensor": 2, "shard": 2, "context": 2}},
    "cp2-pp2-fsdp2": {"layout": {"pipeline": 2, "shard": 4, "context": 2}},
    "tp2-async-recompute": {"layout": {"tensor": 2}, "async_tensor": True, **RECOMPUTE},
    "fsdp2-documents": {"layout": {"shard": 2}, "documents": True, "peer": "one-documents"},
    "tp2-fsdp2-experts": {"layout": LAYOUTS["tp2-fsdp2"], **EXPERTS},
    "ep2-fsdp2-experts": {"layout": {"shard": 4, "expert": 2}, **EXPERTS},
    "pp2-fsdp2-lora": {"layout": LAYOUTS["pp2-fsdp2"], **WITH_LORA},
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-tied": {"tied": True},
    "one-documents": {"documents": True},
    "one-experts": EXPERTS,
    "one-lora": WITH_LORA,
    "one-all": {"masked": False},
    "sabotage": {"layout": {"replicate": 4}, "sabotage": "targets of each rank alone", "steps": 1},
    "one-bf16": {"precision": "bf16"},
    "full-bf16": {"layout": FULL, "precision": "bf16", "peer": "one-bf16"},
    "one-nothing": {"nothing_in": 0},
    "full-nothing": {"layout": FULL, "nothing_in": 0},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | MASKED, optional=MASKED, steps=2, masked=True)


@pytest.mark.parametrize("name", MASKED)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)
    for rank in runs[name].ranks:
        assert rank["tokens"] == [int(counted(step, {}).sum()) for step in range(2)]


def test_the_masks_are_very_unequal() -> None:
    of_ranks = counted(0, {}).view(4, 2, -1).sum(-1)
    assert of_ranks.min() == 0
    assert of_ranks.sum(1).min() == 0
    assert of_ranks.max() > 8 * of_ranks.float().median()


def test_it_is_the_mean_over_the_targets_that_count(runs: dict[str, Ran]) -> None:
    model = load_whole(ARCH, NoisyWeights(ARCH, seed=1)).train()
    rows = batch(0)
    target = rows[:, 1:].masked_fill(~counted(0, {}), -100)
    loss = F.cross_entropy(model(rows[:, :-1].contiguous()).flatten(0, 1), target.flatten())
    loss.backward()
    assert rows.shape == (16, LENGTH + 1)
    ours = runs["one"].ranks[0]
    assert ours["history"][0][0] == pytest.approx(loss.item(), abs=1e-6, rel=0)
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert ours["history"][0][1] == pytest.approx(norm.item(), rel=1e-5)
    all_count = runs["one-all"].ranks[0]
    assert abs(all_count["history"][0][0] - loss.item()) > 100 * LOSS_ABSOLUTE
    assert all_count["tokens"] == [16 * LENGTH] * 2


def test_a_mean_of_means_is_seen(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage")
    assert found.loss > 100 * LOSS_ABSOLUTE
    assert found.worst > 100 * GRADIENT_OF_LARGEST
    runs["sabotage"].assert_ranks_agree()


def test_bf16_is_the_same_training(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "full-bf16", **BF16)


@pytest.mark.parametrize("name", ["one-nothing", "full-nothing"])
def test_a_step_without_targets_is_zero_and_training_goes_on(name: str, runs: dict[str, Ran]) -> None:
    for rank in runs[name].ranks:
        assert rank["history"][0] == (0.0, 0.0)
        assert rank["tokens"][0] == 0
        assert rank["history"][1] == pytest.approx(runs["one-nothing"].history[1], rel=NORM_RELATIVE)
        assert rank["history"][1][0] > 1
        for _, _, gradient in rank["gradients"]:
            assert not gradient.any()
        for _, _, weight in rank["weights"]:
            assert weight.isfinite().all()
