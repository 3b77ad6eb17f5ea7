"""The dry run against real training steps: what it says of a rank is what that rank holds and sends."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from dryrun_derived import derived, held, held_biases
from dryrun_ranks import job_of
from parity import FULL, INTERLEAVED, OFFLOAD, RECOMPUTE, SELECTIVE, ZERO_BUBBLE, Case
from parity_ranks import LOGITS

from conftest import each_case, run_cases, selected_cases
from seatrial.job import loss_rows

pytestmark = pytest.mark.cluster

BF16 = {"precision": "bf16"}
FP8 = {"precision": "fp8"}
EXPERTS = {"family": "qwen3_moe", **BF16}
DEEPSEEK = {"family": "glm4_moe", **BF16}
# Two layers and two microbatches, where there is no pipeline: a trace takes as long as it has operations.
LITTLE = {"microbatch": 8, "layers": 2}
LAYOUTS: dict[str, Case] = {
    "one": LITTLE,
    "one-bf16": {**BF16, **RECOMPUTE},
    "tp2": {"layout": {"tensor": 2}},
    "tp2-tied-qwen3": {"layout": {"tensor": 2}, "tied": True, "family": "qwen3", **LITTLE},
    "fsdp2": {"layout": {"shard": 2}, **BF16},
    "fsdp3": {"layout": {"shard": 3}, **BF16},
    "replicate2-fsdp2": {"layout": {"replicate": 2, "shard": 2}},
    "replicate2-fsdp2-sharded": {
        "layout": {"replicate": 2, "shard": 2},
        "accumulate": "sharded",
        "microbatch": 2,
    },
    "pp2": {"layout": {"pipeline": 2}},
    "pp4-tied": {"layout": {"pipeline": 4}, "tied": True},
    "pp2-gpipe": {"layout": {"pipeline": 2, "schedule": "gpipe"}, "layers": 5},
    "tp2-pp2-fsdp2": {"layout": FULL, **BF16},
    "tp2-pp2-fsdp2-recompute": {"layout": FULL, **BF16, **RECOMPUTE},
    "tp2-pp2-fsdp2-offload": {"layout": FULL, **BF16, **OFFLOAD, "layers": 6},
    "tp2-pp2-fsdp2-selective": {"layout": FULL, **BF16, **SELECTIVE},
    "tp2-recompute-every3": {
        "layout": {"tensor": 2},
        **RECOMPUTE,
        "recompute_every_layers": 3,
        "microbatch": 8,
    },
    "one-selective": {**BF16, **SELECTIVE, "recompute_every_layers": 2, **LITTLE},
    "tp2-pp2-fsdp2-selective-async": {"layout": FULL, **BF16, **SELECTIVE, "async_tensor": True},
    "tp2-pp2-fsdp2-sharded": {"layout": FULL, **BF16, "accumulate": "sharded"},
    "interleaved": {"layout": {**INTERLEAVED, "shard": 2}, **BF16},
    "zero-bubble": {"layout": {**ZERO_BUBBLE, "shard": 2}},
    "tp2-async": {"layout": {"tensor": 2}, "async_tensor": True},
    "tp4-async-positions": {
        "layout": {"tensor": 4},
        "microbatch": 1,
        "kv_heads": 4,
        "async_tensor": True,
    },
    "tp2-pp2-fsdp2-recompute-async": {"layout": FULL, **BF16, **RECOMPUTE, "async_tensor": True},
    "zero-bubble-tp2": {"layout": {**ZERO_BUBBLE, "tensor": 2}},
    "zero-bubble-tp2-async": {"layout": {**ZERO_BUBBLE, "tensor": 2}, "async_tensor": True},
    "cp2-tp2-recompute": {"layout": {"tensor": 2, "shard": 2, "context": 2}, **BF16, **RECOMPUTE},
    "cp2-tp2-selective-every2": {
        "layout": {"tensor": 2, "shard": 2, "context": 2},
        **BF16,
        **SELECTIVE,
        "recompute_every_layers": 2,
    },
    "cp2-pp2": {"layout": {"pipeline": 2, "shard": 2, "context": 2}},
    "ring2-tp2-selective": {
        "layout": {"tensor": 2, "shard": 2, "context": 2},
        "ring_attention": True,
        **BF16,
        **SELECTIVE,
    },
    "one-experts": {**EXPERTS, **LITTLE},
    "tp2-pp2-fsdp2-experts": {"layout": FULL, **EXPERTS, **SELECTIVE},
    "ep2-tp2-experts": {
        "layout": {"tensor": 2, "shard": 2, "expert": 2},
        **EXPERTS,
        "all_experts": True,
        **SELECTIVE,
        **LITTLE,
    },
    "ep2-pp2-fsdp2-experts": {
        "layout": {"pipeline": 2, "shard": 4, "expert": 2},
        **EXPERTS,
        "all_experts": True,
        **RECOMPUTE,
        "microbatch": 2,
    },
    "ep2-replicate2-fsdp2-experts": {
        "layout": {"replicate": 2, "shard": 4, "expert": 2},
        **EXPERTS,
        "all_experts": True,
        "accumulate": "sharded",
        "microbatch": 1,
        "layers": 2,
    },
    "tp2-pp2-fsdp2-deepseek": {"layout": FULL, **DEEPSEEK, **SELECTIVE, "first_dense": 1},
    "cp2-ep2-tp2-deepseek": {
        "layout": {"tensor": 2, "shard": 2, "expert": 2, "context": 2},
        **DEEPSEEK,
        "all_experts": True,
        **LITTLE,
    },
    "tp2-pp2-fsdp2-lora-selective": {
        "layout": FULL,
        **BF16,
        **SELECTIVE,
        "lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "o_proj", "down_proj"]},
    },
    "one-fp8": {**FP8, **LITTLE},
    "one-mxfp8": {**FP8, **LITTLE, "fp8_scaling": "mxfp8"},
    "tp2-pp2-fsdp2-fp8-async": {"layout": FULL, **FP8, **SELECTIVE, "async_tensor": True},
    "pp2-documents": {"layout": {"pipeline": 2}, "documents": True, "layers": 2},
    "tp2-pp2-documents": {"layout": {"tensor": 2, "pipeline": 2}, "documents": True},
}
CASES = {
    name: {"name": name, "layout": {}, "tied": False, "precision": "fp32", **case}
    for name, case in LAYOUTS.items()
}
# Everything that these say by themselves is also part of one of the others.
_LONG = (
    *("one-bf16", "tp2", "tp2-async", "fsdp2", "pp2", "pp2-gpipe", "pp4-tied", "cp2-pp2", "zero-bubble"),
    *(f"tp2-pp2-fsdp2{end}" for end in ("", "-recompute", "-selective", "-sharded")),
    *("tp2-recompute-every3", "tp4-async-positions", "zero-bubble-tp2-async", "tp2-pp2-documents"),
    "ep2-replicate2-fsdp2-experts",
)
_WITH_LORA = "tp2-pp2-fsdp2-lora-selective"
# Not in `make test`.
_CI = CASES.keys() - {"one", "tp2-pp2-fsdp2-selective-async", "ep2-tp2-experts", *_LONG}
_each = partial(each_case, long=_LONG, ci=_CI)
every_case = _each(CASES)
# What is derived by hand is of models that are trained as a whole; LoRA's: test_plan_agrees.
every_whole = _each([name for name in CASES if name != _WITH_LORA])


@pytest.fixture(scope="module")
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case that a selected test reads, run once; no real ranks where only the dry run is read."""
    folder = tmp_path_factory.mktemp("dryrun")
    wanted = selected_cases(request)
    cases = [
        {**case, "only_dry": name not in wanted}
        for name, case in CASES.items()
        if wanted & {name, name.removesuffix("-async")}
    ]
    done = run_cases(cases, folder, timeout_s=900, script="dryrun_ranks.py")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def both(out: Path, name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(real, dry) of each rank."""
    dry = _dry(out, name)
    return [(torch.load(out / f"{name}.{r}.pt", weights_only=True), traced) for r, traced in enumerate(dry)]


def _dry(out: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((out / f"{name}.dry.json").read_text())["traces"]
    return found


def peak(traced: dict[str, Any]) -> int:
    return max(sum(kinds.values()) for kinds in traced["peaks"].values())


@every_whole
def test_parameters_gradients_and_optimizer_state_are_exact(name: str, out: Path) -> None:
    job = job_of(CASES[name])
    for rank, (real, dry) in enumerate(both(out, name)):
        assert dry["bytes"] == real["bytes"]
        # Against what the real rank holds, and against the sizes by hand: fp32, and one step count a parameter.
        assert dry["bytes"]["parameters"] == real["held"] == 4 * held(job, rank)
        trained = real["held"] - 4 * held_biases(job, rank)
        assert dry["bytes"]["gradients"] == trained
        assert dry["bytes"]["optimizer"] == real["state"] + real["scalars"]
        assert real["state"] == 2 * trained


@pytest.mark.ci
@pytest.mark.parametrize("name", [_WITH_LORA])
def test_frozen_parameters_have_no_gradients_and_no_state(name: str, out: Path) -> None:
    for real, dry in both(out, name):
        assert dry["bytes"] == real["bytes"]
        assert dry["bytes"]["parameters"] == real["held"] > 5 * dry["bytes"]["gradients"] > 0
        assert real["state"] == 2 * dry["bytes"]["gradients"]
        assert dry["bytes"]["optimizer"] == real["state"] + real["scalars"]


@every_case
def test_collectives_are_exact(name: str, out: Path) -> None:
    """Against the calls of a real step, seen by the same eyes and by others."""
    for real, dry in both(out, name):
        assert dry["collectives"] == real["collectives"]
        flown: Counter[tuple[str, str, int]] = Counter()
        messages: Counter[tuple[str, int]] = Counter()
        for kind, dimension, _, n_bytes, calls in dry["collectives"]:
            if kind in ("send", "receive"):
                messages[kind, n_bytes] += calls
            else:
                # gloo makes a reduce-scatter of an all-reduce of the same bytes, and that is what it records.
                flown[kind if kind in ("all-gather", "all-to-all") else "all-reduce", dimension, n_bytes] += (
                    calls
                )
        assert sorted([*key, calls] for key, calls in flown.items()) == real["flown"]
        assert sorted([*key, calls] for key, calls in messages.items()) == real["messages"]


@every_whole
def test_collectives_are_those_derived_by_hand(name: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_rows, "LOGITS", LOGITS)  # as in the ranks
    job = job_of(CASES[name])
    for rank, (_, dry) in enumerate(both(out, name)):
        counted: Counter[tuple[str, str, str]] = Counter()
        payload: Counter[tuple[str, str, str]] = Counter()
        for kind, dimension, dtype, n_bytes, calls in dry["collectives"]:
            counted[kind, dimension, dtype] += calls
            payload[kind, dimension, dtype] += calls * n_bytes
        assert {key: (counted[key], payload[key]) for key in counted} == derived(job, rank, "cpu")


@every_case
def test_flops_are_exact(name: str, out: Path) -> None:
    for real, dry in both(out, name):
        assert dry["flops"] == real["flops"]


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(n, marks=pytest.mark.long) for n in ("tp2", "tp2-pp2-fsdp2-recompute")),
        "zero-bubble-tp2",
    ],
)
def test_async_tensor_parallel_has_the_same_flops_and_traffic(name: str, out: Path) -> None:
    """Nothing twice, where a layer is recomputed or where a schedule comes for the weights' gradients later."""
    told = []
    for case in (name, f"{name}-async"):
        payload: list[Counter[tuple[str, str, str]]] = []
        for dry in _dry(out, case):
            payload.append(Counter())
            for kind, dimension, dtype, n_bytes, calls in dry["collectives"]:
                payload[-1][kind, dimension, dtype] += calls * n_bytes
        told.append((payload, [dry["flops"] for dry in _dry(out, case)]))
    assert told[0] == told[1]


# Bytes of messages that gloo still holds, where they are more than 5 % of a small model: the same with torch's own norm.
HELD = {"zero-bubble-tp2": 12 * 16_384}


@every_case
def test_memory_is_that_of_a_real_step(name: str, out: Path) -> None:
    """Live bytes as torch allocates them, to the byte where nobody communicates.

    gloo's threads hold a message for a moment after it is done, and copy some: the real peak may be a little
    higher, and never lower.
    """
    ranks = both(out, name)
    if len(ranks) == 1:
        assert json.loads((out / f"{name}.dry.json").read_text())["second"]["peaks"] == ranks[0][0]["peaks"]
    for real, dry in ranks:
        assert peak(dry) <= peak(real) <= peak(dry) + max(0.05 * peak(dry), HELD.get(name, 0))


@every_case
def test_the_first_step_is_like_the_second(name: str, out: Path) -> None:
    """So one traced step is enough."""
    told = json.loads((out / f"{name}.dry.json").read_text())
    first, second = told["traces"][0], told["second"]
    assert first["bytes"] == second["bytes"]
    assert first["collectives"] == second["collectives"]
    assert first["flops"] == second["flops"]
    assert peak(first) == peak(second)
