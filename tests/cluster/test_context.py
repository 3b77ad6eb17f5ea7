"""Context parallel: the training of one process, whatever it is combined with."""

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
    assert_trains_alike,
    compare,
    run_layouts,
)

from conftest import each_case

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

CP2 = {"shard": 2, "context": 2}
CP2_TP2 = {"tensor": 2, **CP2}
RING = {"ring_attention": True}
DOCUMENTS = {"documents": True, "peer": "one-documents"}
TIED_QWEN3 = {"tied": True, "family": "qwen3"}
CONTEXT: dict[str, Case] = {
    "cp2": {"layout": CP2},
    "cp2-tp2-documents": {"layout": CP2_TP2, **DOCUMENTS},
    "cp2-pp2-fsdp2": {"layout": {"pipeline": 2, "shard": 4, "context": 2}},
    "cp4-tied-qwen3": {
        "layout": {"shard": 4, "context": 4},
        **TIED_QWEN3,
        "accumulate": "sharded",
        "peer": "one-tied-qwen3",
    },
    "cp2-tp2-pp2-async-recompute": {"layout": {**CP2_TP2, "pipeline": 2}, "async_tensor": True, **RECOMPUTE},
    "cp2-tp2-compiled": {"layout": CP2_TP2, "compile": True},
    "cp2-compiled-documents": {"layout": CP2, "compile": True, **DOCUMENTS},
    "cp2-documents": {"layout": CP2, **DOCUMENTS},
    "cp2-tp2": {"layout": CP2_TP2},
    "cp2-pp2": {"layout": {"pipeline": 2, **CP2}},
    "cp2-fsdp2": {"layout": {"shard": 4, "context": 2}},
    "cp2-replicate2": {"layout": {"replicate": 2, **CP2}},
    "cp2-interleaved": {"layout": {**INTERLEAVED, **CP2}},
    "cp2-zero-bubble": {"layout": {**ZERO_BUBBLE, **CP2}, "reshard_after_forward": False},
    "cp2-recompute": {"layout": CP2, **RECOMPUTE},
    "cp2-tp2-selective-every2-documents": {
        "layout": CP2_TP2,
        **SELECTIVE,
        "recompute_every_layers": 2,
        **DOCUMENTS,
    },
    "cp2-selective": {"layout": CP2, **SELECTIVE},
    "cp2-selective-compiled": {"layout": CP2, **SELECTIVE, "compile": True},
    "cp2-pp2-sharded": {"layout": {"pipeline": 2, **CP2}, "accumulate": "sharded"},
    "ring4-tied-qwen3": {
        "layout": {"shard": 4, "context": 4},
        **RING,
        **TIED_QWEN3,
        "accumulate": "sharded",
        "peer": "one-tied-qwen3",
    },
    "ring2-tp2-pp2-async-recompute": {
        "layout": {**CP2_TP2, "pipeline": 2},
        **RING,
        "async_tensor": True,
        **RECOMPUTE,
    },
    "ring2-zero-bubble": {"layout": {**ZERO_BUBBLE, **CP2}, **RING, "reshard_after_forward": False},
    "ring2-tp2-selective-compiled": {"layout": CP2_TP2, **RING, **SELECTIVE, "compile": True},
}
# Each part of these is in another one too.
_LONG = {
    *("cp2-documents", "cp2-tp2", "cp2-pp2", "cp2-fsdp2", "cp2-replicate2", "cp2-interleaved"),
    *("cp2-recompute", "cp2-pp2-sharded", "cp2-selective", "cp2-selective-compiled"),
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-documents": {"documents": True},
    "one-tied-qwen3": TIED_QWEN3,
    "one-bf16": {"precision": "bf16"},
    "cp2-bf16": {"layout": CP2_TP2, "precision": "bf16", "peer": "one-bf16"},
    "ring4-bf16": {
        "layout": {"shard": 4, "context": 4},
        **RING,
        "precision": "bf16",
        "peer": "one-bf16",
    },
    "sabotage-order": {"layout": CP2, "sabotage": "keys in the order of ranks", "steps": 1},
    "sabotage-sum": {"layout": CP2, "sabotage": "gradients of keys not summed", "steps": 1},
    "sabotage-later": {"layout": CP2, **RING, "sabotage": "later keys seen", "steps": 1},
    "sabotage-lost": {"layout": CP2, **RING, "sabotage": "gradients of others' keys lost", "steps": 1},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | CONTEXT, optional=CONTEXT, steps=2)


@each_case(CONTEXT, long=_LONG)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


def test_bf16_is_the_same_training(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "cp2-bf16", **BF16)


@pytest.mark.parametrize(
    ("name", "loss_differs"),
    [("sabotage-order", True), ("sabotage-sum", False), ("sabotage-later", True), ("sabotage-lost", False)],
)
def test_a_fault_is_seen(name: str, loss_differs: bool, runs: dict[str, Ran]) -> None:
    found = compare(runs, name)
    assert (found.loss > LOSS_ABSOLUTE) == loss_differs
    assert found.worst > 100 * GRADIENT_OF_LARGEST
