"""LoRA: the adapters train alike in every layout; a killed run resumes bit for bit, and its export is what was trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_parity import (
    GRADIENT_OF_LARGEST,
    LAYOUTS,
    LOSS_ABSOLUTE,
    NORM_RELATIVE,
    Ran,
    _differences,
    _reference,
    _worst,
    read_runs,
)

from conftest import run_cases
from seatrial.job.lora import LORA_TARGETS

pytestmark = pytest.mark.cluster

ALL = {"rank": 4, "alpha": 8.0, "targets": LORA_TARGETS}
# Of a projection group some, of another none; nothing before `v_proj` needs a gradient in the first layer.
SOME = {"rank": 3, "alpha": 6.0, "targets": ["v_proj", "down_proj"]}
LATE = {"rank": 3, "alpha": 6.0, "targets": ["up_proj"]}
FULL = LAYOUTS["tp2-pp2-fsdp2"]
ZERO_BUBBLE = {**LAYOUTS["pp2-zero-bubble"], "shard": 2}
# Name -> (the case, who must train alike).
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tp2": ({"layout": {"tensor": 2}}, "one"),
    "fsdp2": ({"layout": {"shard": 2}}, "one"),
    "pp2": ({"layout": {"pipeline": 2}}, "one"),
    "tp2-some": ({"layout": {"tensor": 2}, "lora": SOME}, "one-some"),
    "tp2-pp2-fsdp2": ({"layout": FULL}, "one"),
    "tp2-pp2-fsdp2-tied-some": ({"layout": FULL, "tied": True, "lora": SOME}, "one-tied-some"),
    "tp2-pp2-fsdp2-late": ({"layout": FULL, "lora": LATE}, "one-late"),
    "tp2-pp2-fsdp2-sharded-recompute": (
        {"layout": FULL, "accumulate": "sharded", "activation_checkpointing": "full"},
        "one",
    ),
    "tp2-async-selective": (
        {"layout": {"tensor": 2}, "async_tensor": True, "activation_checkpointing": "selective"},
        "one",
    ),
    "tp2-async-late": ({"layout": {"tensor": 2}, "async_tensor": True, "lora": LATE}, "one-late"),
    "tp2-fsdp2-compiled": ({"layout": {"tensor": 2, "shard": 2}, "compile": True}, "one"),
    "fsdp2-compiled-some": ({"layout": {"shard": 2}, "compile": True, "lora": SOME}, "one-some"),
    "replicate2-fsdp2-sharded": (
        {"layout": {"replicate": 2, "shard": 2}, "accumulate": "sharded"},
        "one",
    ),
    # More ranks than rows of A: some hold none of it.
    "fsdp8": ({"layout": {"shard": 8}}, "one"),
    "cp2-tp2": ({"layout": {"tensor": 2, "shard": 2, "context": 2}}, "one"),
    "pp2-interleaved": ({"layout": LAYOUTS["pp2-interleaved"]}, "one"),
    "pp2-zero-bubble-fsdp2": ({"layout": ZERO_BUBBLE, "reshard_after_forward": False}, "one"),
    "tp2-pp2-zero-bubble-some": (
        {"layout": {**LAYOUTS["pp2-zero-bubble"], "tensor": 2}, "lora": SOME},
        "one-some",
    ),
    "one-selective": ({"layout": {}, "activation_checkpointing": "selective"}, "one"),
    "one-moments": ({"layout": {}, "optimizer": {"name": "adamw_bf16"}}, "one"),
}
ONE: dict[str, dict[str, Any]] = {
    "one": {},
    "one-some": {"lora": SOME},
    "one-tied-some": {"lora": SOME, "tied": True},
    "one-late": {"lora": LATE},
    "one-bf16": {"precision": "bf16"},
    "bf16": {"precision": "bf16", "layout": FULL},
    "sabotaged": {"layout": {"tensor": 2}, "sabotage": "norm gradients not summed", "steps": 1},
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    out = tmp_path_factory.mktemp("lora")
    selected = [item for item in request.session.items if item.path == request.path]
    wanted = {item.callspec.params.get("name") for item in selected if hasattr(item, "callspec")}
    named = ONE | {name: case for name, (case, _) in CASES.items() if name in wanted}
    usual = {"layout": {}, "tied": False, "steps": 3, "lora": ALL}
    cases = [{"name": name, **usual, **case} for name, case in named.items()]
    done = run_cases(cases, out, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_runs(out, cases)


@pytest.mark.parametrize("name", [n for n in CASES if n != "one-moments"])
def test_a_layout_trains_adapters_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    peer = CASES[name][1]
    loss, norm = _differences(runs[name], runs[peer])
    gradient, whose = _worst(runs[name], "gradients", _reference(runs, peer, "gradients"))
    print(f"{name}: loss {loss:.1e}, norm {norm:.1e}, gradient {gradient:.1e} ({whose})")
    assert loss <= LOSS_ABSOLUTE
    assert norm <= NORM_RELATIVE
    assert gradient <= GRADIENT_OF_LARGEST, whose


def test_only_adapters_are_trained(runs: dict[str, Ran]) -> None:
    (rank,) = runs["one"].ranks
    assert len(rank["gradients"]) == 4 * 7 * 2
    assert all(".lora_" in name for name, _, _ in rank["gradients"])
    before = {name: values for name, _, values in runs["one-selective"].ranks[0]["weights"]}
    after = {name: values for name, _, values in runs["one-moments"].ranks[0]["weights"]}
    for name, values in before.items():  # other optimizers: equal are those that neither changed
        assert torch.equal(values, after[name]) != (".lora_" in name), name


def test_bf16_trains_alike(runs: dict[str, Ran]) -> None:
    loss, norm = _differences(runs["bf16"], runs["one-bf16"])
    assert loss < 0.02
    assert norm < 0.03
    loss, _ = _differences(runs["one-bf16"], runs["one"])
    assert 0 < loss < 0.05


def test_a_lost_sum_over_tensor_ranks_is_seen(runs: dict[str, Ran]) -> None:
    """Of column-cut layers A, of row-cut ones B: each rank's gradient is of its own positions."""
    reference = _reference(runs, "one", "gradients")
    errors = {
        name: float((ours - theirs).abs().max() / reference[name].abs().max())
        for name, ours, theirs in runs["sabotaged"].whole("gradients", reference)
    }
    wrong = {name.split(".", 3)[3] for name, error in errors.items() if error > 100 * GRADIENT_OF_LARGEST}
    row = ("self_attn.o_proj", "mlp.down_proj")
    column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert wrong == {f"{n}.lora_B.weight" for n in row} | {f"{n}.lora_A.weight" for n in column}
