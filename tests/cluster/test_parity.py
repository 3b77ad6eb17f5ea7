"""Every layout against one process: loss, gradient norm, and every parameter's gradient.

A right loss over wrong gradients is the classic fault of parallel training, so the gradients of the first step are
put together from all ranks' boxes and compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from conftest import each_case, run_cases, selected_cases
from installed import install_examples

pytestmark = pytest.mark.cluster

LOSS_ABSOLUTE = 1e-5
NORM_RELATIVE = 5e-5
GRADIENT_OF_LARGEST = 1e-5

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "fsdp2": {"shard": 2},
    "tp2-fsdp2": {"tensor": 2, "shard": 2},
    "pp2-fsdp2": {"pipeline": 2, "shard": 2},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "tp2-pp2-fsdp2": {"tensor": 2, "pipeline": 2, "shard": 2},
    "pp2-interleaved": {"pipeline": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b"},
    "tp2-pp2-fsdp2-interleaved": {
        "tensor": 2,
        "pipeline": 2,
        "shard": 2,
        "stages_per_rank": 2,
        "schedule": "interleaved-1f1b",
    },
    "pp2-zero-bubble": {"pipeline": 2, "stages_per_rank": 2, "schedule": "zero-bubble"},
    "pp4": {"pipeline": 4},
    "replicate2-fsdp2": {"replicate": 2, "shard": 2},
}
# Nothing about these depends on whether the embedding is tied.
UNTIED_ONLY: dict[str, dict[str, Any]] = {
    "pp2-gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "replicate2": {"replicate": 2},
    "cp2-tp2": {"tensor": 2, "shard": 2, "context": 2},
    "pp2-breadth-first": {"pipeline": 2, "stages_per_rank": 2, "schedule": "breadth-first"},  # of examples/
}
# The optimizer of examples/.
MOMENTUM = {"tied": False, "steps": 20, "optimizer": {"name": "momentum", "lr": 0.2}}
WITH_MOMENTUM: dict[str, dict[str, Any]] = {
    n: {} if n == "one" else LAYOUTS[n] for n in ("one", "fsdp2", "tp2-pp2-fsdp2")
}
# Stages and shards with all, some or none of a group's parameters; the tied embedding is in two stages.
GROUPS = [
    {"match": "*embed_tokens*", "lr_factor": 0.3, "weight_decay": 0.0},
    {"match": "*norm.weight", "weight_decay": 0.5},
    {"match": "model.layers.[12].*", "lr_factor": 2.0},
]
WITH_GROUPS = {"tied": True, "steps": 6, "optimizer": {"groups": GROUPS}}
BF16_MOMENTS = {"tied": False, "steps": 20, "optimizer": {"name": "adamw_bf16"}}
# Attention that ends at the begin of a document: whatever carries the bounds to the stages must be right in each.
WITH_DOCUMENTS: dict[str, dict[str, Any]] = {
    **{n: LAYOUTS[n] for n in ("tp2", "pp2", "fsdp2", "tp2-pp2-fsdp2", "pp2-zero-bubble")},
    "pp2-fsdp2-interleaved": {**LAYOUTS["pp2-interleaved"], "shard": 2},
    "pp2-gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "pp4": {"pipeline": 4},
}
# Gradients reduced in every microbatch, of which each rank has two to eight.
SHARDED: dict[str, dict[str, Any]] = {
    **{n: LAYOUTS[n] for n in ("fsdp2", "tp2-fsdp2", "pp2-fsdp2", "tp2-pp2-fsdp2", "replicate2-fsdp2")},
    "replicate2": {"replicate": 2},
    "pp2-replicate2-fsdp2": {"pipeline": 2, "replicate": 2, "shard": 2},
    "pp2-fsdp2-gpipe": {"pipeline": 2, "shard": 2, "schedule": "gpipe"},
    "pp2-fsdp2-interleaved": {**LAYOUTS["pp2-interleaved"], "shard": 2},
}
SELECTIVE = {"activation_checkpointing": "selective"}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "one-selective": {"layout": {}, **SELECTIVE},
    "one-every2": {"layout": {}, "activation_checkpointing": "full", "recompute_every_layers": 2},
    "tp2-pp2-fsdp2-selective": {"layout": LAYOUTS["tp2-pp2-fsdp2"], **SELECTIVE},
    "pp2-fsdp2-selective-every2": {
        "layout": LAYOUTS["pp2-fsdp2"],
        **SELECTIVE,
        "recompute_every_layers": 2,
        "accumulate": "sharded",
    },
    "tp2-fsdp2-selective-compiled": {"layout": LAYOUTS["tp2-fsdp2"], **SELECTIVE, "compile": True},
}


# Every layer's experts, and the balance loss, which couples the layers of all stages. It is of each microbatch, and every
# layout here has those of one process.
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "one": {"layout": {}},
    "fsdp2-sharded": {"layout": LAYOUTS["fsdp2"], "accumulate": "sharded"},
    "tp2-pp2-fsdp2-selective": {"layout": LAYOUTS["tp2-pp2-fsdp2"], **SELECTIVE},
    **{n: {"layout": LAYOUTS[n]} for n in ("tp2", "replicate2-fsdp2", "pp2-interleaved", "pp2-zero-bubble")},
    "pp2-zero-bubble-fsdp2": {
        "layout": {**LAYOUTS["pp2-zero-bubble"], "shard": 2},
        "reshard_after_forward": False,
    },
    "one-full": {"layout": {}, "activation_checkpointing": "full"},
    "ep2-pp2": {"layout": {"pipeline": 2, "shard": 2, "expert": 2}},
    "tp2-async": {"layout": LAYOUTS["tp2"], "async_tensor": True},
}


def _cases() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    for tied in (False, True):
        end = "tied" if tied else "untied"
        cases.append({"name": f"one-{end}", "layout": {}, "tied": tied})
        cases += [{"name": f"{n}-{end}", "layout": layout, "tied": tied} for n, layout in LAYOUTS.items()]
        cases.append(
            {
                "name": f"pp2-zero-bubble-fsdp2-{end}",
                "layout": {**LAYOUTS["pp2-zero-bubble"], "shard": 2},
                "tied": tied,
                "reshard_after_forward": False,
            }
        )
    cases += [{"name": f"{n}-untied", "layout": layout, "tied": False} for n, layout in UNTIED_ONLY.items()]
    full = LAYOUTS["tp2-pp2-fsdp2"]
    cases += [
        {"name": "one-qwen3", "layout": {}, "tied": True, "family": "qwen3"},
        {"name": "tp2-qwen3", "layout": LAYOUTS["tp2"], "tied": True, "family": "qwen3"},
        {"name": "tp2-pp2-fsdp2-qwen3", "layout": full, "tied": True, "family": "qwen3"},
        *({"name": f"{n}-momentum", "layout": layout, **MOMENTUM} for n, layout in WITH_MOMENTUM.items()),
        *({"name": f"{n}-moments", "layout": layout, **BF16_MOMENTS} for n, layout in WITH_MOMENTUM.items()),
        *({"name": f"{n}-groups", "layout": layout, **WITH_GROUPS} for n, layout in WITH_MOMENTUM.items()),
        {"name": "one-20-steps", "layout": {}, "tied": False, "steps": 20},
        {"name": "one-recompute", "layout": {}, "tied": False, "activation_checkpointing": "full"},
        {
            "name": "tp2-pp2-fsdp2-recompute",
            "layout": full,
            "tied": False,
            "activation_checkpointing": "full",
        },
        *({"name": f"{n}-recompute", "tied": False, **case} for n, case in RECOMPUTED.items()),
        {"name": "one-bf16", "layout": {}, "tied": True, "precision": "bf16"},
        {"name": "tp2-pp2-fsdp2-bf16", "layout": full, "tied": True, "precision": "bf16"},
        {
            "name": "tp2-fsdp2-compiled",
            "layout": LAYOUTS["tp2-fsdp2"],
            "tied": False,
            "compile": True,
        },
        {"name": "repeat-untied", "layout": full, "tied": False},
        *_document_cases(),
        *(
            {"name": f"{n}-sharded-untied", "layout": layout, "tied": False, "accumulate": "sharded"}
            for n, layout in SHARDED.items()
        ),
        {
            "name": "pp2-fsdp2-sharded-bf16",
            "layout": LAYOUTS["pp2-fsdp2"],
            "tied": True,
            "precision": "bf16",
            "accumulate": "sharded",
        },
        {
            "name": "tp2-fsdp2-sharded-compiled",
            "layout": LAYOUTS["tp2-fsdp2"],
            "tied": False,
            "compile": True,
            "accumulate": "sharded",
        },
        *(
            {"name": f"{n}-experts", "tied": False, "family": "qwen3_moe", **case}
            for n, case in WITH_EXPERTS.items()
        ),
        {
            "name": "sabotage-balance",
            "layout": {"tensor": 2},
            "tied": False,
            "family": "qwen3_moe",
            "steps": 1,
            "sabotage": "balance loss and positions counted by every tensor rank",
        },
        {
            "name": "sabotage-norms",
            "layout": {"tensor": 2},
            "tied": False,
            "steps": 1,
            "sabotage": "norm gradients not summed",
        },
        {
            "name": "sabotage-ends",
            "layout": {"pipeline": 2},
            "tied": True,
            "steps": 1,
            "sabotage": "tied gradients not summed",
        },
    ]
    # A layout that is wrong is so within a few steps; that nothing adds up over many is shown once.
    return [{"steps": _STEPS if _is_long(case["name"]) else _FEW, **case} for case in cases]


_STEPS, _FEW = 12, 2


def _is_long(name: str) -> bool:
    return name in ("one-untied", "one-tied", "one-recompute", "tp2-pp2-fsdp2-tied")


def _document_cases() -> list[dict[str, Any]]:
    with_documents = {"tied": False, "documents": True, "steps": _FEW}
    full = LAYOUTS["tp2-pp2-fsdp2"]
    return [
        {"name": "one-documents", "layout": {}, **with_documents},
        *(
            {"name": f"{n}-documents", "layout": layout, **with_documents}
            for n, layout in WITH_DOCUMENTS.items()
        ),
        {
            "name": "pp2-zero-bubble-fsdp2-documents",
            "layout": {**LAYOUTS["pp2-zero-bubble"], "shard": 2},
            "reshard_after_forward": False,
            **with_documents,
        },
        {
            "name": "recompute-documents",
            "layout": full,
            "activation_checkpointing": "full",
            **with_documents,
        },
        {"name": "one-bf16-documents", "layout": {}, "precision": "bf16", **with_documents},
        {"name": "bf16-documents", "layout": full, "precision": "bf16", **with_documents},
        # Compiled, with tensor parallel, the embedding's gradient was once zero in torch's own combination.
        {
            "name": "compiled-documents",
            "layout": LAYOUTS["tp2-fsdp2"],
            "compile": True,
            **with_documents,
        },
        {
            "name": "sabotage-documents",
            "layout": {"pipeline": 2},
            "sabotage": "documents of another microbatch",
            **with_documents,
            "steps": 1,
        },
    ]


@dataclass
class Ran:
    """What all ranks of one case saw."""

    ranks: list[dict[str, Any]]

    def histories(self) -> Iterator[list[tuple[float, float]]]:
        for rank in self.ranks:
            yield rank["history"]

    def whole(self, what: str, reference: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, this layout's part, the reference's same part); asserts that the parts cover every parameter."""
        seen = {name: torch.zeros(values.shape, dtype=torch.bool) for name, values in reference.items()}
        for rank in self.ranks:
            for name, offsets, values in rank[what]:
                index = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                seen[name][index] = True
                yield name, values, reference[name][index]
        missing = [name for name, covered in seen.items() if not covered.all()]
        assert not missing, f"no rank holds all of {missing}"


def read_runs(out: Path, cases: Iterable[dict[str, Any]]) -> dict[str, Ran]:
    """What the ranks of each case left in `out`, by the case's name."""

    def of(name: str) -> Ran:
        return Ran([torch.load(f, weights_only=True) for f in sorted(out.glob(f"{name}.*.pt"))])

    return {case["name"]: of(case["name"]) for case in cases}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ran]:
    """Every case, run once; of those of `make test-ci` and `make test-all` what a selected test reads."""
    out = tmp_path_factory.mktemp("parity")
    unwanted = (_LONG | _CI) - selected_cases(request)
    cases = [case for case in _cases() if case["name"] not in unwanted]
    with pytest.MonkeyPatch.context() as patch:
        install_examples(out / "site", patch)
        done = run_cases(cases, out, timeout_s=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return read_runs(out, cases)


def _reference(runs: dict[str, Ran], name: str, what: str) -> dict[str, Tensor]:
    return {n: values for n, _, values in runs[name].ranks[0][what]}


def _worst(ran: Ran, what: str, reference: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference as a part of the parameter's own largest entry, and whose it is."""
    worst = (0.0, "")
    for name, ours, theirs in ran.whole(what, reference):
        if ours.numel():
            error = float((ours - theirs).abs().max() / reference[name].abs().max())
            worst = max(worst, (error, name))
    return worst


def _differences(ran: Ran, reference: Ran) -> tuple[float, float]:
    """(largest absolute difference in loss, largest relative one in gradient norm) over all steps and ranks."""
    steps = len(ran.ranks[0]["history"])
    theirs = reference.ranks[0]["history"][:steps]
    loss = max(abs(a - b) for h in ran.histories() for (a, _), (b, _) in zip(h, theirs, strict=True))
    norm = max(abs(a - b) / b for h in ran.histories() for (_, a), (_, b) in zip(h, theirs, strict=True))
    return loss, norm


FP32 = [f"{n}-{end}" for n in [*LAYOUTS, "pp2-zero-bubble-fsdp2"] for end in ("untied", "tied")]
FP32 += [f"{n}-untied" for n in UNTIED_ONLY]
FP32 += ["tp2-qwen3", "tp2-pp2-fsdp2-qwen3", "one-recompute", "tp2-pp2-fsdp2-recompute", "tp2-fsdp2-compiled"]
FP32 += [f"{n}-recompute" for n in RECOMPUTED]
FP32 += [f"{n}-momentum" for n in WITH_MOMENTUM if n != "one"]
FP32 += [f"{n}-groups" for n in WITH_MOMENTUM if n != "one"]
FP32 += [*(f"{n}-sharded-untied" for n in SHARDED), "tp2-fsdp2-sharded-compiled"]
FP32 += [f"{n}-experts" for n in WITH_EXPERTS if n != "one"]
FP32 += [f"{n}-documents" for n in [*WITH_DOCUMENTS, "pp2-zero-bubble-fsdp2", "recompute", "compiled"]]


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
    *(f"{n}-sharded-untied" for n in SHARDED if n not in ("fsdp2", "pp2-replicate2-fsdp2")),
    *("tp2-fsdp2-compiled", "tp2-fsdp2-sharded-compiled", "tp2-fsdp2-selective-compiled-recompute"),
    "pp2-fsdp2-selective-every2-recompute",
    *(
        f"{n}-experts"
        for n in WITH_EXPERTS
        if n not in ("one", "fsdp2-sharded", "tp2-pp2-fsdp2-selective", "ep2-pp2")
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


def _peer(name: str) -> str:
    if name.endswith(("recompute", "compiled")):
        return "one-untied"
    return f"one-{name.rpartition('-')[2]}"


@_each(FP32)
def test_a_layout_trains_as_one_process(name: str, runs: dict[str, Ran]) -> None:
    peer = runs[_peer(name)]
    loss, norm = _differences(runs[name], peer)
    gradient, whose = _worst(runs[name], "gradients", _reference(runs, _peer(name), "gradients"))
    print(
        f"{name}: loss {loss:.1e}, norm {norm:.1e}, gradient {gradient:.1e} ({whose})"
    )  # pytest -rP shows it
    assert loss <= LOSS_ABSOLUTE
    assert norm <= NORM_RELATIVE
    assert gradient <= GRADIENT_OF_LARGEST, whose
    if name.endswith("momentum"):
        weight, whose = _worst(runs[name], "weights", _reference(runs, _peer(name), "weights"))
        assert weight <= GRADIENT_OF_LARGEST, whose


@_each([f"{n}-experts" for n in ("fsdp2-sharded", "tp2-pp2-fsdp2-selective", "pp2-zero-bubble", "ep2-pp2")])
def test_the_balance_loss_is_that_of_one_process(name: str, runs: dict[str, Ran]) -> None:
    expected = runs["one-experts"].ranks[0]["balance"]
    # Two experts of eight; with all alike it would be 2.
    assert all(value > 2.01 for value in expected)
    for rank in runs[name].ranks:
        assert rank["balance"] == pytest.approx(expected, rel=1e-5)
    assert_same_load(runs[name], runs["one-experts"])


def assert_same_load(ran: Ran, peer: Ran) -> None:
    """Every expert gets as many positions in each step, over all ranks, and every rank knows the load."""
    assert torch.equal(_routed(ran), _routed(peer))
    assert all(rank["load"] == peer.ranks[0]["load"] for rank in ran.ranks)


def _routed(ran: Ran) -> Tensor:
    """Positions sent to each expert of each layer in each step, [steps, L, X]."""
    return torch.stack([torch.stack(rank["routed"]) for rank in ran.ranks]).sum(0)


def test_what_counts_twice_is_seen(runs: dict[str, Ran]) -> None:
    ran, peer = runs["sabotage-balance"], runs["one-experts"]
    assert abs(ran.ranks[0]["history"][0][0] - peer.ranks[0]["history"][0][0]) < LOSS_ABSOLUTE
    gradient, whose = _worst(ran, "gradients", _reference(runs, "one-experts", "gradients"))
    assert gradient > 0.01
    assert "mlp.gate" in whose
    assert torch.equal(_routed(ran)[0], 2 * _routed(peer)[0])


@_each(["fsdp2-moments", "tp2-pp2-fsdp2-moments"])
def test_bf16_moments_train_alike_in_another_layout(name: str, runs: dict[str, Ran]) -> None:
    """A moment that another order of addition rounds to the next bf16 value differs by 0.4 %."""
    loss, norm = _differences(runs[name], runs["one-moments"])
    assert loss < 1e-4
    assert norm < 5e-4


def test_bf16_moments_train_as_fp32_ones(runs: dict[str, Ran]) -> None:
    loss, norm = _differences(runs["one-moments"], runs["one-20-steps"])
    assert 0 < loss < 1e-3
    assert norm < 2e-3


def test_the_reference_learns(runs: dict[str, Ran]) -> None:
    for name in ("one-untied", "one-momentum", "one-moments"):
        history = runs[name].ranks[0]["history"]
        assert history[-1][0] < history[0][0] - 2, "nothing that does not train can tell layouts apart"
        assert max(norm for _, norm in history) > 1.0, "clipping must have been at work"


def test_every_rank_reports_the_same_bits(runs: dict[str, Ran]) -> None:
    for name, ran in runs.items():
        first = ran.ranks[0]["history"]
        assert all(history == first for history in ran.histories()), name


def test_two_runs_are_equal_to_the_last_bit(runs: dict[str, Ran]) -> None:
    for a, b in zip(runs["repeat-untied"].ranks, runs["tp2-pp2-fsdp2-untied"].ranks, strict=True):
        assert a["history"] == b["history"]
        for (name, _, ours), (_, _, theirs) in zip(a["weights"], b["weights"], strict=True):
            assert torch.equal(ours, theirs), name


@_each(
    ["one-recompute", "one-selective-recompute", "one-every2-recompute", "tp2-pp2-fsdp2-selective-recompute"]
)
def test_recomputing_activations_changes_no_bit(name: str, runs: dict[str, Ran]) -> None:
    ran, peer = runs[name], runs["one-untied" if name.startswith("one") else "tp2-pp2-fsdp2-untied"]
    for ours, theirs in zip(ran.ranks, peer.ranks, strict=True):
        steps = len(ours["history"])
        assert ours["history"] == theirs["history"][:steps]
        for (of, _, a), (_, _, b) in zip(ours["gradients"], theirs["gradients"], strict=True):
            assert torch.equal(a, b), of


@_each(["tp2-pp2-fsdp2-bf16", "pp2-fsdp2-sharded-bf16"])
def test_bf16_is_the_same_training_in_another_layout(name: str, runs: dict[str, Ran]) -> None:
    loss, norm = _differences(runs[name], runs["one-bf16"])
    assert loss < 0.02
    assert norm < 0.03
    loss, _ = _differences(runs["one-bf16"], runs["one-tied"])
    assert 0 < loss < 0.05, "bf16 is close to fp32, and not the same"


def test_a_lost_sum_of_norm_gradients_is_seen(runs: dict[str, Ran]) -> None:
    """The comparison must be able to fail: without the sum over the tensor group the first loss is still right."""
    ran, peer = runs["sabotage-norms"], runs["one-untied"]
    assert abs(ran.ranks[0]["history"][0][0] - peer.ranks[0]["history"][0][0]) < LOSS_ABSOLUTE
    gradient, whose = _worst(ran, "gradients", _reference(runs, "one-untied", "gradients"))
    assert gradient > 0.1
    assert "norm" in whose


def test_a_lost_sum_of_tied_gradients_is_seen(runs: dict[str, Ran]) -> None:
    ran, peer = runs["sabotage-ends"], runs["one-tied"]
    assert abs(ran.ranks[0]["history"][0][0] - peer.ranks[0]["history"][0][0]) < LOSS_ABSOLUTE
    gradient, whose = _worst(ran, "gradients", _reference(runs, "one-tied", "gradients"))
    assert gradient > 0.1
    assert whose == "model.embed_tokens.weight"


def test_attention_that_ends_with_a_document_is_another_training(runs: dict[str, Ran]) -> None:
    loss, _ = _differences(runs["one-documents"], runs["one-untied"])
    assert loss > 0.01
    loss, norm = _differences(runs["bf16-documents"], runs["one-bf16-documents"])
    assert loss < 0.02
    assert norm < 0.03
    loss, _ = _differences(runs["one-bf16-documents"], runs["one-documents"])
    assert 0 < loss < 0.05


def test_stage_using_documents_of_another_microbatch_is_detected(runs: dict[str, Ran]) -> None:
    loss, _ = _differences(runs["sabotage-documents"], runs["one-documents"])
    gradient, _ = _worst(
        runs["sabotage-documents"], "gradients", _reference(runs, "one-documents", "gradients")
    )
    assert loss > 100 * LOSS_ABSOLUTE
    assert gradient > 100 * GRADIENT_OF_LARGEST


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_torch_drops_stop_the_run(precision: str, tmp_path: Path) -> None:
    """What the job's rules refuse, past the rules: zero-bubble with FSDP that frees weights after the forward pass."""
    layout = {**LAYOUTS["pp2-zero-bubble"], "shard": 2 if precision == "fp32" else 1}
    case = {"name": "dropped", "layout": layout, "tied": False, "steps": 1, "precision": precision}
    done = run_cases([case], tmp_path, timeout_s=120)
    assert done.returncode == 1
    assert "no gradient for" in done.stderr
