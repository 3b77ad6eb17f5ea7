"""Cases for property tests: models of odd sizes, layouts, clusters and stacks that a prediction must be able to take."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import strategies as st

from seatrial.hardware.catalogue import Gpu, find_gpu, gpus
from seatrial.hardware.networks import find_network, networks
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.plan.cost.kernels import ATTENTION
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe

BENCH = str(Path(__file__).parents[3] / "bench")
if BENCH not in sys.path:
    sys.path.insert(0, BENCH)

from other_model import OtherModel  # noqa: E402

NDR = find_network("InfiniBand NDR 8x400")
assert NDR is not None
PREDICTED = [g for g in gpus() if g.architecture in ATTENTION]


def gpu(name: str) -> Gpu:
    found = find_gpu(name)
    assert found is not None
    return found


@dataclass(frozen=True)
class Case:
    """What `predict` takes."""

    model: Architecture
    recipe: Recipe
    cluster: Cluster
    stack: str


@st.composite
def models(draw: st.DrawFn) -> Architecture:
    """Models that no preset has: few layers, narrow or wide, with and without gate, odd vocabularies."""
    heads = draw(st.sampled_from([8, 16, 40, 64]))
    head_dim = draw(st.sampled_from([64, 80, 128]))
    hidden = heads * head_dim
    return OtherModel(
        num_hidden_layers=draw(st.integers(8, 100)),
        hidden_size=hidden,
        intermediate_size=8 * draw(st.integers(hidden // 16, hidden // 2)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([8, heads])),
        head_dim=head_dim,
        vocab_size=8 * draw(st.integers(32, 32000)),
        gated=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        layer_vectors=2 * hidden,
        layer_norms=2 * hidden,
        learned_positions=draw(st.sampled_from([0, 2048])),
    )


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Layouts of every dimension and schedule; at most 8 stages."""
    pipeline = draw(st.sampled_from([1, 2, 4]))
    per_rank = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    schedule = "1f1b"
    if per_rank > 1:
        schedule = draw(st.sampled_from(["interleaved-1f1b", "zero-bubble"]))
    elif pipeline > 1:
        schedule = draw(st.sampled_from(["1f1b", "gpipe"]))
    shard, replicate = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2]))
    micro = draw(st.sampled_from([1, 2, 4]))
    return Recipe(
        layout=Layout(
            tensor=draw(st.sampled_from([1, 2, 4, 8])),
            shard=shard,
            replicate=replicate,
            pipeline=pipeline,
            stages_per_rank=per_rank,
            schedule=schedule,
        ),
        sequence=draw(st.sampled_from([1024, 4096, 16384])),
        global_batch=shard * replicate * micro * pipeline * draw(st.integers(1, 8)),
        microbatch=micro,
        context=draw(st.sampled_from([1, 1, 2])),
        sharding=draw(st.sampled_from(["none", "optimizer", "gradients", "full"])),
        reshard=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "attention", "operators", "alternate", "full"])),
        sequence_parallel=draw(st.booleans()),
        compiled=draw(st.booleans()),
        async_tensor=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """On every GPU with known speeds and every network, in every stack, and in fp8 where the GPU has it."""
    recipe = draw(recipes())
    card = draw(st.sampled_from(PREDICTED))
    if card.fp8_tflops is not None and draw(st.booleans()):
        recipe = replace(recipe, precision="fp8")
    network = draw(st.sampled_from(networks()))
    cluster = Cluster(card, -(-recipe.world // 8), 8, network)
    return Case(draw(models()), recipe, cluster, draw(st.sampled_from(sorted(stacks()))))
