"""The memory account adds up to the planner's memory; the smallest clusters are legal, fit, and are the smallest."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest

from presets import preset_job
from seatrial.hardware.catalogue import Gpu, find_gpu, gpus
from seatrial.hardware.networks import Network, find_network
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.models import model_presets
from seatrial.plan.cost.kernels import ATTENTION
from seatrial.plan.cost.memory import memory
from seatrial.plan.cost.memory_fit import judge
from seatrial.plan.cost.predict import capacity, predict, stack_for
from seatrial.plan.cost.stacks import stacks
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe
from seatrial.plan.search.fit import Account, Fit, _lean, account, smallest
from seatrial.plan.search.legal import refusal
from seatrial.plan.search.search import search
from seatrial.ui.plan_fit import as_sold, document, lines
from seatrial.ui.plan_html import fit_page

NDR = find_network("InfiniBand NDR 8x400")


@cache
def job(name: str = "qwen2.5-72b-b300", *overrides: str) -> Job:
    return preset_job(name, *overrides)


@cache
def reference() -> tuple[Fit, ...]:
    return smallest(job(), network_of=lambda _: NDR)


def by_name(told: Account) -> dict[str, float | None]:
    return {li.name: li.gpu for li in told.lines}


def test_a_70b_needs_140_gb_and_eight_times_that_to_train() -> None:
    told = account(model_presets()["llama3-70b"])
    assert dict(told.weights)["bf16"] == 2 * told.parameters == pytest.approx(141e9, rel=0.005)
    assert dict(told.weights) == {
        "fp32": 4 * told.parameters,
        "bf16": 2 * told.parameters,
        "fp8": told.parameters,
    }
    assert told.states == 16 * told.parameters
    assert told.headline == (
        "70.6B parameters: 141 GB of weights in bf16, 1.13 TB of states to train them (16 bytes a parameter)"
    )
    assert told.gpu_bytes is None
    assert [li.name for li in told.lines] == ["weights", "gradients", "moments"]


@pytest.mark.parametrize("stack", sorted(stacks()))
def test_the_account_adds_up_to_the_planners_memory(stack: str) -> None:
    recipe = Recipe.of(job())
    told = account(job().architecture, recipe, stack=stack)
    needs = memory(job().architecture, recipe, stack_for(recipe, stack)).reserved
    assert told.gpu_bytes == needs
    assert sum(li.gpu or 0.0 for li in told.lines) == pytest.approx(needs, rel=1e-12)
    assert told.cluster_bytes == pytest.approx(sum(li.cluster or 0.0 for li in told.lines), rel=1e-12)
    assert told.cluster_bytes is not None
    assert told.cluster_bytes <= needs * recipe.world
    # However a stack splits them: sums of what it says of itself.
    assert told.states / told.parameters == sum(stacks()[stack_for(recipe, stack).name].state_bytes)


def test_states_are_sharded_once_over_all_gpus() -> None:
    told = account(job().architecture, Recipe.of(job()))
    for li in told.lines:
        if li.once is not None:
            # Norms are on every tensor-parallel rank: a little more than one copy.
            assert li.once <= (li.cluster or 0.0) < li.once * 1.001


def test_other_stacks_have_fp32_master_weights() -> None:
    names = [li.name for li in account(job().architecture, stack="megatron").lines]
    assert names == ["weights", "gradients", "master weights", "moments"]


@pytest.mark.cluster  # slow
def test_every_gpu_of_the_catalogue_has_an_answer() -> None:
    found = reference()
    assert {f.gpu.name for f in found} == {g.name for g in gpus()}
    sizes = [f.gpus for f in found if f.recipe is not None]
    assert sizes == sorted(sizes)


@pytest.mark.cluster  # slow
def test_every_fit_is_legal_and_fits() -> None:
    for fit in reference():
        r = fit.recipe
        assert r is not None
        cluster = replace(fit.cluster, network=NDR)
        assert r.world == fit.gpus
        assert refusal(job(), cluster, replace(r, async_tensor=False)) is None
        if fit.gpu.architecture not in ATTENTION:
            assert fit.prediction is None
            assert "no training run" in (fit.why_unknown or "")
            continue
        again = predict(job().architecture, r, cluster)
        assert again.fits
        assert fit.needs == again.memory.reserved <= fit.available == capacity(cluster)
        assert fit.prediction == again


@pytest.mark.cluster  # slow
def test_no_smaller_cluster_fits() -> None:
    """Other schedules, replicas, more stages a rank: nothing that is legal fits where `smallest` says that nothing does."""
    for fit in reference():
        if fit.gpu.name not in ("B300 SXM", "H200 SXM", "A100-40GB SXM"):
            continue
        smaller = (
            Cluster(fit.gpu, fit.cluster.nodes - 1, 8, NDR)
            if fit.cluster.nodes > 1
            else Cluster(fit.gpu, 1, 4)
        )
        assert search(job(), smaller, own=False).choices == ()


@pytest.mark.cluster  # slow
def test_smallest_sure_fit_is_also_named_when_smallest_is_tight() -> None:
    found = reference()
    assert {f.verdict.word for f in found} == {"fits", "tight"}
    for fit in found:
        assert (fit.safe is None) == fit.verdict.sure
        if fit.safe is None:
            continue
        safe = fit.safe
        assert safe.safe is None
        assert safe.gpu == fit.gpu
        assert safe.gpus > fit.gpus
        assert safe.verdict.sure
        assert safe.recipe is not None
        assert safe.recipe.world == safe.gpus
        # At the tight size nothing that was tried needs less.
        assert fit.recipe is not None
        cluster = replace(fit.cluster, network=NDR)
        assert all(not judge(needs, fit.available).sure for _, needs in _all_lean(cluster))
        assert fit.needs == min(needs for _, needs in _all_lean(cluster))


def _all_lean(cluster: Cluster) -> list[tuple[Recipe, float]]:
    model = job().architecture
    return [(r, memory(model, r, stack_for(r)).reserved) for r in _lean(job(), cluster)]


def test_no_safe_size_when_even_the_largest_is_tight() -> None:
    """72B on at most 3 nodes of H100: fits there, but not with margin."""
    found = {
        f.gpu.name: f
        for f in smallest(
            job("qwen2.5-72b-b300", "train.global_batch=1024", "train.accumulate=whole"),
            most_nodes=3,
            network_of=lambda _: NDR,
        )
    }
    fit = found["H100 SXM"]
    assert (fit.cluster.nodes, fit.verdict.word, fit.safe) == (3, "tight", None)
    assert len(found) == len(gpus())
    told = document(job(), account(job().architecture), tuple(found.values()))
    one = next(c for c in told["clusters"] if c["gpu"] == "H100 SXM")
    assert (one["fits"], one["memory_verdict"]["verdict"], one["safe"]) == (True, "tight", None)
    shown = [text for text, _ in lines(job(), account(job().architecture), tuple(found.values()), width=100)]
    assert any("H100 SXM " in text and " % !" in text for text in shown)
    assert any(text.startswith("  !: may run out of memory") for text in shown)


def test_both_sizes_are_in_the_table_and_the_page() -> None:
    told = account(job().architecture)
    found = reference()
    shown = [text for text, _ in lines(job(), told, found, width=100)]
    assert (
        sum("with margin " in text and " % " in text for text in shown)
        >= sum(f.safe is not None for f in found)
        > 0
    )
    page = fit_page(job(), told, None, found)
    assert page.count("tight, may run out of memory") == sum(not f.verdict.sure for f in found)
    nested = [c["safe"] for c in document(job(), told, found)["clusters"]]
    assert [n is not None for n in nested] == [f.safe is not None for f in found]


def test_small_model_fits_on_one_gpu_without_a_network() -> None:
    small = job("first-voyage", "train.precision=bf16")
    found = smallest(small)
    # GB200 and GB300 are sold in whole trays.
    assert {f.gpus for f in found if not f.gpu.name.startswith("GB")} == {1}
    assert {f.gpus for f in found if f.gpu.name.startswith("GB")} == {4}
    known = [f for f in found if f.gpu.architecture in ATTENTION]
    assert all(f.prediction is not None and f.why_unknown is None for f in known)
    assert all(f.prediction is None for f in found if f not in known)


@pytest.mark.cluster  # slow
def test_unknown_network_gives_a_layout_without_a_speed() -> None:
    for fit in smallest(job()):
        assert fit.recipe is not None
        if fit.gpu.architecture not in ATTENTION:
            continue
        assert (fit.prediction is None) == fit.cluster.several_domains
        assert fit.why_unknown == (
            "the network between the nodes is unknown" if fit.cluster.several_domains else None
        )


def test_a_precision_without_a_known_peak_has_no_speed() -> None:
    found = smallest(job("first-voyage", "train.precision=fp32"))
    known = [f for f in found if f.gpu.architecture in ATTENTION]
    assert all(f.prediction is None and f.why_unknown and "fp32" in f.why_unknown for f in known)
    assert all(f.recipe is not None for f in found)


def test_a_job_that_does_not_fit_states_its_memory() -> None:
    found = smallest(job(), most_nodes=2, network_of=lambda _: NDR)
    none = {f.gpu.name: f for f in found if f.recipe is None}
    assert "A100-40GB SXM" in none
    fit = none["A100-40GB SXM"]
    assert fit.needs > fit.available
    assert fit.why_unknown == "does not fit on up to 2 nodes"
    assert [f.recipe is None for f in found] == sorted(f.recipe is None for f in found)


def test_without_a_legal_layout_the_reason_is_stated() -> None:
    """One sequence, one head, one layer: nothing to cut, so more GPUs than one are never legal, and one is too small."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
    sizes |= {"hidden_size": 32768, "intermediate_size": 300001, "vocab_size": 257}
    keys = [f"model.{key}={value}" for key, value in sizes.items()]
    alone = [f"{key}=1" for key in ("cluster.nodes", "cluster.gpus_per_node")]
    alone += [f"parallel.{key}=1" for key in ("tensor", "pipeline", "shard")]
    odd = job(
        "first-voyage", *keys, *alone, "train.global_batch=1", "train.microbatch=1", "train.precision=bf16"
    )
    found = smallest(odd, most_nodes=4)
    assert {f.why_unknown for f in found} == {"no layout is legal on up to 4 nodes"}
    assert {f.needs for f in found} == {math.inf}


def test_tied_embedding_on_one_3_gpu_node_needs_no_network() -> None:
    """Ranks 0 and 2 share a tied embedding; the stride of 2 does not divide the node."""
    gpu = find_gpu("H100 PCIe")
    assert gpu is not None
    recipe = Recipe(4096, 24, layout=Layout(pipeline=3))
    assert predict(model_presets()["qwen2.5-3b"], recipe, Cluster(gpu, 1, 3)).step_s > 0


@pytest.mark.cluster  # slow
def test_the_network_may_differ_by_gpu() -> None:
    h200 = find_gpu("H200 SXM")

    def network(gpu: Gpu) -> Network | None:
        return NDR if gpu == h200 else None

    found = smallest(job(), network_of=network)
    many = [f for f in found if f.cluster.several_domains]
    assert [f.gpu.name for f in many if f.prediction is not None] == ["H200 SXM"]


def test_a_part_of_a_node_and_an_assumed_node_are_called_so() -> None:
    of = job("llama3-8b-h100")
    found = {f.gpu.name: f for f in smallest(of, gpus_per_node=4)}
    # Boards have eight, whatever the job's nodes have.
    assert {found[name].sold for name in ("MI300X", "MI325X", "MI355X")} == {8}
    part, card = found["MI355X"], found["H100 PCIe"]
    assert (part.cluster.nodes, part.gpus, card.sold) == (1, 1, None)
    whole = replace(part, cluster=replace(part.cluster, gpus_per_node=8))
    assert as_sold(part) == "1 of 8: part of a node as it is sold"
    assert as_sold(whole) == ""
    assert "H100 PCIe: " in as_sold(card)
    needs = account(of.architecture)
    fits = [part, card, whole]
    shown = " ".join(" ".join(text for text, _ in lines(of, needs, fits, width=140)).split())
    assert [shown.count(words) for words in ("1 of 8 TP1", "1 x 8 TP1", as_sold(part), as_sold(card))] == [
        1
    ] * 4
    assert as_sold(part) in fit_page(of, needs, None, fits)
    assert [f["gpus_per_node_sold"] for f in document(of, needs, fits)["clusters"]] == [8, None, 8]
