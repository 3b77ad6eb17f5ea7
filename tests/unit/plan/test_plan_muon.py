"""What Muon changes in a prediction: states that differ between parameters, matrix products and messages before the update."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from plan_cases import NDR, gpu

from presets import preset_job
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.job.optimizers import ADAMW, MUON, is_hidden_matrix
from seatrial.model.decoder import whole_shapes
from seatrial.plan.cost import muon
from seatrial.plan.cost.host import host_need
from seatrial.plan.cost.memory import rank_memory, rank_parameters
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.fit import account

DENSE, EXPERTS = model_presets()["qwen2.5-7b"], model_presets()["qwen3-30b-a3b"]
ADAM = Recipe(4096, 512, layout=Layout(shard=8))
RECIPE = replace(ADAM, optimizer="muon")


@pytest.mark.parametrize("arch", [DENSE, EXPERTS])
def test_matrices_are_those_of_the_decoder(arch: Architecture) -> None:
    found = {n: s for n, s in whole_shapes(arch).items() if is_hidden_matrix(n, s)}
    assert arch.hidden_matrix_parameters() == sum(map(math.prod, found.values()))
    each = sorted((*s[-2:], math.prod(s[:-2])) for n, s in found.items() if ".0." in n)
    split = sorted((a, b, n // kinds) for a, b, n in arch.hidden_matrices() for kinds in _kinds(arch, n))
    assert split == each


def _kinds(arch: Architecture, n: int) -> list[int]:
    return [2, 2] if n == 2 * arch.num_experts > 0 else [1]


@pytest.mark.parametrize("arch", [DENSE, EXPERTS])
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=4, pipeline=2, shard=2), Layout(replicate=2)])
def test_states_of_all_ranks(arch: Architecture, layout: Layout) -> None:
    recipe = replace(RECIPE, layout=layout)
    held = 0.0
    for rank in range(layout.pipeline):
        n, of_matrices = rank_parameters(arch, recipe, rank), muon.matrix_parameters(arch, recipe, rank)
        state = rank_memory(arch, recipe, stack_for(recipe), rank).optimizer
        assert state == pytest.approx((8 * n - 4 * of_matrices) / layout.shard)
        held += state * layout.shard * layout.tensor
    whole_on_tensor = arch.num_hidden_layers * (8 * arch.layer_norms + 4 * arch.router_parameters)
    whole_on_tensor += 8 * arch.hidden_size
    assert held == pytest.approx(MUON.bytes_of(arch) + (layout.tensor - 1) * whole_on_tensor)


def test_bytes_of_a_model() -> None:
    n, ends = DENSE.parameters(), 2 * DENSE.embedding_parameters()
    assert ADAMW.bytes_of(DENSE) == 8 * n
    assert 4 * n + 4 * ends < MUON.bytes_of(DENSE) < 1.001 * (4 * n + 4 * ends)
    (line,) = [line for line in account(DENSE, RECIPE).lines if line.name == "moments"]
    assert line.once == pytest.approx(MUON.bytes_of(DENSE))
    assert line.gpu == pytest.approx(MUON.bytes_of(DENSE) / 8)
    assert line.note == "exp_avg, exp_avg_sq: fp32; of matrices in layers momentum"


def test_copies_in_host_memory() -> None:
    def copies(*overrides: str) -> float:
        job = preset_job("qwen2.5-72b-b300", "cluster.nodes=2", "parallel.shard=1", *overrides)
        return host_need(job, "cuda").copies(2)

    arch = model_presets()["qwen2.5-72b"]
    saved = 5 * 4 * arch.hidden_matrix_parameters() / 2
    assert copies() - copies("optimizer.name=muon") == pytest.approx(saved, rel=0.01)


def test_flops_and_bytes_by_hand() -> None:
    """Of Qwen2.5-7B: q and o 3,584 x 3,584, k and v 512 x 3,584, and three of 18,944 x 3,584."""
    h, kv, f = 3584, 512, 18944
    layer = 2 * (4 * h**3 + 2 * h**3) + 2 * (4 * kv * kv * h + 2 * kv**3) + 3 * (4 * h * h * f + 2 * h**3)
    assert muon.flops(DENSE, RECIPE, 0) == pytest.approx(5 * 28 * layer / 8)
    each = 2 * DENSE.hidden_matrix_parameters() / 8  # bf16
    assert muon.sent_bytes(DENSE, RECIPE, 0) == pytest.approx(2 * each * 7 / 8)
    replicas = replace(RECIPE, layout=Layout(replicate=8))
    assert muon.sent_bytes(DENSE, replicas, 0) == pytest.approx((1 + 1 / 8) * 8 * each * 7 / 8)
    assert muon.flops(DENSE, replicas, 0) == muon.flops(DENSE, RECIPE, 0), "replicas divide them too"
    assert muon.sent_bytes(DENSE, replace(RECIPE, layout=Layout()), 0) == 0


@pytest.mark.parametrize(("nodes", "layout"), [(1, Layout(shard=8)), (2, Layout(replicate=2, shard=8))])
def test_an_update_takes_longer_than_adamws(nodes: int, layout: Layout) -> None:
    shape = Cluster(gpu("H100 SXM"), nodes=nodes, gpus_per_node=8, network=NDR)
    recipes = (replace(recipe, layout=layout) for recipe in (RECIPE, ADAM))
    ours, theirs = (predict(DENSE, recipe, shape) for recipe in recipes)
    a, b = ours.parts, theirs.parts
    print(f"update {1000 * b.optimizer:.1f} -> {1000 * a.optimizer:.1f} ms of {1000 * a.total:.0f} ms")
    least = muon.flops(DENSE, replace(RECIPE, layout=layout), 0) / 989e12
    assert b.optimizer + least < a.optimizer < 0.05 * a.total
    assert a.total - b.total == pytest.approx(a.optimizer - b.optimizer)
    sent = muon.sent_bytes(DENSE, replace(RECIPE, layout=layout), 0)
    assert ours.traffic.data - theirs.traffic.data == pytest.approx(sent)
    assert (ours.traffic.leaving.data > theirs.traffic.leaving.data) == (nodes > 1)
