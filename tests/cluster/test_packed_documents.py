"""Attention within documents by a kernel for sequences of different lengths: the training of one process with a bias.

The kernel is CUDA's; here the CPU computes what it does, one document at a time (`flash_on_cpu`).
"""

from __future__ import annotations

import pytest
from parity import (
    BF16,
    FULL,
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

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

PACKED: dict[str, Case] = {
    "all-at-once": {"microbatch": 16},
    "fsdp2-compiled": {"layout": {"shard": 2}, "compile": True},
    "tp2-async-recompute": {"layout": {"tensor": 2}, "async_tensor": True, **RECOMPUTE},
    "pp2-interleaved": {"layout": INTERLEAVED},
    "zero-bubble": {"layout": ZERO_BUBBLE},
    "tp2-pp2-fsdp2-selective": {"layout": FULL, **SELECTIVE, "accumulate": "sharded"},
    "cp2-fsdp2": {"layout": {"shard": 4, "context": 2}, **SELECTIVE},
    "cp2-tp2-compiled": {"layout": {"tensor": 2, "shard": 2, "context": 2}, "compile": True},
    "ep2-experts": {"layout": {"shard": 2, "expert": 2}, "family": "qwen3_moe", "peer": "one-experts"},
}
OTHERS: dict[str, Case] = {
    "one": {},
    "one-experts": {"family": "qwen3_moe"},
    "one-bf16": {"precision": "bf16"},
    "packed-bf16": {"precision": "bf16", "packed": True, "peer": "one-bf16"},
    "sabotage": {"layout": INTERLEAVED, "packed": True, "sabotage": "documents of another microbatch", "steps": 1},
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    cases = OTHERS | {name: {**case, "packed": True} for name, case in PACKED.items()}
    return run_layouts(request, cases, optional=PACKED, steps=2, documents=True)


@pytest.mark.parametrize("name", PACKED)
def test_it_trains_as_one_process_with_a_bias(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


def test_in_bf16_it_is_as_close_as_its_products_are(runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, "packed-bf16", **BF16)


def test_documents_of_another_microbatch_are_seen(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage")
    assert found.loss > 100 * LOSS_ABSOLUTE
    assert found.worst > 100 * GRADIENT_OF_LARGEST
