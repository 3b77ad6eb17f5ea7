"""Asynchronous tensor parallel in the plan: exposed communication, and its use by the search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import NDR, PREDICTED, Case, gpu, models, recipes

from presets import preset_job
from seatrial.hardware.networks import networks
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.job.parts import MOST, parts
from seatrial.plan.cost import work as work_module
from seatrial.plan.cost.accumulate import accumulate_options
from seatrial.plan.cost.collectives import Fabric
from seatrial.plan.cost.kernels import Kernels
from seatrial.plan.cost.memory import layer_activations
from seatrial.plan.cost.overlap import (
    OURS,
    can_overlap,
    exposed_gather,
    exposed_scatter,
    overlaps,
    part_count,
    reorder_bytes,
)
from seatrial.plan.cost.predict import predict, stack_for
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.cost.step import rank_traffic
from seatrial.plan.cost.work import tensor_group, work
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.search import legal, search

EXAMPLES = settings(max_examples=40, deadline=None)
SLACK = 1 + 1e-9
MODEL = model_presets()["qwen2.5-72b"]
B300 = Cluster(gpu("B300 SXM"), 16, 8, NDR)
PLAIN = Recipe(4096, 1024, 8, layout=Layout(tensor=8, pipeline=2, shard=8), reshard=False, compiled=True)
ASYNC = replace(PLAIN, async_tensor=True)

seconds = st.floats(0.0, 1.0)


def played(
    n: int, send_s: float, compute_s: float, then_s: float, *, gathers: bool, first_s: float = 0.0
) -> float:
    """Two machines and n parts, event by event: until all is sent and computed. `first_s`: sent before."""
    links, processors = first_s, 0.0
    for _ in range(n):
        if gathers:
            links += send_s
            processors = max(processors, links) + compute_s
        else:
            processors += compute_s
            links = max(links, processors) + send_s
    return max(links, processors + then_s)


@pytest.mark.cluster  # slow
@given(n=st.integers(1, 8), send_s=seconds, compute_s=seconds, then_s=seconds)
def test_the_closed_form_matches_a_simulated_pipeline(
    n: int, send_s: float, compute_s: float, then_s: float
) -> None:
    before, after = exposed_gather(n, send_s, compute_s), exposed_scatter(n, compute_s, send_s, then_s)
    assert n * compute_s + before == pytest.approx(played(n, send_s, compute_s, 0.0, gathers=True))
    whole = played(n, send_s, compute_s, then_s, gathers=False)
    assert n * compute_s + then_s + after == pytest.approx(whole)
    again = exposed_scatter(n, compute_s, send_s, then_s, regathered=True)
    whole = played(n, send_s, compute_s, then_s, gathers=False, first_s=n * send_s)
    assert n * compute_s + then_s + again == pytest.approx(whole)
    # Never less than nothing, never more than there is; hidden is at most what is computed meanwhile.
    for seen, meanwhile in ((before, (n - 1) * compute_s), (after, (n - 1) * compute_s + then_s)):
        assert 0 <= seen <= n * send_s * SLACK
        assert n * send_s - seen <= meanwhile + 1e-9


def test_exposed_times_by_hand() -> None:
    """Parts of 3 s on the links and 2 s in the product, then the other way round."""
    assert (
        exposed_gather(2, 3.0, 2.0) == 4.0
    )  # links until 3 and 6, products until 5 and 8, of which 4 is computing
    assert exposed_gather(2, 2.0, 3.0) == 2.0  # only the first is waited for
    assert exposed_scatter(2, 2.0, 3.0) == 4.0  # products until 2 and 4, links until 5 and 8
    assert exposed_scatter(2, 2.0, 3.0, then_s=3.0) == 1.0  # weights' gradients until 7
    assert exposed_scatter(2, 2.0, 3.0, then_s=5.0) == 0.0
    assert exposed_scatter(2, 2.0, 3.0, regathered=True) == 8.0  # links until 12
    assert exposed_gather(1, 3.0, 2.0) == 3.0


def test_a_layer_of_the_reference_voyage_by_hand() -> None:
    """Each place of a layer from the times of its parts; products of the width that a tensor-parallel rank has."""
    stack, fabric = stacks()["seatrial-compiled"], Fabric(B300)
    kernels, pace, n = Kernels(B300.gpu, "bf16", "flash2"), 1.25, part_count(ASYNC)
    rows, h = 8 * 4096 // n, 8192
    c = fabric.seconds("all_gather", 2.0 * rows * h, tensor_group(ASYNC, fabric))
    qkv, out, up, down = (8192 + 2 * 1024) // 8, 8192 // 8, 2 * 29568 // 8, 29568 // 8
    made = work(MODEL, ASYNC, fabric, stack, pace)

    def product(width: int, depth: int) -> float:
        return pace * kernels.product(rows, width, depth)

    def weights(width: int, depth: int) -> float:
        return pace * kernels.product(depth, width, 8 * 4096)

    forward = [
        exposed_gather(n, c, product(qkv, h)),
        exposed_scatter(n, product(h, out), c),
        exposed_gather(n, c, product(up, h)),
        exposed_scatter(n, product(h, down), c),
    ]
    backward = [
        exposed_scatter(n, product(h, qkv), c, weights(qkv, h), regathered=True),
        exposed_gather(n, c, product(out, h)),
        exposed_scatter(n, product(h, up), c, weights(up, h), regathered=True),
        exposed_gather(n, c, product(down, h)),
    ]
    assert made.forward.tensor == pytest.approx(sum(forward))
    assert made.backward.tensor == pytest.approx(sum(backward))
    assert made.forward.slowed == pytest.approx(stack.contention * (4 * n * c - sum(forward)))
    assert made.backward.slowed == pytest.approx(stack.contention * (6 * n * c - sum(backward)))
    assert made.forward.products == pytest.approx(
        n * (product(qkv, h) + product(h, out) + product(up, h) + product(h, down))
    )
    # Computed again: all but the last product and its scatter.
    again = work(MODEL, replace(ASYNC, recompute="full"), fabric, stack, pace).again
    assert again.tensor == pytest.approx(sum(forward[:3]))
    assert again.products == pytest.approx(made.forward.products - n * product(h, down))
    # What is gathered for the weights comes later in a zero-bubble pipeline: nothing but products hides the scatters.
    late = replace(
        ASYNC, layout=replace(ASYNC.layout, schedule="zero-bubble", stages_per_rank=2), compiled=False
    )
    later = work(MODEL, late, fabric, stack, pace).backward.tensor
    assert later == pytest.approx(
        sum(backward[1::2])
        + exposed_scatter(n, product(h, qkv), c)
        + exposed_scatter(n, product(h, up), c)
        + 2 * n * c  # gathered again for the weights' gradients
    )


def test_only_this_trainers_stacks_overlap() -> None:
    for name, stack in stacks().items():
        assert can_overlap(ASYNC, stack) == (name in OURS)
        assert overlaps(ASYNC, stack) == (name in OURS)
        assert not overlaps(PLAIN, stack)
        one = replace(ASYNC, layout=replace(ASYNC.layout, tensor=1, shard=64))
        assert not can_overlap(one, stack)
        if name not in OURS:
            steps = [predict(MODEL, r, B300, stack=name).parts for r in (ASYNC, PLAIN)]
            assert steps[0] == steps[1]


def test_the_reference_voyage_is_faster_with_it() -> None:
    plain, hidden = (predict(MODEL, r, B300) for r in (PLAIN, ASYNC))
    assert hidden.step_s < 0.95 * plain.step_s
    assert hidden.parts.tensor < 0.6 * plain.parts.tensor
    assert hidden.parts.contention > plain.parts.contention
    assert hidden.parts.products >= plain.parts.products  # in parts they are no faster
    assert hidden.traffic == plain.traffic


def test_bytes_of_reordering_positions() -> None:
    """parallel/collectives.py and parallel/overlap.py: 16-bit values, read and written."""
    ours, theirs = stacks()["seatrial"], stacks()["torchtitan"]
    tokens = 8 * 4096
    assert reorder_bytes(MODEL, PLAIN, ours) == 4 * 4 * tokens * 8192
    assert reorder_bytes(MODEL, PLAIN, theirs) == 0
    assert reorder_bytes(MODEL, replace(PLAIN, layout=replace(PLAIN.layout, tensor=1, shard=64)), ours) == 0
    assert reorder_bytes(MODEL, replace(PLAIN, microbatch=1), ours) == 0
    assert reorder_bytes(MODEL, ASYNC, ours) == 4 * tokens * (8192 + 2 * 1024 + 8192) / 8
    assert (
        reorder_bytes(MODEL, replace(ASYNC, microbatch=2), ours) == 0
    )  # parts of one sequence stand in order
    plain, more = (work(MODEL, r, Fabric(B300), ours, 1.0).forward.operators for r in (ASYNC, PLAIN))
    moved = reorder_bytes(MODEL, PLAIN, ours) - reorder_bytes(MODEL, ASYNC, ours)
    assert more - plain == pytest.approx(Kernels(B300.gpu, "bf16").move(moved))


def test_attention_keeps_its_output_in_both_orders() -> None:
    """Two bytes for each position and query of a rank; not where parts are single sequences. Traced, `seatrial.plan.cost.dryrun`."""
    for stack in (stacks()[name] for name in OURS):
        more = [
            layer_activations(MODEL, replace(ASYNC, microbatch=m), stack)
            - layer_activations(MODEL, replace(PLAIN, microbatch=m), stack)
            for m in (1, 2, 8)
        ]
        assert more == [2 * 4096 * 8192 / 8, 0, 2 * 8 * 4096 * 8192 / 8]


def test_the_number_of_parts_is_near_the_best() -> None:
    """What job/parts.py says of its limits."""
    small = model_presets()["llama3-8b"]
    for model, name, tensor in ((MODEL, "B300 SXM", 8), (MODEL, "H100 SXM", 8), (small, "H200 SXM", 4)):
        at = replace(B300, gpu=gpu(name))
        for micro in (1, 2, 4, 8):
            recipe = replace(
                ASYNC, layout=replace(ASYNC.layout, tensor=tensor, shard=64 // tensor), microbatch=micro
            )
            steps, chosen = {}, parts(micro, 4096 // tensor)
            for n in (2, 3, 4, 8):
                with patch.object(work_module, "part_count", lambda _, n=n: n):
                    steps[n] = predict(model, recipe, at).step_s
            assert steps[chosen] <= 1.02 * min(steps.values())
    with patch.object(work_module, "part_count", lambda _: 4):
        four = predict(MODEL, replace(ASYNC, microbatch=1), B300).step_s
    assert four > predict(MODEL, replace(PLAIN, microbatch=1), B300).step_s


def test_the_published_pair_gained_less_than_predicted() -> None:
    """torchtitan, December 2024: 829 tokens/s/GPU without and 876 with its own overlap, in fp8. What docs/plan.md tells of it."""
    model, at = (
        model_presets()["llama3-70b"],
        Cluster(gpu("H100 SXM"), 32, 8, NDR),
    )
    recipe = Recipe(
        8192, 512, 16, layout=Layout(tensor=8, shard=32), precision="fp8", recompute="full", compiled=True
    )

    def gain() -> float:
        plain, hidden = (predict(model, replace(recipe, async_tensor=a), at).step_s for a in (False, True))
        return plain / hidden - 1

    with patch.object(work_module, "reorder_bytes", lambda *_: 0.0):
        beside_copies = gain()
    assert 876 / 829 - 1 < beside_copies < gain()
    assert beside_copies == pytest.approx(0.11, abs=0.01)
    assert gain() == pytest.approx(0.18, abs=0.02)


@st.composite
def overlapped(draw: st.DrawFn) -> Case:
    """Layouts of our own trainer that hide communication."""
    recipe = replace(draw(recipes()), async_tensor=True, sequence_parallel=True, context=1, sharding="full")
    recipe = replace(
        recipe,
        layout=replace(recipe.layout, tensor=draw(st.sampled_from([2, 4, 8]))),
        recompute=draw(st.sampled_from(["none", "full"])),
    )
    network = draw(st.sampled_from(networks()))
    cluster = Cluster(draw(st.sampled_from(PREDICTED)), -(-recipe.world // 8), 8, network)
    return Case(draw(models()), recipe, cluster, "seatrial")


@given(case=overlapped(), factor=st.floats(1.0, 8.0))
@EXAMPLES
def test_better_links_and_processors_are_never_slower(case: Case, factor: float) -> None:
    plain = predict(case.model, case.recipe, case.cluster).step_s
    card = case.cluster.gpu
    fast = card.best_bf16_tflops
    for better in (
        replace(card, link_gb_s=card.link_gb_s * factor),
        replace(
            card,
            bf16_tflops=card.bf16_tflops * factor,
            best_bf16_tflops=None if fast is None else fast * factor,
        ),
        replace(card, hbm_tb_s=card.hbm_tb_s * factor),
    ):
        at = replace(case.cluster, gpu=better)
        assert predict(case.model, case.recipe, at).step_s <= plain * SLACK


@given(case=overlapped())
@EXAMPLES
def test_no_overlap_without_computation(case: Case) -> None:
    """Of every pass: communication in sight and hidden is all there is, and hidden is no longer than products."""
    recipe, stack, fabric = case.recipe, stack_for(case.recipe), Fabric(case.cluster)
    made = work(case.model, recipe, fabric, stack, 1.0)
    n = part_count(recipe)
    n_bytes = 2.0 * recipe.tokens * case.model.hidden_size
    group = tensor_group(recipe, fabric)
    each = fabric.seconds("all_gather", n_bytes / n, group)
    for one, collectives in ((made.forward, 4), (made.backward, 6)):
        hidden = one.slowed / stack.contention
        assert one.tensor + hidden == pytest.approx(collectives * n * each)
        assert 0 <= hidden <= one.products * SLACK
        # Cut into parts, messages take no less time than whole.
        assert n * each >= fabric.seconds("all_gather", n_bytes, group) / SLACK
    sent = [
        rank_traffic(case.model, r, fabric, stack, 0) for r in (recipe, replace(recipe, async_tensor=False))
    ]
    assert sent[0] == sent[1]


@given(st.integers(1, 64), st.integers(1, 4096))
def test_parts_divide_sequences_or_positions(microbatch: int, positions: int) -> None:
    n = parts(microbatch, positions)
    assert 1 <= n <= MOST
    assert microbatch % n == 0 or positions % n == 0
    if n == 1:
        assert all(microbatch % k and positions % k for k in range(2, MOST + 1))


# ---- the search ----


@pytest.mark.cluster  # slow
def test_pruned_search_finds_the_same_best_layouts() -> None:
    """Every legal layout with and without, predicted one by one, gives the same best ones."""
    base = preset_job("llama3-8b-h100")
    model, cluster = base.architecture, Cluster(gpu("H100 SXM"), 1, 8)
    best: dict[tuple[int, int], float] = {}
    for recipe in (
        way for layout in legal(base, cluster, Counter()) for way in accumulate_options(base, layout)
    ):
        for one in (recipe, replace(recipe, async_tensor=True)):
            if one.async_tensor and not can_overlap(one, stack_for(one)):
                continue
            found = predict(model, one, cluster)
            key = (one.layout.tensor, one.layout.pipeline)
            if found.fits and found.step_s < best.get(key, float("inf")):
                best[key] = found.step_s
    choices = search(base, cluster, own=False).choices
    assert {(c.recipe.layout.tensor, c.recipe.layout.pipeline): c.prediction.step_s for c in choices} == best
    assert any(c.recipe.async_tensor for c in choices)


@pytest.mark.cluster  # slow
def test_async_tensor_is_chosen_for_large_but_not_tiny_layers() -> None:
    large = preset_job("qwen2.5-72b-b300", "cluster.nodes=4")
    found = search(
        large, replace(B300, nodes=4), own=False, microbatches=(1, 2, 4, 8), recomputes=(("none", 1),)
    )
    assert all(c.recipe.async_tensor for c in found.choices if c.recipe.layout.tensor >= 4)
    tiny = preset_job(
        "qwen2.5-7b-h200", "model.preset=qwen2.5-0.5b", "train.sequence_length=256", "train.microbatch=1"
    )
    few = search(
        tiny, Cluster(gpu("H200 SXM"), 1, 8), own=False, microbatches=(1,), recomputes=(("none", 1),)
    ).choices
    assert any(c.recipe.layout.tensor > 1 for c in few)
    assert not any(c.recipe.async_tensor for c in few)


def test_other_stacks_are_predicted_without_async_tensor() -> None:
    found = search(
        preset_job("qwen2.5-72b-b300"), B300, stack="nemo", microbatches=(2,), recomputes=(("none", 1),)
    )
    assert found.own is not None
    assert not found.own.recipe.async_tensor
    assert not any(c.recipe.async_tensor for c in found.choices)
