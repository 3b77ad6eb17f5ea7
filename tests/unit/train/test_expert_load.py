"""How evenly a step sends positions to experts: counted as the router does, and recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_cases import Run
from rank_cases import ARCH, OPTIMIZER, SETTINGS, mesh
from torch import Tensor, nn

import late_device
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import SparseMLP
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel
from seatrial.record.jsonl import read_numbered
from seatrial.train.optimizer import ShardedAdamW
from seatrial.train.step import (
    Contribution,
    expert_load,
    local_vector,
    train_step,
    update,
    vector_length,
)

L, X, K = ARCH.num_hidden_layers, 8, 2
EXPERTS: dict[str, Any] = {"num_experts": X, "num_experts_per_tok": K, "moe_intermediate_size": 8}
MIXTURE = replace(
    ARCH,
    family="qwen3_moe",
    qkv_bias=False,
    qk_norm=True,
    norm_topk_prob=True,
    router_aux_loss_coef=0.01,
    **EXPERTS,
)
NAMES = {"router_aux_loss", "expert_load_max", "expert_load_min", "idle_experts"}


def built(**settings: Any) -> ParallelModel:
    return ParallelModel(MIXTURE, mesh(), replace(SETTINGS, **settings), RandomWeights(MIXTURE, 0))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Two microbatches of two sequences."""
    ids = torch.randint(0, ARCH.vocab_size, (4, 17), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def count_by_hand(model: ParallelModel) -> Tensor:
    """[L, X], to which every call of a router adds where it sends positions."""
    count_LX = torch.zeros(L, X, dtype=torch.float64)

    def counting(count_X: Tensor) -> Callable[..., None]:
        def after(_module: nn.Module, _inputs: Any, logits_RX: Tensor) -> None:
            count_X.add_(logits_RX.topk(K).indices.flatten().bincount(minlength=X))

        return after

    for count_X, block in zip(count_LX, model.stages[0].blocks, strict=True):
        assert isinstance(block.mlp, SparseMLP)
        block.mlp.gate.register_forward_hook(counting(count_X))
    return count_LX


FULL = {"activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("settings", "times"),
    [
        ({}, (1, 1)),
        (FULL, (2, 2)),
        ({**FULL, "recompute_every_layers": 2}, (2, 1)),
        ({"activation_checkpointing": "selective"}, (2, 2)),
    ],
)
def test_a_position_counts_once(settings: dict[str, Any], times: tuple[int, ...]) -> None:
    """Also where the router of a layer runs twice for it: to count its calls would be wrong there."""
    model = built(**settings)
    model.validation_loss(*batch(1))  # no positions of a step
    by_hand_LX = count_by_hand(model)
    model.forward_backward(*batch(2))
    count_LX = model.take_expert_counts()
    assert count_LX is not None
    assert torch.equal(count_LX * torch.tensor(times)[:, None], by_hand_LX)
    assert count_LX.sum(1).tolist() == [4 * 16 * K] * L
    taken = model.take_expert_counts()
    assert taken is not None
    assert not taken.any()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([[4, 4, 4, 4], [1, 7, 8, 0], [0, 0, 5, 11]], [2.75, 0.0, 3.0]),
        ([[4, 4], [3, 5]], [1.25, 0.75, 0.0]),
        ([[2, 2, 2]], [1.0, 1.0, 0.0]),
    ],
)
def test_the_load_is_that_of_the_worst_layer(counts: list[list[int]], expected: list[float]) -> None:
    assert expert_load(torch.tensor(counts, dtype=torch.float64)).tolist() == expected


def test_a_step_has_the_load_of_its_own_positions() -> None:
    model = built()
    optimizer = ShardedAdamW(model.shards, OPTIMIZER)
    by_hand_LX = count_by_hand(model)
    loads = []
    for step in (2, 3):
        by_hand_LX.zero_()
        values = train_step(model, optimizer, *batch(step), lr=1e-2, clip_norm=1.0).values()
        assert list(values.expert_load) == expert_load(by_hand_LX).tolist()
        assert len(values.vector) == vector_length(1)
        loads.append(values.expert_load)
    assert loads[0] != loads[1]


def test_a_refused_update_moves_no_bias() -> None:
    deepseek = replace(MIXTURE, family="glm4_moe", sigmoid_router=True, n_shared_experts=1)
    model = ParallelModel(deepseek, mesh(), SETTINGS, RandomWeights(deepseek, 0))
    optimizer = ShardedAdamW(model.shards, OPTIMIZER)
    biases = [s.local for s in model.shards if is_router_bias(s.name)]
    assert len(biases) == L
    for refused in (True, False):
        assert local_vector(model, optimizer, (*batch(2), None), Contribution(), None).isfinite().all()
        norm = torch.tensor(math.nan if refused else 1.0, dtype=torch.float64)
        update(optimizer, torch.zeros((), dtype=torch.float64), norm, lr=1e-2, clip_norm=None)
        assert all(bool(bias.any()) != refused for bias in biases)
        optimizer.allow()


@pytest.mark.parametrize("late", [False, True])
def test_it_is_in_the_metrics_of_a_run_with_experts(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: read a step late, as on a GPU."""
    if late:
        late_device.install(monkeypatch.setattr)
    model = (f"model.{name}={value}" for name, value in EXPERTS.items())
    with_experts = Run(tmp_path / "with", "model.family=qwen3_moe", *model, arch=MIXTURE, late=late)
    without = Run(tmp_path / "without", late=late)
    lines = []
    for run in (with_experts, without):
        assert run.loop.run(1) == "done"
        lines.append([values for _, values in read_numbered(run.folder.metrics, "a record")[0]])
    assert not any(NAMES & values.keys() for values in lines[1])
    assert len(lines[0]) == 8
    for values in lines[0]:
        assert 0 <= values["expert_load_min"] < 1 < values["expert_load_max"] <= X / K
        assert (values["idle_experts"] > 0) == (values["expert_load_min"] == 0)
        assert values["router_aux_loss"] > K
