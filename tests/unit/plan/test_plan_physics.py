"""The effect of single mechanisms: messages between tensor groups, stragglers, memory outside torch's allocator."""

from __future__ import annotations

from dataclasses import replace

import pytest

import seatrial.plan.cost.work
from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.job.schedules import schedule_named
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.memory import GIB, GROUP_BYTES, layer_activations, rank_memory
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import SLOWER_BY_DOUBLING, rank_traffic, slowest, step_parts
from seatrial.plan.cost.work import work
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

MODEL = model_presets()["llama3-70b"]
A100 = find_gpu("A100-80GB SXM")
assert A100 is not None
CLUSTER = Cluster(A100, 16, 8, find_network("InfiniBand HDR 4x200"))
FABRIC = Fabric(CLUSTER)
OURS, OLD = stacks()["seatrial"], stacks()["megatron-2021"]
RECIPE = Recipe(2048, 256, 2, layout=Layout(tensor=8, pipeline=4, shard=4), sharding="none", recompute="full")


def test_a_tensor_group_sends_parts_to_the_next_stage() -> None:
    """arXiv:2104.04473 section 4.1: with sequence parallel or without, each rank sends its part of the hidden states."""
    plain = replace(RECIPE, sequence_parallel=False)
    parts = [rank_traffic(MODEL, r, FABRIC, OLD, 1).pipeline for r in (RECIPE, plain)]
    assert parts[0] == parts[1]
    seconds = [step_parts(MODEL, r, FABRIC, OLD, 1.0).pipeline for r in (RECIPE, plain)]
    assert (
        seconds[0] < seconds[1] < 3 * seconds[0]
    )  # what is sent in parts has to be gathered again, over NVLink


def test_a_step_waits_for_the_slowest_of_more_gpus() -> None:
    assert slowest(1) == 1.0
    assert slowest(1024) - slowest(512) == pytest.approx(SLOWER_BY_DOUBLING)
    recipe = Recipe(4096, 64, layout=Layout(tensor=8, shard=4))
    steps = []
    for nodes in (4, 8, 16):
        assert A100 is not None
        grown = replace(recipe, layout=replace(recipe.layout, shard=nodes), global_batch=16 * nodes)
        at = Fabric(Cluster(A100, nodes, 8, find_network("InfiniBand NDR 8x400")))
        steps.append(step_parts(MODEL, grown, at, OURS, 1.0).products)
    assert steps[0] < steps[1] < steps[2] < 1.02 * steps[0]


def test_gaps_between_kernels_weigh_most_on_small_microbatches() -> None:
    blocking = replace(OLD, gap_s=1e-3)
    lost = []
    for micro in (1, 2, 4):
        recipe = replace(RECIPE, microbatch=micro)
        calm, held = (step_parts(MODEL, recipe, FABRIC, s, 1.0).total for s in (OLD, blocking))
        lost.append(held / calm - 1)
    assert lost[0] > lost[1] > lost[2] > 0


def test_nccl_keeps_buffers_for_every_group() -> None:
    alone = rank_memory(MODEL, Recipe(2048, 8), OURS, 0)
    assert alone.runtime == OURS.context_gib * GIB
    flat = rank_memory(MODEL, Recipe(2048, 8, layout=Layout(shard=8)), OURS, 0)
    assert (
        flat.runtime == OURS.context_gib * GIB + 2 * GROUP_BYTES
    )  # all ranks, and those that share out states
    deep = rank_memory(MODEL, Recipe(2048, 64, layout=Layout(tensor=8, pipeline=4, shard=4)), OURS, 1)
    assert (
        deep.runtime == OURS.context_gib * GIB + (1 + 2 + 2) * GROUP_BYTES
    )  # two dimensions, two neighbours
    assert deep.reserved == pytest.approx(1.04 * deep.allocated + deep.streams + deep.runtime)


def test_fp8_keeps_weights_twice_and_inputs_once() -> None:
    """Transformer Engine; ours has no fp8 and keeps what it kept."""
    recipe, theirs = Recipe(4096, 8, layout=Layout(shard=8), sharding="optimizer"), stacks()["megatron"]
    plain, eight = (
        rank_memory(MODEL, replace(recipe, precision=p), theirs, 0).parameters for p in ("bf16", "fp8")
    )
    assert eight - plain == 2 * MODEL.num_hidden_layers * MODEL.layer_matrix_parameters()
    kept = [layer_activations(MODEL, replace(recipe, precision=p), theirs) for p in ("bf16", "fp8")]
    assert 0.7 * kept[0] < kept[1] < 0.95 * kept[0]
    ours = [layer_activations(MODEL, replace(recipe, precision=p), OURS) for p in ("bf16", "fp8")]
    assert ours[0] == ours[1]


def test_slow_copies_of_offloaded_inputs_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input to the host beside a forward pass, and back beside a backward pass with its recomputation."""
    plain = replace(RECIPE, layout=Layout(tensor=8, pipeline=4, shard=4), sharding="full")
    offload = replace(plain, offload=True)
    pace = slowest(plain.world)
    w = work(MODEL, plain, FABRIC, OURS, pace)
    assert work(MODEL, offload, FABRIC, OURS, pace) == w, "hidden"
    copy_s = 1.5 * w.forward.total
    n_bytes = 2 * 2 * 2048 * MODEL.hidden_size / 8
    monkeypatch.setattr(seatrial.plan.cost.work, "HOST_GB_S", n_bytes / copy_s / 1e9)
    waits = 0.5 * w.forward.total  # a backward pass is longer
    again = work(MODEL, offload, FABRIC, OURS, pace).again
    assert again.total - w.again.total == pytest.approx(waits)
    steps = [step_parts(MODEL, r, FABRIC, OURS, 1.0) for r in (plain, offload)]
    # 32 microbatches, 20 layers a rank.
    more = steps[1].recomputation - steps[0].recomputation
    assert more == pytest.approx(32 * 20 * waits)


def test_zero_bubble_keeps_gradients_until_the_weight_pass() -> None:
    recipe = Recipe(
        2048, 64, layout=Layout(tensor=8, pipeline=4, stages_per_rank=2, shard=4, schedule="zero-bubble")
    )
    whole = replace(recipe, layout=replace(recipe.layout, schedule="interleaved-1f1b"))
    for rank in range(4):
        owed = [rank_memory(MODEL, r, OURS, rank).activations for r in (recipe, whole)]
        held = [
            schedule_named(r.layout.schedule).in_flight(4, 2, r.microbatches, rank) for r in (recipe, whole)
        ]
        assert owed[0] / held[0] > 1.05 * owed[1] / held[1]  # a stage and microbatch weighs more
    # In another trainer three microbatches' gradients of logits, in bf16; ours computes them again.
    alone = replace(recipe, layout=replace(recipe.layout, tensor=1))
    ours, theirs = (rank_memory(MODEL, alone, s, 3).activations for s in (OURS, stacks()["torchtitan"]))
    assert theirs - ours == pytest.approx(3 * 2 * 2048 * MODEL.vocab_size, rel=0.1)


def test_buckets_and_pipelines_of_full_sharding() -> None:
    """DeepSpeed puts gradients together in a buffer; torch's pipeline reduces once, whatever the stack does without one."""
    bucket = stacks()["megatron-deepspeed"].bucket_bytes
    recipe = replace(RECIPE, sharding="optimizer")
    held = [
        rank_memory(MODEL, recipe, stacks()[s], 0).unsharded_gradients
        for s in ("megatron-2021", "megatron-deepspeed")
    ]
    assert held == [0.0, bucket]
    assert stacks()["megatron-deepspeed-bf16"].bucket_bytes == 2 * bucket  # as many values, in fp32
    titan = stacks()["torchtitan"]
    one, two = (Recipe(4096, 64, layout=Layout(pipeline=p)) for p in (1, 2))
    assert not titan.reduces_once(one)
    assert titan.reduces_once(two)
    assert OURS.reduces_once(one)
    assert not OURS.reduces_once(replace(two, accumulate="sharded"))


def test_memory_of_other_streams_stays_reserved() -> None:
    """One microbatch: gradients come after the loss's highest point, in memory that the loss's cannot be used for."""
    large = model_presets()["qwen2.5-0.5b"]
    one = rank_memory(large, Recipe(4096, 8, layout=Layout(shard=8)), OURS, 0)
    assert one.logits > 0
    assert one.gradients == 0
    own = 4 * large.parameters() / 8
    assert one.streams > own  # gradients as they are reduced, and a layer's on their way
    assert one.held == pytest.approx(1.04 * one.allocated + one.streams)
    assert one.reserved == one.held + one.runtime
    assert rank_memory(large, Recipe(4096, 8), OURS, 0).streams == 0  # nothing is gathered or reduced


@pytest.mark.parametrize(
    ("recipe", "measured"),
    [
        (Recipe(4096, 32, layout=Layout(shard=8)), 3.555 + 2.734),
        (Recipe(4096, 32, layout=Layout(tensor=2, shard=4)), 3.555 + 1.504),
        (Recipe(4096, 32, layout=Layout(replicate=2, shard=4)), 7.109 + 2.988),
        (Recipe(4096, 32, layout=Layout(replicate=8)), 32.441),
        # Beyond the 3.546 that its gradients hold at the highest point.
        (Recipe(4096, 32, layout=Layout(shard=8), accumulate="sharded"), 4.062 + 2.734 - 3.546),
    ],
)
def test_streams_reserve_what_torchs_allocator_did(recipe: Recipe, measured: float) -> None:
    """Qwen2.5-7B under bench/null_cuda, GiB: torch's own allocator and FSDP2, where no GPU computes."""
    found = rank_memory(model_presets()["qwen2.5-7b"], recipe, OURS, 0)
    assert found.streams / GIB == pytest.approx(measured, rel=0.02)


def test_training_metrics_keep_logits_after_the_backward_pass() -> None:
    """They count where their copies of the logits outweigh the activations that the loss stands beside."""
    foundry = stacks()["llm-foundry"]
    small = model_presets()["qwen2.5-0.5b"]
    logits = 16 * 4096 * small.vocab_size
    recipe = Recipe(4096, 128, 16, layout=Layout(shard=8))
    kept = [rank_memory(small, replace(recipe, recompute=r), foundry, 0) for r in ("full", "none")]
    assert [m.logits for m in kept] == [foundry.metrics * logits, foundry.logits[1] * logits]
    assert kept[0].activations == 0 < kept[1].activations
    silent = rank_memory(small, replace(recipe, recompute="full"), replace(foundry, metrics=0.0), 0)
    assert silent.allocated < kept[0].allocated


def test_replicas_reduce_over_the_network_and_only_at_the_end() -> None:
    """Copies without a shard group reduce whole gradients; more microbatches give these no more to hide behind."""
    slow = find_network("RoCE 4x100")
    assert slow is not None
    fabric = Fabric(Cluster(CLUSTER.gpu, 4, 8, replace(slow, gbps_per_nic=1.0)))
    model = model_presets()["llama3.2-1b"]
    exposed = []
    for batch in (64, 256):
        recipe = Recipe(4096, batch, 1, layout=Layout(replicate=32))
        exposed.append(step_parts(model, recipe, fabric, OURS, 1.0).data)
    n_bytes = rank_traffic(model, recipe, fabric, OURS, 0).data
    assert n_bytes == pytest.approx(2 * 31 / 32 * 4 * model.parameters(), rel=1e-3)
    # Eight cards of 1/16 GB/s share a node's four; backward passes hide part of one microbatch's time.
    assert exposed[0] == pytest.approx(n_bytes / (4 / 8 * 0.125e9 * slow.reached * 8), rel=0.1)
    assert exposed[1] == pytest.approx(exposed[0], rel=1e-3)
