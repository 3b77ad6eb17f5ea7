"""Every layout against one process: loss, gradient norm, and every parameter's gradient."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch
from parity import (
    BF16,
    FULL,
    GRADIENT_OF_LARGEST,
    INTERLEAVED,
    LAYOUTS,
    LOSS_ABSOLUTE,
    OFFLOAD,
    RECOMPUTE,
    SELECTIVE,
    ZERO_BUBBLE,
    Case,
    Ran,
    assert_same_bits,
    assert_same_load,
    assert_trains_alike,
    compare,
    routed,
    run_layouts,
)
from parity_ranks import ARCH, LENGTH, MICROBATCH, SEQUENCES

from conftest import each_case, run_cases
from installed import install_examples
from seatrial.job.layout import Layout
from seatrial.plan.cost.memory import offloaded_inputs
from seatrial.plan.model.recipe import Recipe

pytestmark = pytest.mark.cluster

PP2_GPIPE: Case = {"layout": {"pipeline": 2, "schedule": "gpipe"}}
PP2_FSDP2_INTERLEAVED: Case = {"layout": {**INTERLEAVED, "shard": 2}}
ZERO_BUBBLE_FSDP2: Case = {"layout": {**ZERO_BUBBLE, "shard": 2}, "reshard_after_forward": False}
COMPILED: Case = {"layout": LAYOUTS["tp2-fsdp2"], "compile": True}
SHARDED = {"accumulate": "sharded"}
BF16_MOMENTS = {"steps": 20, "optimizer": {"name": "adamw_bf16"}}
# Stages and shards with all, some or none of a group's parameters; the tied embedding is in two stages.
GROUPS = [
    {"match": "*embed_tokens*", "lr_factor": 0.3, "weight_decay": 0.0},
    {"match": "*norm.weight", "weight_decay": 0.5},
    {"match": "model.layers.[12].*", "lr_factor": 2.0},
]
# By the end of a name: what its cases have.
KINDS: dict[str, Case] = {
    "untied": {},
    "tied": {"tied": True},
    "qwen3": {"tied": True, "family": "qwen3"},
    "momentum": {"steps": 20, "optimizer": {"name": "momentum", "lr": 0.2}},  # the optimizer of examples/
    "groups": {"tied": True, "steps": 6, "optimizer": {"groups": GROUPS}},
    "documents": {"documents": True},
    "experts": {"family": "qwen3_moe"},
}


def _in(*names: str) -> dict[str, Case]:
    return {name: {"layout": LAYOUTS[name]} for name in names}


def _kind(end: str, cases: dict[str, Case], peer: str = "") -> dict[str, Case]:
    """The cases with this end of the name and what belongs to it, each against the one process of the kind `peer`."""
    usual = {"peer": f"one-{peer or end}", **KINDS[peer or end]}
    return {f"{name}-{end}": {**usual, **case} for name, case in cases.items()}


EVERY = {**_in(*LAYOUTS), "pp2-zero-bubble-fsdp2": ZERO_BUBBLE_FSDP2}
# Nothing about these depends on whether the embedding is tied.
UNTIED_ONLY: dict[str, Case] = {
    "pp2-gpipe": PP2_GPIPE,
    "replicate2": {"layout": {"replicate": 2}},
    "cp2-tp2": {"layout": {"tensor": 2, "shard": 2, "context": 2}},
    "pp2-breadth-first": {"layout": {**INTERLEAVED, "schedule": "breadth-first"}},  # of examples/
}
RECOMPUTED: dict[str, Case] = {
    "one": RECOMPUTE,
    "one-selective": SELECTIVE,
    "one-every2": {**RECOMPUTE, "recompute_every_layers": 2},
    "one-offload": OFFLOAD,
    "tp2-pp2-fsdp2": {"layout": FULL, **RECOMPUTE},
    "tp2-pp2-fsdp2-offload": {"layout": FULL, **OFFLOAD},
    "tp2-fsdp2-offload-compiled": {**COMPILED, **OFFLOAD},
    "tp2-pp2-fsdp2-selective": {"layout": FULL, **SELECTIVE},
    "pp2-fsdp2-selective-every2": {
        "layout": LAYOUTS["pp2-fsdp2"],
        **SELECTIVE,
        "recompute_every_layers": 2,
        **SHARDED,
    },
    "tp2-fsdp2-selective-compiled": {**COMPILED, **SELECTIVE},
}
# Gradients reduced in every microbatch, of which each rank has two to eight.
REDUCED: dict[str, Case] = {
    **_in("fsdp2", "tp2-fsdp2", "pp2-fsdp2", "tp2-pp2-fsdp2", "replicate2-fsdp2"),
    "replicate2": {"layout": {"replicate": 2}},
    "pp2-replicate2-fsdp2": {"layout": {"pipeline": 2, "replicate": 2, "shard": 2}},
    "pp2-fsdp2-gpipe": {"layout": {"pipeline": 2, "shard": 2, "schedule": "gpipe"}},
    "pp2-fsdp2-interleaved": PP2_FSDP2_INTERLEAVED,
}
# Attention that ends at the begin of a document: whatever carries the bounds to the stages must be right in each.
WITH_DOCUMENTS: dict[str, Case] = {
    **_in("tp2", "pp2", "fsdp2", "tp2-pp2-fsdp2", "pp2-zero-bubble", "pp4"),
    "pp2-fsdp2-interleaved": PP2_FSDP2_INTERLEAVED,
    "pp2-gpipe": PP2_GPIPE,
    "pp2-zero-bubble-fsdp2": ZERO_BUBBLE_FSDP2,
    "recompute": {"layout": FULL, **RECOMPUTE},
    # With tensor parallel, the embedding's gradient was once zero in torch's own combination.
    "compiled": COMPILED,
}
# Every layer's experts, and the balance loss, which couples the layers of all stages. It is of each microbatch, and every
# layout here has those of one process.
WITH_EXPERTS: dict[str, Case] = {
    **_in("tp2", "replicate2-fsdp2", "pp2-interleaved", "pp2-zero-bubble"),
    "fsdp2-sharded": {"layout": {"shard": 2}, **SHARDED},
    "tp2-pp2-fsdp2-selective": {"layout": FULL, **SELECTIVE},
    "pp2-zero-bubble-fsdp2": ZERO_BUBBLE_FSDP2,
    "one-full": RECOMPUTE,
    "pp2-offload": {"layout": LAYOUTS["pp2"], **OFFLOAD},
    "ep2-pp2": {"layout": {"pipeline": 2, "shard": 2, "expert": 2}},
    "tp2-async": {"layout": {"tensor": 2}, "async_tensor": True},
}
FP32 = {
    **_kind("untied", EVERY | UNTIED_ONLY),
    **_kind("tied", EVERY),
    **_kind("qwen3", _in("tp2", "tp2-pp2-fsdp2")),
    **_kind("momentum", _in("fsdp2", "tp2-pp2-fsdp2")),
    **_kind("groups", _in("fsdp2", "tp2-pp2-fsdp2")),
    **_kind("recompute", RECOMPUTED, "untied"),
    **_kind("sharded-untied", {n: {**case, **SHARDED} for n, case in REDUCED.items()}, "untied"),
    **_kind("compiled", {"tp2-fsdp2": COMPILED, "tp2-fsdp2-sharded": {**COMPILED, **SHARDED}}, "untied"),
    **_kind("experts", WITH_EXPERTS),
    **_kind("documents", WITH_DOCUMENTS),
}
OTHERS: dict[str, Case] = {
    **{f"one-{kind}": case for kind, case in KINDS.items()},
    "one-20-steps": {"steps": 20},
    "repeat-untied": {"layout": FULL},
    "one-moments": {**BF16_MOMENTS, "peer": "one-20-steps"},
    "fsdp2-moments": {**BF16_MOMENTS, "layout": {"shard": 2}, "peer": "one-moments"},
    "tp2-pp2-fsdp2-moments": {**BF16_MOMENTS, "layout": FULL, "peer": "one-moments"},
    "one-bf16": {"tied": True, "precision": "bf16", "peer": "one-tied"},
    "tp2-pp2-fsdp2-bf16": {"layout": FULL, "tied": True, "precision": "bf16", "peer": "one-bf16"},
    "pp2-fsdp2-sharded-bf16": {
        "layout": LAYOUTS["pp2-fsdp2"],
        **SHARDED,
        "tied": True,
        "precision": "bf16",
        "peer": "one-bf16",
    },
    "one-bf16-documents": {"documents": True, "precision": "bf16", "peer": "one-documents"},
    "bf16-documents": {"layout": FULL, "documents": True, "precision": "bf16", "peer": "one-bf16-documents"},
    **{
        f"sabotage-{name}": {
            "steps": 1,
            "peer": f"one-{kind}",
            **KINDS[kind],
            "layout": layout,
            "sabotage": what,
        }
        for name, kind, layout, what in (
            ("balance", "experts", {"tensor": 2}, "balance loss and positions counted by every tensor rank"),
            ("norms", "untied", {"tensor": 2}, "norm gradients not summed"),
            ("ends", "tied", {"pipeline": 2}, "tied gradients not summed"),
            ("documents", "documents", {"pipeline": 2}, "documents of another microbatch"),
        )
    },
}
# Every dimension, schedule and option is also in a layout that is not among these: alone, or with others in a larger one; tied where
# the embedding's gradient crosses stages.
_LONG = {
    *(
        f"{n}-{end}"
        for n in ("tp2-fsdp2", "pp2-fsdp2", "tp2-pp2", "pp2-interleaved", "tp2-pp2-fsdp2-interleaved")
        for end in ("untied", "tied")
    ),
    *(f"{n}-tied" for n in ("tp2", "fsdp2", "replicate2-fsdp2", "pp2-zero-bubble")),
    *(f"{n}-untied" for n in ("pp2", "pp4", "pp2-zero-bubble-fsdp2", "replicate2")),
    *(f"tp2-pp2-fsdp2-{n}" for n in ("momentum", "moments", "qwen3", "recompute", "bf16", "documents")),
    *(f"{n}-sharded-untied" for n in REDUCED if n not in ("fsdp2", "pp2-replicate2-fsdp2")),
    *("tp2-fsdp2-compiled", "tp2-fsdp2-sharded-compiled", "tp2-fsdp2-selective-compiled-recompute"),
    "pp2-fsdp2-selective-every2-recompute",
    *(
        f"{n}-experts"
        for n in WITH_EXPERTS
        if n not in ("fsdp2-sharded", "tp2-pp2-fsdp2-selective", "ep2-pp2")
    ),
    *(f"{n}-documents" for n in ("tp2", "pp2", "fsdp2", "pp2-gpipe", "pp4", "pp2-zero-bubble")),
}
# Not in `make test`, which has each dimension and kind of schedule at least once.
_CI = {
    *("pp2-zero-bubble-untied", "pp4-tied", "pp2-gpipe-untied", "pp2-breadth-first-untied", "fsdp2-untied"),
    *("one-selective-recompute", "one-every2-recompute", "tp2-pp2-fsdp2-selective-recompute"),
    *("tp2-pp2-fsdp2-tied", "tp2-pp2-fsdp2-selective-experts"),
    *("pp2-replicate2-fsdp2-sharded-untied", "fsdp2-sharded-experts"),
    *("pp2-zero-bubble-fsdp2-documents", "recompute-documents", "compiled-documents"),
    *("tp2-pp2-fsdp2-groups", "fsdp2-groups"),
}
_each = partial(each_case, long=_LONG, ci=_CI)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    # A layout that is wrong is so within a few steps; that nothing adds up over many is shown once.
    many = ("one-untied", "one-tied", "one-recompute", "tp2-pp2-fsdp2-tied")
    cases = {name: {"steps": 12 if name in many else 2, **case} for name, case in (OTHERS | FP32).items()}
    with pytest.MonkeyPatch.context() as patch:
        install_examples(tmp_path_factory.mktemp("site"), patch)
        return run_layouts(request, cases, optional=_LONG | _CI)


@_each(FP32)
def test_a_layout_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name)
    if name.endswith("momentum"):
        assert_trains_alike(runs, name, what="weights")


@_each([f"{n}-experts" for n in ("fsdp2-sharded", "tp2-pp2-fsdp2-selective", "pp2-zero-bubble", "ep2-pp2")])
def test_the_balance_loss_is_that_of_one_process(name: str, runs: dict[str, Ran]) -> None:
    expected = runs["one-experts"].ranks[0]["balance"]
    # Two experts of eight; with all alike it would be 2.
    assert all(value > 2.01 for value in expected)
    for rank in runs[name].ranks:
        assert rank["balance"] == pytest.approx(expected, rel=1e-5)
    assert_same_load(runs[name], runs["one-experts"])


def test_what_counts_twice_is_seen(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage-balance")
    assert found.loss < LOSS_ABSOLUTE
    assert found.worst > 0.01
    assert "mlp.gate" in found.whose
    assert torch.equal(routed(runs["sabotage-balance"])[0], 2 * routed(runs["one-experts"])[0])


@_each(["fsdp2-moments", "tp2-pp2-fsdp2-moments"])
def test_bf16_moments_train_alike_in_another_layout(name: str, runs: dict[str, Ran]) -> None:
    """A moment that another order of addition rounds to the next bf16 value differs by 0.4 %."""
    assert_trains_alike(runs, name, loss=1e-4, norm=5e-4, worst=math.inf)


def test_bf16_moments_train_as_fp32_ones(runs: dict[str, Ran]) -> None:
    found = compare(runs, "one-moments")
    assert 0 < found.loss < 1e-3
    assert found.norm < 2e-3


def test_the_reference_learns(runs: dict[str, Ran]) -> None:
    for name in ("one-untied", "one-momentum", "one-moments"):
        history = runs[name].history
        assert history[-1][0] < history[0][0] - 2, "nothing that does not train can tell layouts apart"
        assert max(norm for _, norm in history) > 1.0, "clipping must have been at work"


def test_every_rank_reports_the_same_bits(runs: dict[str, Ran]) -> None:
    for ran in runs.values():
        ran.assert_ranks_agree()


def test_two_runs_are_equal_to_the_last_bit(runs: dict[str, Ran]) -> None:
    assert_same_bits(runs["repeat-untied"], runs["tp2-pp2-fsdp2-untied"], "weights")


@_each(
    [
        *("one-recompute", "one-selective-recompute", "one-every2-recompute", "one-offload-recompute"),
        *("tp2-pp2-fsdp2-selective-recompute", "tp2-pp2-fsdp2-offload-recompute"),
    ]
)
def test_recomputing_activations_changes_no_bit(name: str, runs: dict[str, Ran]) -> None:
    peer = "one-untied" if name.startswith("one") else "tp2-pp2-fsdp2-untied"
    assert_same_bits(runs[name], runs[peer], "gradients")


def test_as_many_inputs_are_offloaded_as_planned(runs: dict[str, Ran]) -> None:
    """The first of two stages with two layers each keeps one of its two inputs, the second both."""
    ran = runs["tp2-pp2-fsdp2-offload-recompute"]
    recipe = Recipe(
        LENGTH, SEQUENCES, MICROBATCH, Layout(**ran.case["layout"]), recompute="full", offload=True
    )
    expected = [offloaded_inputs(ARCH, recipe, rank) for rank in (0, 1)]
    assert expected == [2, 0]
    half = len(ran.ranks) // 2
    assert [rank["offloaded"] for rank in ran.ranks] == [expected[0]] * half + [expected[1]] * half


@_each(["tp2-pp2-fsdp2-bf16", "pp2-fsdp2-sharded-bf16"])
def test_bf16_is_the_same_training_in_another_layout(name: str, runs: dict[str, Ran]) -> None:
    assert_trains_alike(runs, name, **BF16)
    assert 0 < compare(runs, "one-bf16").loss < 0.05, "bf16 is close to fp32, and not the same"


def test_a_lost_sum_of_norm_gradients_is_seen(runs: dict[str, Ran]) -> None:
    """The comparison must be able to fail: without the sum over the tensor group the first loss is still right."""
    found = compare(runs, "sabotage-norms")
    assert found.loss < LOSS_ABSOLUTE
    assert found.worst > 0.1
    assert "norm" in found.whose


def test_a_lost_sum_of_tied_gradients_is_seen(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage-ends")
    assert found.loss < LOSS_ABSOLUTE
    assert found.worst > 0.1
    assert found.whose == "model.embed_tokens.weight"


def test_attention_that_ends_with_a_document_is_another_training(runs: dict[str, Ran]) -> None:
    assert compare(runs, "one-documents", "one-untied").loss > 0.01
    assert_trains_alike(runs, "bf16-documents", **BF16)
    assert 0 < compare(runs, "one-bf16-documents").loss < 0.05


def test_stage_using_documents_of_another_microbatch_is_detected(runs: dict[str, Ran]) -> None:
    found = compare(runs, "sabotage-documents")
    assert found.loss > 100 * LOSS_ABSOLUTE
    assert found.worst > 100 * GRADIENT_OF_LARGEST


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_torch_drops_stop_the_run(precision: str, tmp_path: Path) -> None:
    """What the job's rules refuse, past the rules: zero-bubble with FSDP that frees weights after the forward pass."""
    layout = {**ZERO_BUBBLE, "shard": 2 if precision == "fp32" else 1}
    case = {"name": "dropped", "layout": layout, "tied": False, "steps": 1, "precision": precision}
    done = run_cases([case], tmp_path, timeout_s=120)
    assert done.returncode == 1
    assert "no gradient for" in done.stderr
