"""Bytes that leave an NVLink domain: counted link by link for ten layouts, never above the network's rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import NDR, Case, OtherModel, cases, gpu

from seatrial.hardware.networks import find_network
from seatrial.job.layout import Coordinates, Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.cost.step import rank_traffic
from seatrial.plan.model.cluster import Cluster, Group, group, placed
from seatrial.plan.model.recipe import Recipe

MODEL = model_presets()["qwen2.5-7b"]  # whose ends are not tied
H100, GB200 = gpu("H100 SXM"), gpu("GB200")
EXAMPLES = settings(max_examples=150, deadline=None)
# (pipeline, replicate, shard, tensor), nodes, GPUs a node, NVLink domain.
LAYOUTS = [
    ((1, 1, 16, 1), 2, 8, None),
    ((1, 1, 128, 1), 16, 8, None),
    ((1, 2, 8, 1), 2, 8, None),
    ((1, 4, 4, 2), 4, 8, None),
    ((2, 1, 8, 2), 4, 8, None),
    ((4, 1, 4, 1), 2, 8, None),
    ((4, 2, 1, 1), 2, 4, None),
    ((2, 2, 8, 2), 16, 4, 72),
    ((1, 1, 128, 1), 32, 4, 72),
    ((2, 1, 16, 2), 16, 4, 32),
]


def counted(layout: Layout, joined: int, each: dict[str, list[float]]) -> dict[str, float]:
    """Bytes a GPU that leave domains of `joined`, as a sum over every link of every group; `each`: sent, by stage."""
    groups: dict[tuple[str, tuple[int, ...]], list[int]] = defaultdict(list)
    sizes = (layout.pipeline, layout.replicate, layout.shard, layout.tensor)
    leaves = dict.fromkeys(("tensor", "pipeline", "shard", "replicate"), 0.0)
    for p, r, s, t in product(*map(range, sizes)):
        rank = layout.rank(Coordinates(p, r, s, t))
        for name, key in (("tensor", (p, r, s)), ("shard", (p, r, t)), ("replicate", (p, s, t))):
            groups[name, key].append(rank)
        # Half of what a middle stage sends goes each way.
        for other in (p - 1, p + 1):
            if 0 <= other < layout.pipeline:
                there = layout.rank(Coordinates(other, r, s, t))
                ways = (p > 0) + (p < layout.pipeline - 1)
                leaves["pipeline"] += each["pipeline"][p] / ways * (rank // joined != there // joined)
    for (name, key), ranks in groups.items():
        domains = {rank // joined for rank in ranks}
        # A ring crosses from each domain to the next once, with all that a rank sends; rings share it.
        if len(domains) > 1:
            leaves[name] += len(domains) * each[name][key[0]]
    return {name: n / layout.world_size for name, n in leaves.items()}


@pytest.mark.parametrize("per_node", [4, 8])
@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
def test_groups_stay_on_rails_unless_split_by_a_domain(nodes: int, per_node: int) -> None:
    """So a network whose switches each join the cards of one rail carries what one with a single switch does.

    Where a domain's border cuts a group, it counts as if it had only its smallest part there: fewer cards than it has.
    """
    cluster, rails = Cluster(H100, nodes, per_node, NDR), 0
    for stride, size in product(range(1, cluster.gpus + 1), repeat=2):
        if cluster.gpus % (stride * size) or (per_node % stride and stride % per_node):
            continue
        at, cut = (
            group(cluster, stride=stride, size=size),
            stride * size % per_node and per_node % (stride * size),
        )
        for first in (b + s for b in range(0, cluster.gpus, stride * size) for s in range(stride)):
            ranks = range(first, first + stride * size, stride)
            cards = [
                {r % per_node for r in ranks if r // per_node == node}
                for node in {r // per_node for r in ranks}
            ]
            if cut:
                assert at.per_domain <= min(map(len, cards))
            else:
                assert all(c == cards[0] for c in cards)
                assert (at.domains, at.per_domain) == (len(cards), len(cards[0]))
                rails += len(cards) > 1
    assert rails


@pytest.mark.parametrize(("sizes", "nodes", "per_node", "domain"), LAYOUTS)
def test_bytes_leaving_a_domain_match_a_count(
    sizes: tuple[int, int, int, int], nodes: int, per_node: int, domain: int | None
) -> None:
    p, replicate, shard, tensor = sizes
    layout = Layout(p, replicate, shard, tensor)
    recipe = Recipe(2048, 4 * replicate * shard, 1, layout)
    cluster = placed(Cluster(H100, nodes, per_node, NDR, domain), recipe)
    model, stack = MODEL, stack_for(recipe)
    told = [rank_traffic(model, recipe, Fabric(cluster), stack, stage) for stage in range(p)]
    # Replicas exchange the rest of what data parallel sends.
    one = replace(recipe, layout=replace(layout, replicate=1), global_batch=4 * shard)
    alone = [rank_traffic(model, one, Fabric(cluster), stack, stage) for stage in range(p)]
    each = {
        "tensor": [t.tensor for t in told],
        "pipeline": [t.pipeline for t in told],
        "shard": [t.data for t in alone],
        "replicate": [t.data - a.data for t, a in zip(told, alone, strict=True)],
    }
    found = counted(layout, cluster.domain_gpus, each)

    def mean(name: str) -> float:
        return sum(getattr(t.leaving, name) for t in told) / p

    assert mean("tensor") == pytest.approx(found["tensor"])
    assert mean("data") == pytest.approx(found["shard"] + found["replicate"])
    assert mean("pipeline") == pytest.approx(found["pipeline"])


def test_a_node_sends_a_gathered_weight_once() -> None:
    """FSDP over 128 GPUs: two gathers of bf16 and a reduction of fp32, 8 bytes a parameter, and a node sends 127/128."""
    recipe = Recipe(4096, 128, 1, Layout(shard=128))
    cluster = Cluster(H100, 16, 8, NDR)
    sent = predict(MODEL, recipe, cluster).traffic
    layers = MODEL.num_hidden_layers * MODEL.layer_parameters()
    root = MODEL.parameters() - layers  # gathered once: forward passes do not free it
    assert sent.data == pytest.approx(127 / 128 * (8 * layers + 6 * root), rel=1e-3)
    assert sent.leaving.data * 8 == pytest.approx(sent.data)


@given(case=cases())
@EXAMPLES
def test_no_step_needs_more_than_the_network_rate(case: Case) -> None:
    assert case.cluster.network is not None
    found = predict(case.model, case.recipe, case.cluster, stack=case.stack)
    carries = case.cluster.network.gb_s_per_gpu * 1e9
    assert found.traffic.leaving.sent / found.step_s <= carries * (1 + 1e-9)


def test_gradients_do_not_travel_with_keys_and_values() -> None:
    """Both leave the node. 4 layers without grouped-query attention: the exchange takes as long as the attention."""
    model = replace(
        MODEL, num_key_value_heads=MODEL.num_attention_heads, num_hidden_layers=4, vocab_size=1024
    )
    recipe = Recipe(2048, 4, 4, Layout(tensor=4), context=4, sharding="optimizer", recompute="full")
    cluster = Cluster(H100, 2, 8, replace(NDR, gbps_per_nic=200.0))
    found = predict(model, recipe, cluster, stack="torchtitan")
    assert found.traffic.leaving.sent / found.step_s <= 25e9


@given(case=cases(), factor=st.sampled_from([2, 3, 4, 8, 16]))
@EXAMPLES
def test_a_larger_domain_is_never_slower(case: Case, factor: int) -> None:
    cluster = replace(case.cluster, nodes=max(case.cluster.nodes, 2))
    larger = replace(cluster, domain=cluster.gpus_per_node * factor)
    small, large = (predict(case.model, case.recipe, c, stack=case.stack) for c in (cluster, larger))
    assert large.step_s <= small.step_s * (1 + 1e-9)
    assert large.traffic.leaving.sent <= small.traffic.leaving.sent * (1 + 1e-9)
    assert large.traffic.sent == pytest.approx(small.traffic.sent)


def test_a_scheduler_fills_domains_evenly() -> None:
    """As many racks as it takes, equal parts of them, no shard group cut."""
    rack = Cluster(GB200, 32, 4, NDR, 72)
    assert placed(rack, Recipe(4096, 128, 1, Layout(shard=128))).domain_gpus == 64
    assert placed(rack, Recipe(4096, 128, 1, Layout(shard=32, replicate=4))).domain_gpus == 64
    assert placed(replace(rack, nodes=36), Recipe(4096, 144, 1, Layout(shard=144))).domain_gpus == 72
    # 144 GPUs in groups of 16: nine in two racks would cut one, so three racks are used.
    tensor = Recipe(4096, 72, 1, Layout(shard=18, tensor=8), context=1)
    assert placed(replace(rack, nodes=36), tensor).domain_gpus == 72
    assert (
        placed(replace(rack, nodes=36), replace(tensor, layout=Layout(shard=9, tensor=16))).domain_gpus == 48
    )
    # A prime number of nodes fits no number of racks evenly.
    assert placed(replace(rack, nodes=19), Recipe(4096, 76, 1, Layout(shard=76))).domain_gpus == 36
    assert not replace(rack, nodes=16).several_domains


def test_a_split_group_counts_its_smallest_part() -> None:
    assert group(Cluster(GB200, 36, 4, NDR, 72), stride=1, size=16) == Group(16, 8)
    assert group(Cluster(GB200, 32, 4, NDR, 64), stride=8, size=16) == Group(16, 8)
    assert group(Cluster(GB200, 16, 4, NDR, 72), stride=1, size=64) == Group(64, 64)


@pytest.mark.parametrize("sharding", ["optimizer", "full"])
def test_learned_positions_are_charged_like_other_weights(sharding: Literal["optimizer", "full"]) -> None:
    """A step that moves them over the network is longer for them."""
    wide = {"vocab_size": 256, "hidden_size": 2560, "intermediate_size": 1280, "num_hidden_layers": 8}
    model = OtherModel(**wide, num_attention_heads=40, num_key_value_heads=8, head_dim=64)  # type: ignore[arg-type]
    recipe = Recipe(1024, 2, 1, Layout(shard=2, tensor=8), sharding=sharding)
    cluster = Cluster(gpu("A100-40GB SXM"), 2, 8, find_network("RoCE 4x100"))
    without, found = (
        predict(m, recipe, cluster, stack="torchtitan")
        for m in (model, replace(model, learned_positions=2048))
    )
    sent = found.traffic.leaving.sent - without.traffic.leaving.sent
    assert sent > 0
    assert found.step_s - without.step_s >= sent / 6.25e9


def test_a_large_embedding_is_reduced_as_often_as_layers() -> None:
    """By a stack that reduces in every microbatch: most of what this model sends."""
    model = replace(MODEL, num_hidden_layers=2)
    recipe = Recipe(1024, 32, 1, Layout(shard=2, tensor=8), sharding="full", reshard=False)
    cluster = Cluster(gpu("A100-40GB SXM"), 2, 8, find_network("RoCE 4x100"))
    found = predict(model, recipe, cluster, stack="torchtitan")
    assert found.step_s >= found.traffic.leaving.data / (6.25e9 * 0.95)


def test_messages_overlap_with_no_more_than_a_stage_computes() -> None:
    """Thin layers on a slow network: stages mostly send."""
    sizes = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 8}
    model = OtherModel(**sizes, num_attention_heads=8, num_key_value_heads=8, head_dim=64)  # type: ignore[arg-type]
    layout = Layout(pipeline=4, shard=2, replicate=2, stages_per_rank=2, schedule="interleaved-1f1b")
    cluster = Cluster(H100, 2, 8, find_network("RoCE 4x100"))
    found = predict(model, Recipe(1024, 256, 2, layout, sharding="none"), cluster, stack="megascale")
    assert found.step_s >= found.traffic.leaving.pipeline / 6.25e9


def test_interleaved_messages_also_return_to_the_first_rank() -> None:
    """Of the seven borders of eight stages on four ranks in two domains, three leave a domain: two in the middle, one back."""
    layout = Layout(pipeline=4, shard=36, stages_per_rank=2, schedule="interleaved-1f1b")
    recipe, cluster = Recipe(4096, 36 * 8, 1, layout), Cluster(GB200, 36, 4, NDR, 72)
    fabric, stack = Fabric.of(cluster, recipe), replace(stack_for(recipe), hide_pipeline=0.0)
    across, within = (fabric.send(2 * 4096 * MODEL.hidden_size, across=each) for each in (True, False))
    found = predict(MODEL, recipe, cluster, stack=stack)
    assert found.parts.pipeline == pytest.approx(2 * 8 / 4 * (3 * across + 4 * within))
