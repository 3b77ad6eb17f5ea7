"""Properties of predictions for every model, layout, cluster and stack: monotony, units, sums."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, partial
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_cases import NDR, Case, OtherModel, cases, gpu, models, recipes

from presets import preset_job
from seatrial.hardware.catalogue import Gpu
from seatrial.hardware.failures import RATES, Rate
from seatrial.hardware.networks import find_network, latencies
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost import collectives, kernels
from seatrial.plan.cost.finish import Finish, finish
from seatrial.plan.cost.memory import Memory, memory
from seatrial.plan.cost.predict import Prediction, predict, stack_for
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import Sent, Traffic, rank_traffic
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.search import Found, search

SLACK = 1 + 1e-9
EXAMPLES = settings(max_examples=40, deadline=None)


def predicted(case: Case, **changed: object) -> Prediction:
    at = replace(case, **changed)  # type: ignore[arg-type]
    return predict(at.model, at.recipe, at.cluster, stack=at.stack)


def held(case: Case, **changed: object) -> Memory:
    """What a recipe that differs in `changed` needs."""
    sizes = {
        name: changed.pop(name) for name in vars(case.recipe.layout) if name in changed and name != "context"
    }
    layout = replace(case.recipe.layout, **sizes)  # type: ignore[arg-type]
    recipe = replace(case.recipe, layout=layout, **changed)  # type: ignore[arg-type]
    return memory(case.model, recipe, stacks()[case.stack])


def rank_sends(case: Case, rank: int, recipe: Recipe) -> Traffic:
    return rank_traffic(
        case.model, recipe, collectives.Fabric(case.cluster), stack_for(recipe, case.stack), rank
    )


def times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def faster(card: Gpu, factor: float) -> Gpu:
    """Every peak and what was measured of it; bandwidths as they are."""
    return replace(
        card,
        bf16_tflops=card.bf16_tflops * factor,
        fp8_tflops=times(card.fp8_tflops, factor),
        best_bf16_tflops=times(card.best_bf16_tflops, factor),
        best_fp8_tflops=times(card.best_fp8_tflops, factor),
    )


# ---- sums ----


@given(case=cases())
@EXAMPLES
def test_the_waterfall_adds_up_and_no_part_is_negative(case: Case) -> None:
    found = predicted(case)
    parts = [getattr(found.parts, f.name) for f in fields(found.parts)]
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(found.step_s, rel=1e-12)
    assert sum(s.share for s in found.waterfall) == pytest.approx(1.0, rel=1e-9)
    assert sum(s.seconds for s in found.waterfall) == pytest.approx(found.step_s, rel=1e-9)
    assert all(s.seconds == pytest.approx(s.share * found.step_s, abs=1e-12) for s in found.waterfall)
    # What is below the peak, and not a part by itself, can only be lost.
    assert min(s.share for s in found.waterfall) >= -1e-12
    assert found.waterfall[0].share == pytest.approx(found.mfu)
    assert 0 < found.low_s < found.step_s < found.high_s


@given(case=cases())
@EXAMPLES
def test_traffic_only_in_dimensions_larger_than_1(case: Case) -> None:
    sent, r = predicted(case).traffic, case.recipe
    for f in fields(Sent):
        assert 0 <= getattr(sent.leaving, f.name) <= getattr(sent, f.name) * SLACK
    for size, n_bytes in (
        (r.layout.tensor, sent.tensor),
        (r.context, sent.context),
        (r.layout.pipeline, sent.pipeline),
        (r.context * r.layout.data_parallel, sent.data),
    ):
        assert (n_bytes > 0) == (size > 1)
    if case.cluster.nodes == 1:
        assert sent.leaving.sent == 0


# ---- better hardware ----


# Unfused attention, whose backward pass takes less than twice the forward pass, beside context parallel over a slow network.
RINGS = Case(
    OtherModel(
        num_hidden_layers=8,
        hidden_size=512,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=256,
        gated=False,
    ),
    Recipe(16384, 1, layout=Layout(tensor=8), context=2, sharding="none", sequence_parallel=False),
    Cluster(gpu("B200 SXM"), 2, 8, find_network("RoCE 4x100")),
    "megatron-2021",
)


@given(case=cases(), factor=st.floats(1.0, 8.0))
@example(case=RINGS, factor=2.0)
@EXAMPLES
def test_better_hardware_is_never_slower(case: Case, factor: float) -> None:
    cluster, plain = case.cluster, predicted(case).step_s
    card, network = cluster.gpu, cluster.network
    assert network is not None
    for better in (
        replace(cluster, network=replace(network, gbps_per_nic=network.gbps_per_nic * factor)),
        replace(cluster, network=replace(network, nics_per_node=network.nics_per_node * 2)),
        replace(cluster, network=replace(network, hop_us=network.hop_us / factor)),
        replace(cluster, gpu=replace(card, link_gb_s=card.link_gb_s * factor)),
        replace(cluster, gpu=replace(card, hbm_tb_s=card.hbm_tb_s * factor)),
        replace(cluster, gpu=faster(card, factor)),
    ):
        assert predicted(case, cluster=better).step_s <= plain * SLACK


@given(case=cases(), factor=st.floats(1.0, 8.0))
@EXAMPLES
def test_more_memory_changes_nothing_but_whether_it_fits(case: Case, factor: float) -> None:
    card = case.cluster.gpu
    larger = replace(case.cluster, gpu=replace(card, hbm_gb=card.hbm_gb * factor))
    before, after = predicted(case), predicted(case, cluster=larger)
    assert after.fits >= before.fits
    assert (after.step_s, after.memory) == (before.step_s, before.memory)


# ---- units ----


@contextmanager
def clock(factor: float) -> Iterator[None]:
    """The planner's own times, all of them divided by `factor`: latencies, and a wave's start. And its own rates times it."""
    plain = latencies()
    short = replace(
        plain,
        hop_us=plain.hop_us / factor,
        local_hop_us=plain.local_hop_us / factor,
        start_us=plain.start_us / factor,
    )
    rates = {n: getattr(collectives, n) * factor for n in vars(collectives) if n.endswith("_GB_S")}
    with (
        patch.multiple(collectives, latencies=lambda: short, **rates),
        patch.object(kernels, "WAVE_S", kernels.WAVE_S / factor),
    ):
        yield


@given(case=cases(), factor=st.sampled_from([0.5, 2.0, 4.0]))
@EXAMPLES
def test_step_time_scales_inversely_with_overall_hardware_speed(case: Case, factor: float) -> None:
    """Rates times a factor, latencies over it: a second is another one, nothing else. What has a wrong unit would show."""
    cluster = case.cluster
    card, network = faster(cluster.gpu, factor), cluster.network
    assert network is not None
    scaled = replace(
        cluster,
        gpu=replace(card, hbm_tb_s=card.hbm_tb_s * factor, link_gb_s=card.link_gb_s * factor),
        network=replace(network, gbps_per_nic=network.gbps_per_nic * factor, hop_us=network.hop_us / factor),
    )
    stack = stack_for(case.recipe, case.stack)
    gaps = {f.name: getattr(stack, f.name) / factor for f in fields(stack) if f.name.endswith("_s")}
    before = predicted(case)
    with clock(factor):
        after = predict(case.model, case.recipe, scaled, stack=replace(stack, **gaps))
    assert after.step_s == pytest.approx(before.step_s / factor, rel=1e-9)
    assert after.tokens_per_s_per_gpu == pytest.approx(before.tokens_per_s_per_gpu * factor, rel=1e-9)
    assert after.mfu == pytest.approx(before.mfu, rel=1e-9)
    for one, other in zip(before.waterfall, after.waterfall, strict=True):
        assert other.share == pytest.approx(one.share, abs=1e-9)
    assert (after.memory, after.traffic) == (before.memory, before.traffic)


@given(case=cases(), factor=st.sampled_from([2, 3]))
@EXAMPLES
def test_tokens_are_counted_once(case: Case, factor: int) -> None:
    """More microbatches: as many more tokens, and what happens once a step is shared out."""
    plain = predicted(case)
    larger = replace(case.recipe, global_batch=case.recipe.global_batch * factor)
    more = predicted(case, recipe=larger)
    for found, batch in ((plain, case.recipe.global_batch), (more, factor * case.recipe.global_batch)):
        tokens = found.tokens_per_s_per_gpu * case.recipe.world * found.step_s
        assert tokens == pytest.approx(batch * case.recipe.sequence, rel=1e-9)
    assert more.step_s <= factor * plain.step_s * SLACK
    # Under a pipeline what full sharding gathers once a step is shared out among the microbatches, those of the fill too, so a
    # step that is little else gets shorter with more of them.
    if case.recipe.layout.pipeline == 1 or case.recipe.sharding != "full":
        assert more.step_s > plain.step_s
    # Hidden states go with every microbatch; gradients go once in a stack that accumulates them.
    for rank in range(case.recipe.layout.pipeline):
        one, all_ = (rank_sends(case, rank, r) for r in (case.recipe, larger))
        assert all_.tensor == pytest.approx(factor * one.tensor)
        assert one.data <= all_.data * SLACK
        assert all_.data <= factor * one.data * SLACK


@given(model=models(), recipe=recipes())
@EXAMPLES
def test_states_are_bytes_a_parameter(model: Architecture, recipe: Recipe) -> None:
    """All ranks together hold each stack's bytes of every parameter, once for each copy."""
    recipe = replace(
        recipe,
        layout=replace(recipe.layout, tensor=1, pipeline=1, stages_per_rank=1, schedule="1f1b"),
        sharding="none",
    )
    for stack in stacks().values():
        found = memory(model, recipe, stack)
        assert found.states == pytest.approx(sum(stack.state_bytes) * model.parameters(), rel=1e-12)


# ---- memory ----


@given(case=cases(), factor=st.sampled_from([2, 4]))
@EXAMPLES
def test_more_gpus_never_need_more_memory_each(case: Case, factor: int) -> None:
    """Beside the buffers that a stack has as soon as there is data parallel."""
    recipe, plain = case.recipe, held(case).allocated * SLACK
    assert held(case, tensor=recipe.layout.tensor * factor).allocated <= plain
    assert held(case, context=recipe.context * factor).allocated <= plain
    if recipe.layout.data_parallel == 1:
        plain += getattr(stacks()[case.stack], "bucket_bytes", 0)
    batch = recipe.global_batch * factor
    assert held(case, shard=recipe.layout.shard * factor, global_batch=batch).allocated <= plain
    assert held(case, replicate=recipe.layout.replicate * factor, global_batch=batch).allocated <= plain
    if recipe.microbatches % factor == 0:  # the same batch over more ranks
        assert held(case, shard=recipe.layout.shard * factor).allocated <= plain


@given(case=cases())
@EXAMPLES
def test_more_work_at_once_never_needs_less_memory(case: Case) -> None:
    recipe, plain = case.recipe, held(case).allocated
    slack = 1 / SLACK
    batch = recipe.global_batch * 2
    assert held(case, microbatch=recipe.microbatch * 2, global_batch=batch).allocated >= plain * slack
    assert held(case, sequence=recipe.sequence * 2).allocated >= plain * slack
    deeper = replace(case, model=replace(case.model, num_hidden_layers=case.model.num_hidden_layers * 2))
    assert held(deeper).allocated >= plain * slack
    # Nothing is computed again only to need more.
    if recipe.recompute == "none":
        for recompute in ("alternate", "full"):
            assert held(case, recompute=recompute).allocated <= plain * SLACK
        # Nor is it faster: the search leaves it out where memory suffices without it.
        again = predicted(case, recipe=replace(recipe, recompute="full"))
        assert again.step_s >= predicted(case).step_s


@given(case=cases(), per_rank=st.sampled_from([1, 2, 4]))
@EXAMPLES
def test_resharding_under_a_pipeline_saves_nothing(case: Case, per_rank: int) -> None:
    """A search leaves it out."""
    schedule = "1f1b" if per_rank == 1 else "interleaved-1f1b"
    layout = replace(case.recipe.layout, pipeline=2, stages_per_rank=per_rank, schedule=schedule)
    cluster = replace(case.cluster, nodes=2 * case.cluster.nodes)
    # Interleaving works on whole groups of microbatches.
    whole = replace(
        case.recipe, layout=layout, global_batch=4 * layout.data_parallel * case.recipe.microbatch
    )
    with_it, without = (replace(whole, reshard=reshard) for reshard in (True, False))
    stack = stacks()[case.stack]
    assert memory(case.model, with_it, stack) == memory(case.model, without, stack)
    slower = predicted(case, recipe=with_it, cluster=cluster).step_s
    assert slower * SLACK >= predicted(case, recipe=without, cluster=cluster).step_s


@given(case=cases())
@EXAMPLES
def test_a_deeper_model_takes_longer(case: Case) -> None:
    deeper = replace(case.model, num_hidden_layers=case.model.num_hidden_layers * 2)
    assert predicted(case, model=deeper).step_s > predicted(case).step_s
    assert (
        predicted(case, recipe=replace(case.recipe, sequence=case.recipe.sequence * 2)).step_s
        > predicted(case).step_s
    )


# ---- the run ----

BIG = model_presets()["qwen2.5-72b"]
REFERENCE = Recipe(4096, 1024, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)
B300 = Cluster(gpu("B300 SXM"), 16, 8, NDR)
STEP = predict(BIG, REFERENCE, B300)


def ended(steps: int, per_day: float, storage: float, most_s: float = 14400.0) -> Finish:
    rate = Rate("drawn", "drawn", per_day, "drawn")
    return finish(STEP, BIG, REFERENCE, B300, steps, rate=rate, storage_gb_s=storage, max_unsaved_s=most_s)


@given(
    steps=st.integers(1, 10**6),
    per_day=st.floats(1e-5, 1.0),
    worse=st.floats(1.0, 50.0),
    storage=st.floats(0.5, 5000.0),
)
@example(steps=24000, per_day=max(r.per_node_day for r in RATES), worse=1.0, storage=20.0)
@EXAMPLES
def test_more_failures_and_slower_storage_never_end_earlier(
    steps: int, per_day: float, worse: float, storage: float
) -> None:
    plain = ended(steps, per_day, storage)
    assert sum(s.share for s in plain.waterfall) == pytest.approx(1.0, rel=1e-9)
    assert sum(s.seconds for s in plain.waterfall) == pytest.approx(plain.wall_s, rel=1e-9)
    assert min(s.share for s in plain.waterfall) >= -1e-9
    assert 0 < plain.ettr <= 1
    assert plain.wall_s >= steps * STEP.step_s
    assert plain.low_s < plain.wall_s < plain.high_s
    assert plain.gpu_hours == pytest.approx(plain.wall_s / 3600 * REFERENCE.world)
    assert ended(2 * steps, per_day, storage).wall_s == pytest.approx(2 * plain.wall_s, rel=1e-9)
    assert ended(steps, per_day * worse, storage).wall_s >= plain.wall_s / SLACK
    assert ended(steps, per_day, storage / worse).wall_s >= plain.wall_s / SLACK


# ---- the search ----


job = partial(preset_job, "llama3-8b-h100")
H100 = Cluster(gpu("H100 SXM"), 1, 8, NDR)


@cache
def searched(nodes: int, *, hbm: float = 1.0, rate: float = 1.0) -> Found:
    card = replace(H100.gpu, hbm_gb=H100.gpu.hbm_gb * hbm, link_gb_s=H100.gpu.link_gb_s * rate)
    network = replace(NDR, gbps_per_nic=NDR.gbps_per_nic * rate)
    cluster = Cluster(card, nodes, 8, network)
    return search(job(f"cluster.nodes={nodes}", "train.global_batch=32"), cluster)


@pytest.mark.cluster  # slow
def test_a_better_cluster_never_has_a_worse_best() -> None:
    plain = searched(1)
    best = plain.choices[0].prediction.step_s
    assert searched(1, rate=4.0).choices[0].prediction.step_s <= best
    roomy, narrow = searched(1, hbm=2.0), searched(1, hbm=0.6)
    assert roomy.choices[0].prediction.step_s <= best
    assert roomy.too_large <= plain.too_large <= narrow.too_large
    assert roomy.tried == plain.tried == narrow.tried
    assert roomy.least_bytes == plain.least_bytes == narrow.least_bytes


@pytest.mark.cluster  # slow
def test_more_gpus_need_no_more_memory_each_and_no_more_time() -> None:
    one, two = searched(1), searched(2)
    assert two.least_bytes <= one.least_bytes
    assert two.choices[0].prediction.step_s < one.choices[0].prediction.step_s
    # And no more than twice as fast: nothing is had for free.
    assert two.choices[0].prediction.step_s >= one.choices[0].prediction.step_s / 2 / 1.05


@pytest.mark.cluster  # slow
@pytest.mark.parametrize(
    "own",
    [
        ("cluster.nodes=2", "train.global_batch=32"),
        ("train.microbatch=3", "train.global_batch=24", "train.sequence_length=1024"),
        # The fastest of all, and not among the microbatches that are searched.
        ("train.microbatch=128", "train.global_batch=1024", "train.sequence_length=64"),
        (
            "parallel.pipeline=2",
            "parallel.schedule=interleaved-1f1b",
            "parallel.stages_per_rank=8",
            "train.sequence_length=2048",
            "train.global_batch=16",
        ),
    ],
)
def test_the_jobs_layout_is_never_better_than_the_best(own: tuple[str, ...]) -> None:
    asked = job("train.activation_checkpointing=full", *own)
    found = search(asked, replace(H100, nodes=asked.cluster.nodes))
    assert found.own is not None
    assert found.own.prediction.fits
    assert found.own_costs is not None
    assert found.own_costs >= 0
