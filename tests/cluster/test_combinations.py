"""Features of training, many at a time, against one process, and the table of pairs in docs/combinations.md.

Each case has as many features as work together, so that few cases have all pairs that no other test has.
"""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from parity import (
    BF16,
    INTERLEAVED,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_trains_alike,
    run_layouts,
)

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

# With two data-parallel ranks each has two microbatches at first, then four.
USUAL: Case = {"tied": True, "masked": True, "ramp": [8, 16], "steps": 2}
MUON: Case = {"optimizer": {"name": "muon", "lr": 1e-3}}
# Gradients are those of the last step, so its weights must be those of the first where an update rounds.
STILL: Case = {"optimizer": {"name": "muon", "lr": 1e-12, "weight_decay": 0.0}}
LORA: Case = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "o_proj"]}}
DENSE: Case = {**USUAL, "documents": True}
EXPERTS: Case = {**USUAL, "family": "qwen3_moe"}
GPIPE = {"pipeline": 2, "schedule": "gpipe"}
RING = {"ring_attention": True}
EVERY_2ND = {"recompute_every_layers": 2}
SHARDED = {"accumulate": "sharded"}

BY_LAYOUT: dict[str, Case] = {
    "gpipe": {
        "layout": {**GPIPE, "tensor": 2, "shard": 2},
        **DENSE,
        **OFFLOAD,
        **EVERY_2ND,
        **SHARDED,
        "async_tensor": True,
    },
    "gpipe-ring": {
        "layout": {**GPIPE, "replicate": 2, "shard": 2, "context": 2},
        **EXPERTS,
        **SELECTIVE,
        **RING,
        "compile": True,
    },
    "gpipe-gathered": {
        "layout": {**GPIPE, "tensor": 2, "shard": 2, "context": 2},
        **DENSE,
        **OFFLOAD,
        **EVERY_2ND,
    },
    "gpipe-expert": {
        "layout": {**GPIPE, "tensor": 2, "shard": 2, "expert": 2},
        **EXPERTS,
        **SELECTIVE,
        "async_tensor": True,
    },
    "interleaved-ring-expert": {
        "layout": {**INTERLEAVED, "replicate": 2, "shard": 2, "context": 2, "expert": 2},
        **EXPERTS,
        **OFFLOAD,
        **EVERY_2ND,
        **RING,
        "compile": True,
    },
    "interleaved-ring": {
        "layout": {**INTERLEAVED, "shard": 4, "context": 2},
        **USUAL,
        **SELECTIVE,
        **RING,
        **SHARDED,
    },
    "zero-bubble": {
        "layout": {**ZERO_BUBBLE, "tensor": 2, "replicate": 2},
        **DENSE,
        **RECOMPUTE,
        **EVERY_2ND,
        "reshard_after_forward": False,
    },
}
UNCOMPILED: Case = {"compile": False}
PLAIN = {name: {**case, **MUON} for name, case in BY_LAYOUT.items()}
ADAPTERS = {
    f"{name}-lora": {**BY_LAYOUT[name], **LORA, **UNCOMPILED}
    for name in ("gpipe", "gpipe-ring", "interleaved-ring-expert")
}
IN_BF16 = {
    **{f"{name}-bf16": {**case, **STILL, "precision": "bf16"} for name, case in BY_LAYOUT.items()},
    "gpipe-lora-bf16": {**ADAPTERS["gpipe-lora"], "precision": "bf16"},
}
IN_BF16["interleaved-ring-expert-bf16"] |= UNCOMPILED
# Their products are those of one process, so that all scales are the same.
IN_FP8: dict[str, Case] = {
    "gpipe-fp8": {
        "layout": {**GPIPE, "replicate": 2},
        **DENSE,
        **OFFLOAD,
        **EVERY_2ND,
        **STILL,
        "precision": "fp8",
    },
    "interleaved-fp8": {
        "layout": {**INTERLEAVED, "shard": 2},
        **DENSE,
        **SELECTIVE,
        **STILL,
        "precision": "fp8",
    },
}
CASES = PLAIN | ADAPTERS | IN_BF16 | IN_FP8
_OF_ONE = ("tied", "masked", "ramp", "steps", "documents", "family", "optimizer", "lora", "precision")


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    ones = {f"one-{n}": {key: case[key] for key in _OF_ONE if key in case} for n, case in CASES.items()}
    return run_layouts(
        request, ones | {name: {**case, "peer": f"one-{name}"} for name, case in CASES.items()}
    )


@pytest.mark.parametrize("name", PLAIN)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    # The first update is orthogonalised in bf16, and moves the weights of the second step; see `test_muon`.
    assert_trains_alike(runs, name, worst=1e-3)
    assert_trains_alike(runs, name, worst=3e-3, what="weights")


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_train_as_in_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


@pytest.mark.parametrize("name", IN_BF16)
def test_in_bf16(name: str, runs: dict[str, Ran]) -> None:
    # A rounding may send a position to another expert.
    assert_trains_alike(runs, name, **{**BF16, "worst": math.inf if "family" in IN_BF16[name] else 0.1})


@pytest.mark.parametrize("name", IN_FP8)
def test_in_fp8(name: str, runs: dict[str, Ran]) -> None:
    # In one process both gradients of the tied embedding are added in bf16, over stages in fp32.
    assert_trains_alike(runs, name, loss=1e-9, norm=1e-5, worst=2**-8)


def test_the_table_of_pairs_is_up_to_date() -> None:
    script = Path(__file__).with_name("combinations.py")
    written = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert written.returncode == 0, f"{written.stderr}: run {script}"
