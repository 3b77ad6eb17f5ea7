"""Expert parallel: the training of one process, whatever it is combined with."""

from __future__ import annotations

import pytest
from parity import (
    BF16,
    GRADIENT_OF_LARGEST,
    INTERLEAVED,
    LOSS_ABSOLUTE,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_same_load,
    assert_trains_alike,
    compare,
    run_layouts,
)

from conftest import each_case

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

EP2 = {"shard": 2, "expert": 2}
EP2_FSDP2 = {"shard": 4, "expert": 2}
SHARDED = {"accumulate": "sharded"}
KEPT = {"reshard_after_forward": False}
EXPERT: dict[str, Case] = {
    "ep2": {"layout": EP2},
    "ep2-tp2-selective": {"layout": {"tensor": 2, **EP2}, **SELECTIVE},
    "ep2-pp2-fsdp2-recompute": {"layout": {"pipeline": 2, **EP2_FSDP2}, **RECOMPUTE},
    "ep2-replicate2-fsdp2-sharded": {
        "layout": {"replicate": 2, **EP2_FSDP2},
        **SHARDED,
        "microbatch": 1,
        "peer": "one-small",
    },
    "ep2-zero-bubble": {"layout": {**ZERO_BUBBLE, **EP2}, **KEPT},
    "cp2-ep2-tp2-recompute": {"layout": {"tensor": 2, "context": 2, **EP2}, **RECOMPUTE},
    "cp2-pp2": {"layout": {"pipeline": 2, "shard": 2, "context": 2}},
    "cp2-ep2-fsdp2-documents": {
        "layout": {"context": 2, **EP2_FSDP2},
        "documents": True,
        "peer": "one-documents",
    },
    "ep2-documents": {"layout": EP2, "documents": True, "peer": "one-documents"},
    "ep2-one-sided": {"layout": EP2, "one_sided": True, "steps": 1, "peer": "one-one-sided"},
    "ep4-tied": {"layout": {"shard": 4, "expert": 4}, "tied": True, "peer": "one-tied"},
    "ep2-pp2": {"layout": {"pipeline": 2, **EP2}},
    "ep2-tp2": {"layout": {"tensor": 2, **EP2}},
    "ep2-fsdp2": {"layout": EP2_FSDP2},
    "ep2-replicate2": {"layout": {"replicate": 2, **EP2}},
    "ep2-recompute": {"layout": EP2, **RECOMPUTE},
    "ep2-interleaved": {"layout": {**INTERLEAVED, **EP2}},
    "ep2-tp2-pp2-async": {"layout": {"tensor": 2, "pipeline": 2, **EP2}, "async_tensor": True},
    "ep2-zero-bubble-fsdp2-recompute": {"layout": {**ZERO_BUBBLE, **EP2_FSDP2}, **KEPT, **RECOMPUTE},
    "ep2-pp2-sharded": {"layout": {"pipeline": 2, **EP2}, **SHARDED},
    "ep2-tp2-compiled": {"layout": {"tensor": 2, **EP2}, "compile": True},
    "ep2-pp2-compiled-selective": {"layout": {"pipeline": 2, **EP2}, "compile": True, **SELECTIVE},
    "ep2-compiled-recompute": {"layout": EP2, "compile": True, **RECOMPUTE},
}
# Each part of these is in another one too.
_LONG = {
    *(
        "cp2-pp2",
        "cp2-ep2-fsdp2-documents",
        "ep2-pp2",
        "ep2-tp2",
        "ep2-fsdp2",
        "ep2-replicate2",
        "ep2-recompute",
        "ep2-interleaved",
    ),
    *("ep2-tp2-pp2-async", "ep2-zero-bubble-fsdp2-recompute", "ep2-pp2-sharded"),
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-documents": {"documents": True},
    "one-small": {"microbatch": 1},  # the balance loss is of each microbatch
    "one-tied": {"tied": True},
    "one-one-sided": {"one_sided": True, "steps": 1},
    "one-bf16": {"precision": "bf16"},
    "ep2-bf16": {"layout": {"tensor": 2, **EP2}, "precision": "bf16", "peer": "one-bf16"},
    "sabotage-balance": {
        "layout": {"shard": 2, "context": 2},
        "sabotage": "balance of own positions",
        "steps": 1,
    },
    "sabotage-order": {"layout": EP2, "sabotage": "slots returned in the order of experts", "steps": 1},
    "sabotage-sum": {"layout": EP2_FSDP2, "sabotage": "gradients of experts not summed", "steps": 1},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | EXPERT, optional=_LONG, family="qwen3_moe", steps=2)


@each_case(EXPERT, long=_LONG)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)
    ran, one = runs[name], runs[runs[name].case["peer"]]
    assert ran.ranks[0]["balance"] == pytest.approx(one.ranks[0]["balance"], rel=1e-5)
    assert_same_load(ran, one)


def test_bf16_is_the_same_training(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "ep2-bf16", **BF16)


def test_experts_that_get_nothing(runs: dict[str, Ran]) -> None:
    """The second rank's experts of `ep2-one-sided`: what is compared there is no accident."""
    for name, _, gradient in runs["ep2-one-sided"].ranks[1]["gradients"]:
        if ".experts." in name:
            assert not gradient.any(), name
    for _, smallest, idle in runs["ep2-one-sided"].ranks[0]["load"]:
        assert (smallest, idle) == (0.0, 4 * 4)  # half of the experts of each layer


def test_a_balance_of_some_positions_is_seen(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage-balance")
    assert found.loss < LOSS_ABSOLUTE
    assert found.worst > 100 * GRADIENT_OF_LARGEST
    assert "mlp.gate" in found.whose


@pytest.mark.parametrize(("name", "loss_differs"), [("sabotage-order", True), ("sabotage-sum", False)])
def test_a_fault_is_seen(name: str, loss_differs: bool, runs: dict[str, Ran]) -> None:
    found = compare(runs, name)
    assert (found.loss > LOSS_ABSOLUTE) == loss_differs
    assert found.worst > 100 * GRADIENT_OF_LARGEST
    assert loss_differs or ".experts." in found.whose
