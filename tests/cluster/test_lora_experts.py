"""Adapters of attention in models with experts: every layout trains as one process, and nothing else moves."""

from __future__ import annotations

import pytest
from parity import INTERLEAVED, RECOMPUTE, SELECTIVE, Case, Ran, assert_trains_alike, run_layouts
from parity_ranks import NoisyWeights, arch_of

from seatrial.base.box import Box

pytestmark = [pytest.mark.cluster, pytest.mark.ci]

LORA = {"lora": {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj", "o_proj"]}}
EP2 = {"shard": 2, "expert": 2}
CASES: dict[str, Case] = {
    "ep2-tp2": {"layout": {"tensor": 2, **EP2}},
    "ep2-pp2-fsdp2-recompute": {"layout": {"pipeline": 2, "shard": 4, "expert": 2}, **RECOMPUTE},
    "ep2-tp2-pp2-async-selective": {
        "layout": {"tensor": 2, "pipeline": 2, **EP2},
        "async_tensor": True,
        **SELECTIVE,
    },
    "ep2-interleaved-sharded": {"layout": {**INTERLEAVED, **EP2}, "accumulate": "sharded"},
    "cp2-ep2": {"layout": {"context": 2, **EP2}},
    "deepseek-ep2-tp2": {
        "layout": {"tensor": 2, **EP2},
        "family": "glm4_moe",
        "first_dense": 1,
        "peer": "one-deepseek",
    },
}
OTHERS: dict[str, Case] = {"one": {}, "one-deepseek": {"family": "glm4_moe", "first_dense": 1}}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> dict[str, Ran]:
    return run_layouts(request, OTHERS | CASES, optional=CASES, family="qwen3_moe", steps=2, **LORA)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_but_adapters_moves(name: str, runs: dict[str, Ran]) -> None:
    arch = arch_of(runs[name].case)
    before = NoisyWeights(arch, seed=1)
    moved = {
        name
        for name, values in runs[name].tensors("weights").items()
        if not values.equal(before.read(name, Box.whole(values.shape), values.dtype))
    }
    adapters = {f"{t}.lora_{m}.weight" for t in LORA["lora"]["targets"] for m in "AB"}
    wanted = {f"model.layers.{n}.self_attn.{a}" for n in range(arch.num_hidden_layers) for a in adapters}
    assert moved == wanted
