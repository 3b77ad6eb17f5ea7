"""Which features of training work together: the table of docs/combinations.md, from the rules and from the tests' cases.

    python tests/cluster/combinations.py    writes it

A pair is refused if `seatrial validate` refuses the smallest job with both. It is compared if a case of the tests below has both, alone or
with others: loss and gradient norm of each step, and each parameter's gradient of the first, against one process.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import test_async_tensor  # noqa: E402
import test_batch_ramp  # noqa: E402
import test_combinations  # noqa: E402
import test_context  # noqa: E402
import test_expert  # noqa: E402
import test_fp8  # noqa: E402
import test_lora_experts  # noqa: E402
import test_lora_runs  # noqa: E402
import test_masked_loss  # noqa: E402
import test_muon  # noqa: E402
import test_packed_documents  # noqa: E402
import test_parity  # noqa: E402
import test_router_bias  # noqa: E402
from parity import Case  # noqa: E402

from seatrial.base.errors import InputError  # noqa: E402
from seatrial.job import job_from_text  # noqa: E402

DOCUMENT = ROOT / "docs" / "combinations.md"
JOB: dict[str, Any] = {
    "model.family": "qwen2",
    "model.vocab_size": 512,
    "model.hidden_size": 128,
    "model.intermediate_size": 256,
    "model.num_hidden_layers": 4,
    "model.num_attention_heads": 4,
    "model.num_key_value_heads": 4,
    "model.head_dim": 32,
    "model.max_position_embeddings": 256,
    "model.tie_word_embeddings": False,
    "data.train": "builtin:python-library",
    "cluster.device": "cpu",
    "train.steps": 10,
    "train.sequence_length": 256,
    "train.global_batch": 32,
    "train.microbatch": 2,
    "train.precision": "fp32",
    "train.compile": False,
    "optimizer.lr": 1e-3,
    "optimizer.warmup_steps": 0,
    "checkpoint.every_steps": 5,
}
SIZES = ("tensor", "pipeline", "context", "replicate", "shard")
MIXTURE = {
    "model.family": "qwen3_moe",
    "model.num_experts": 8,
    "model.num_experts_per_tok": 2,
    "model.moe_intermediate_size": 64,
}


@dataclass(frozen=True)
class Feature:
    """`keys` of the job file are what it is; `needed` is what it needs, where the other feature of a pair says nothing else."""

    name: str
    has: Callable[[Case], bool]
    keys: dict[str, Any]
    needed: dict[str, Any] = field(default_factory=dict)


def _layout(name: str) -> Callable[[Case], bool]:
    return lambda case: case["layout"].get(name, 1) > 1


def _schedule(name: str) -> Callable[[Case], bool]:
    return lambda case: (
        case["layout"].get("pipeline", 1) > 1 and case["layout"].get("schedule", "1f1b") == name
    )


def _is(key: str, value: object = True) -> Callable[[Case], bool]:
    return lambda case: case.get(key) == value


def _shards(case: Case) -> bool:
    layout = case["layout"]
    return bool(layout.get("shard", 1) > layout.get("context", 1))


PP2, STAGES = {"parallel.pipeline": 2}, {"parallel.stages_per_rank": 2}
RECOMPUTES = {"train.activation_checkpointing": "full"}
FEATURES = (
    Feature("tensor", _layout("tensor"), {"parallel.tensor": 2}),
    Feature("async_tensor", _is("async_tensor"), {"parallel.tensor": 2, "parallel.async_tensor": True}),
    Feature("1f1b", _schedule("1f1b"), {**PP2, "parallel.schedule": "1f1b"}),
    Feature("gpipe", _schedule("gpipe"), {**PP2, "parallel.schedule": "gpipe"}),
    Feature("interleaved", _schedule("interleaved-1f1b"), {**PP2, "parallel.schedule": "interleaved-1f1b"}, STAGES),
    Feature("zero-bubble", _schedule("zero-bubble"), {**PP2, "parallel.schedule": "zero-bubble"}, STAGES),
    Feature("shard", _shards, {"parallel.shard": 2}),
    Feature("replicate", _layout("replicate"), {"parallel.replicate": 2}),
    Feature("context, gathered", lambda c: _layout("context")(c) and not c.get("ring_attention"), {"parallel.context": 2, "parallel.ring_attention": False}),
    Feature("context, ring", _is("ring_attention"), {"parallel.context": 2, "parallel.ring_attention": True}),
    Feature("experts", lambda c: str(c.get("family")).endswith("_moe"), MIXTURE),
    Feature("expert parallel", _layout("expert"), {"parallel.expert": 2}, {**MIXTURE, "parallel.shard": 2}),
    Feature("documents", _is("documents"), {"data.attend_across_documents": False}),
    Feature("recompute, full", _is("activation_checkpointing", "full"), RECOMPUTES),
    Feature("recompute, selective", _is("activation_checkpointing", "selective"), {"train.activation_checkpointing": "selective"}),
    Feature("every 2nd layer", _is("recompute_every_layers", 2), {"train.recompute_every_layers": 2}, RECOMPUTES),
    Feature("offload", _is("offload_activations"), {"train.offload_activations": True}, RECOMPUTES),
    Feature("accumulate, sharded", _is("accumulate", "sharded"), {"train.accumulate": "sharded"}),
    Feature("compile", _is("compile"), {"train.compile": True}),
    Feature("bf16", _is("precision", "bf16"), {"train.precision": "bf16"}),
    Feature("fp8", _is("precision", "fp8"), {"train.precision": "fp8"}),
    Feature("tied embedding", _is("tied"), {"model.tie_word_embeddings": True}),
    Feature("LoRA", lambda c: "lora" in c, {"model.lora.rank": 4, "model.lora.alpha": 8, "model.lora.targets": ["q_proj", "o_proj"]}),
    Feature("muon", lambda c: c.get("optimizer", {}).get("name") == "muon", {"optimizer.name": "muon"}),
    Feature("batch_ramp", lambda c: "ramp" in c, {"train.batch_ramp": [{"steps": 2, "global_batch": 16}]}),
    # A job with it needs a file of conversations; no rule is about it.
    Feature("loss on answers", _is("masked"), {}),
)  # fmt: skip


def cases() -> Iterator[Case]:
    """Those of the tests that compare layouts with one process, with all their keys."""
    usual: tuple[tuple[dict[str, Case], Case], ...] = (
        (test_parity.OTHERS | test_parity.FP32, {}),
        (test_combinations.CASES, {}),
        (test_async_tensor.ASYNC | test_async_tensor.BITWISE, {"async_tensor": True}),
        (test_context.CONTEXT, {}),
        (test_expert.EXPERT, {"family": "qwen3_moe"}),
        (test_router_bias.CASES, {"family": "glm4_moe"}),
        (test_packed_documents.PACKED, {"documents": True}),
        (test_masked_loss.MASKED, {"masked": True}),
        (test_batch_ramp.CASES, test_batch_ramp.GROWS),
        (test_lora_runs.CASES, {"lora": test_lora_runs.ALL}),
        (test_lora_experts.CASES, {"family": "qwen3_moe", **test_lora_experts.LORA}),
        (test_muon.TRAINED, {"optimizer": test_muon.MUON}),
        (test_fp8.SAME_SCALES | test_fp8.AS_TP2 | {n: c for n, (c, _) in test_fp8.CLOSE.items()}, test_fp8.FP8),
    )  # fmt: skip
    for found, every in usual:
        for case in found.values():
            if "sabotage" not in case:
                yield {"layout": {}, **every, **case}


def refusal(a: Feature, b: Feature) -> str | None:
    """Why `seatrial validate` refuses the smallest job with both; None: it does not."""
    keys = {**JOB, **a.needed, **b.needed, **a.keys, **b.keys}
    ranks = 1
    for size in SIZES:
        ranks *= keys.get(f"parallel.{size}", 1)
    keys["cluster.gpus_per_node"] = ranks
    written = [f"{key}={_toml(value)}" for key, value in keys.items()]
    try:
        job_from_text('name = "pair"\n', name="pair", base_folder=ROOT, overrides=written)
    except InputError as error:
        return error.diagnostics[0].message
    return None


def _toml(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        entries = (", ".join(f"{k} = {_toml(v)}" for k, v in each.items()) for each in value)
        return "[" + ", ".join("{" + entry + "}" for entry in entries) + "]"
    return json.dumps(value)


def document() -> str:
    """The whole page."""
    known = list(cases())
    held = [{i for i, case in enumerate(known) if feature.has(case)} for feature in FEATURES]
    reasons: dict[str, int] = {}
    cells: dict[tuple[int, int], str] = {}
    for a, b in combinations_with_replacement(range(len(FEATURES)), 2):
        one, two = FEATURES[a], FEATURES[b]
        if any(two.keys.get(key, value) != value for key, value in one.keys.items()):
            cells[a, b] = ""
        elif why := refusal(one, two):
            cells[a, b] = str(reasons.setdefault(why, len(reasons) + 1))
        else:
            cells[a, b] = "=" if held[a] & held[b] else "+"
    head = "".join(f" {i} |" for i in range(1, len(FEATURES) + 1))
    rows = [
        f"| {b + 1} {FEATURES[b].name} |" + "".join(f" {cells[a, b]} |" for a in range(b + 1))
        for b in range(len(FEATURES))
    ]
    count = {kind: sum(cell == kind for cell in cells.values()) for kind in "=+"}
    refused = sum(cell.isdigit() for cell in cells.values())
    lines = [
        "# What works together",
        "",
        "Written by `python tests/cluster/combinations.py` from the rules of the job file and the cases of the tests.",
        "",
        f"- `=` ({count['=']} pairs): a test compares loss, gradient norm and every parameter's gradient with those of one process, in a case with both,",
        "  alone or with others. A row with itself: with that feature alone, or with others. In bf16 and FP8 within what their roundings allow.",
        f"- `+` ({count['+']}): accepted; no case of these tests has both.",
        f"- a number ({refused}): refused, for the reason below, exit code 2.",
        "- empty: alternatives of one key.",
        "",
        f"| |{head}",
        "|---|" + "---|" * len(FEATURES),
        *rows,
        "",
        *(f"{number}. {why}" for why, number in reasons.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(DOCUMENT.read_text() != document())
    DOCUMENT.write_text(document())
