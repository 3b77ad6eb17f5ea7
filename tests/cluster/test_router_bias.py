"""DeepSeek-V3's routing, with shared experts: in every layout the training of one process, biases included."""

from __future__ import annotations

import pytest
import torch
from parity import (
    BF16,
    FULL,
    INTERLEAVED,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_same_load,
    assert_trains_alike,
    run_layouts,
)
from torch import Tensor

from conftest import each_case
from seatrial.job.parameters import is_router_bias

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

RATE = 0.001  # the default
# With Adam's usual 1e-8, gradients of that size, mostly rounding, move weights by a whole step; on some CPUs the rounding of
# compiled layers then sends a position to another expert in the second step.
OPTIMIZER = {"eps": 1e-6}
DENSE_FIRST: Case = {"first_dense": 1, "peer": "one-dense-first"}
CASES: dict[str, Case] = {
    "fsdp2": {"layout": {"shard": 2}},
    "tp2-pp2-fsdp2-selective-sharded": {"layout": FULL, **SELECTIVE, "accumulate": "sharded"},
    "pp2-zero-bubble-fsdp2": {"layout": {**ZERO_BUBBLE, "shard": 2}, "reshard_after_forward": False},
    "ep2-tp2-recompute": {"layout": {"tensor": 2, "shard": 2, "expert": 2}, **RECOMPUTE},
    "ep2-pp2-replicate2": {"layout": {"pipeline": 2, "replicate": 2, "shard": 2, "expert": 2}},
    "tp2-pp2-fsdp2-dense-first": {"layout": FULL, **RECOMPUTE, **DENSE_FIRST},
    "ep2-dense-first": {"layout": {"shard": 2, "expert": 2}, **SELECTIVE, **DENSE_FIRST},
    "cp2-tp2": {"layout": {"tensor": 2, "shard": 2, "context": 2}},
    "tp2": {"layout": {"tensor": 2}},
    "tp2-async": {"layout": {"tensor": 2}, "async_tensor": True},
    "pp2-interleaved": {"layout": INTERLEAVED},
    "pp2-offload": {"layout": {"pipeline": 2}, **OFFLOAD},
    "ep2-dense-first-compiled": {
        "layout": {"shard": 2, "expert": 2},
        **SELECTIVE,
        **DENSE_FIRST,
        "compile": True,
    },
    "pp2-fsdp2-compiled-offload": {"layout": {"pipeline": 2, "shard": 2}, **OFFLOAD, "compile": True},
    "replicate2-fsdp2": {"layout": {"replicate": 2, "shard": 2}},
}
# Each part of these is in another one too.
_LONG = {
    "pp2-fsdp2-compiled-offload",
    "cp2-tp2",
    "tp2",
    "tp2-async",
    "pp2-interleaved",
    "pp2-offload",
    "replicate2-fsdp2",
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-dense-first": {"first_dense": 1},
    "one-bf16": {"precision": "bf16"},
    "bf16": {"layout": FULL, "precision": "bf16", "peer": "one-bf16"},
    "sabotage": {"layout": {"shard": 2}, "sabotage": "biases moved by each rank's own positions"},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(
        request, OTHERS | CASES, optional=_LONG, family="glm4_moe", steps=2, optimizer=OPTIMIZER
    )


def biases(ran: Ran) -> list[dict[str, Tensor]]:
    """Of each rank."""
    return [{name: b for name, _, b in rank["weights"] if is_router_bias(name)} for rank in ran.ranks]


@each_case(CASES, long=_LONG)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)
    one = runs[runs[name].case["peer"]]
    assert_same_load(runs[name], one)
    (expected,) = biases(one)
    ranks = biases(runs[name])
    assert set().union(*ranks) == expected.keys()
    for rank in ranks:  # whole, and the same bits
        assert all(torch.equal(bias, expected[bias_name]) for bias_name, bias in rank.items())


def test_biases_move_by_the_rate_towards_an_even_load(runs: dict[str, Ran]) -> None:
    (rank,) = runs["one"].ranks
    for layer, (name, bias) in enumerate(sorted(biases(runs["one"])[0].items())):
        counts = torch.stack([count_LX[layer] for count_LX in rank["routed"]])
        moved = RATE * (counts.mean(1, keepdim=True) - counts).sign().sum(0)
        assert moved.any()
        generator = torch.Generator().manual_seed(sum(name.encode()))  # as `NoisyWeights` draws it
        start = 0.05 * torch.randn(len(bias), generator=generator)
        assert bias.tolist() == pytest.approx((start + moved).tolist(), abs=1e-7)


def test_biases_stay_in_fp32_where_layers_compute_in_bf16(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "bf16", **BF16)
    for rank in biases(runs["bf16"]):
        assert all(b.dtype == torch.float32 and (b != b.bfloat16()).any() for b in rank.values())


def test_counts_that_are_not_summed_are_seen(runs: dict[str, Ran]) -> None:
    (expected,) = biases(runs["one"])
    for rank in biases(runs["sabotage"]):
        assert any(not torch.equal(bias, expected[name]) for name, bias in rank.items())
