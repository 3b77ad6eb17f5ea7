"""Published results in the planner's terms: model, recipe, cluster, stack, and measurements.

Values that a row does not state are filled in from what is known of its source (`plan_rows.toml`); a row that still lacks a value is left
out, with the reason. Rows of undescribed sources get stack and network from the wording of the row
(`plan_words.py`), and are marked as guessed.
"""

from __future__ import annotations

import csv
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from other_model import OtherModel
from plan_words import as_stack, has_experts, memory_kind, network_of, stack_of
from seatrial.hardware.catalogue import Gpu, Precision, find_gpu
from seatrial.hardware.networks import Network, find_network
from seatrial.job.architecture import Architecture
from seatrial.job.layout import Layout
from seatrial.plan.cost.kernels import Kernels, UnknownSpeedError
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.recipe import Recipe, Recompute, Sharding

GIB = 1024**3

# What is known of rows beside their own columns, see the head of that file.
_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
FACTS: list[dict[str, Any]] = _TABLE["fact"]
GPUS = {
    "A100-80GB": "A100-80GB SXM",
    "A100-40GB": "A100-40GB SXM",
    "H100": "H100 SXM",
    "H100-80GB": "H100 SXM",
    "H200": "H200 SXM",
    "B200": "B200 SXM",
    "GB200": "GB200",
    "GB300": "GB300",
    "B300": "B300 SXM",
    "H100-SXM": "H100 SXM",
    "H100 80GB": "H100 SXM",
    "H200-141GB": "H200 SXM",
    "A100 80GB": "A100-80GB SXM",
    "A100 40GB": "A100-40GB SXM",
}
# Not in the catalogue: sold to a few, and slower than the data sheet of their name (torchtitan's benchmarks say so).
VARIANTS = {
    "H100-96GB(HBM2e,500W)": ("H100 SXM", 96.0, 2.4, 500),
    "H100-95GB(HBM2e)": ("H100 SXM", 95.0, 2.4, 500),
}
# How models' names begin that have a gated MLP; those of one matrix for both ends.
GATED = (
    "Llama",
    "InternLM",
    "Qwen",
    "Mistral",
    "Gemma",
    "Yi-",
    "Baichuan",
    "OLMo",
    "PaLM",
    "CodeLlama",
    "TinyLlama",
)
TIED = ("MPT", "GPT", "Megatron", "BLOOM", "OPT")
DATE = re.compile(r"\bdate (\d\d-\d\d)")
# SimuMax's own predictions of its rows (MooreThreads/SimuMax@4dcaae5 docs/b200/b200_release_v1.2_summary.json: perf_ms).
PEER = re.compile(r"SimuMax predicted ([\d.]+) ms")
RECOMPUTE: dict[str, Recompute] = {
    "full": "full",
    "full(inferred)": "full",
    "none": "none",
    "none(not listed)": "none",
    "": "none",
    "selective": "operators",
    "selective(attention)": "attention",
    "selective(op)": "operators",
    "selective(layer)": "alternate",
}


@dataclass(frozen=True)
class Row:
    """One published result that can be predicted."""

    source: str
    name: str
    gpu: str
    model: Architecture
    recipe: Recipe
    cluster: Cluster
    stack: str
    free_microbatch: bool  # the source does not say it
    free_recompute: bool
    step_s: float | None
    memory_bytes: float | None
    memory_kind: str
    fits: bool
    peer_s: float | None = None  # seconds a step that another planner published for it


@dataclass(frozen=True)
class Guessed(Row):
    """A row of an undescribed source: stack, network and other unstated values are guessed from its wording."""


# What is looked at; a file may have more.
COLUMNS = next(
    csv.reader(
        [
            "source,url_or_ref,model,layers,hidden,ffn_hidden,heads,kv_heads,vocab,seq_len,gpu,n_gpus,gpus_per_node,"
            "interconnect,tp,pp,vpp,dp,cp,ep,zero_or_fsdp,micro_batch,global_batch,precision,recompute,seq_parallel,"
            "tflops_per_gpu,tokens_per_s_per_gpu,step_time_s,mem_gb_per_gpu,attn_flops_convention,outcome,notes"
        ]
    )
)


def read(path: Path) -> tuple[list[Row], dict[str, int]]:
    """Every row of the CSV that can be predicted, and how many could not for each reason. ValueError names missing columns."""
    rows: list[Row] = []
    left: dict[str, int] = {}
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path}: no column {', '.join(missing)}")
        for raw in reader:
            try:
                rows.append(_row({k: (raw[k] or "").strip() for k in COLUMNS}))
            except Unusable as why:
                left[str(why)] = left.get(str(why), 0) + 1
    return rows, left


class Unusable(Exception):
    """A row cannot be predicted, with the reason."""


def _number(raw: dict[str, str], key: str, default: int | None = None) -> int:
    text = raw[key]
    if text in ("", "n/a"):
        if default is None:
            raise Unusable(f"no {key}")
        return default
    return int(_float(raw, key))


def _float(raw: dict[str, str], key: str) -> float:
    try:
        value = float(raw[key])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise Unusable(f"{key} is no number above 0: {raw[key]}")
    return value


def _gpu(name: str) -> Gpu:
    if name in VARIANTS:
        base, gb, tb_s, watts = VARIANTS[name]
        found = find_gpu(base)
        assert found is not None
        return replace(found, name=f"{base} {gb:.0f} GB", hbm_gb=gb, hbm_tb_s=tb_s, watts=watts)
    found = find_gpu(GPUS.get(name, name))
    if found is None:
        raise Unusable(f"GPU {name} is not in the catalogue")
    return found


def _precision(text: str) -> Precision:
    if "nvfp4" in text:
        raise Unusable("precision nvfp4 has no peak in the catalogue")
    return "fp8" if "fp8" in text else "bf16"


def _row(raw: dict[str, str]) -> Row:
    facts = _facts(raw)
    raw |= {k: v for k, v in facts.items() if raw.get(k) == ""}
    stack = facts.get("stack") or stack_of(raw)
    known = "stack" in facts
    if stack is None:
        raise Unusable(f"stack not known from the words of its source: {raw['source']}")
    if not known and has_experts(raw):
        raise Unusable("experts")
    if "offload" in raw["zero_or_fsdp"]:
        raise Unusable("optimizer on the CPU")
    if "compile" in raw["precision"] and stack == "torchtitan":
        stack = "torchtitan-compiled"
    model = _model(raw)
    gpus = _number(raw, "n_gpus")
    recipe = _recipe(raw, gpus)
    if not known:
        if recipe.global_batch % (recipe.layout.data_parallel * recipe.microbatch):
            raise Unusable("the batch is no multiple of microbatch and data parallel")
        recipe = as_stack(raw, recipe, stack)
    gpu, each = _gpu(raw["gpu"]), _number(raw, "gpus_per_node", 8)
    per_node = min(gpus, each)
    nodes = -(-gpus // per_node)
    between = _network(raw, facts.get("network"), gpu.name, each, alone=nodes == 1)
    cluster = Cluster(gpu, nodes, per_node, between, gpu.nvlink_domain)
    try:
        _ = Kernels(gpu, recipe.precision).peak
    except UnknownSpeedError as why:
        raise Unusable(str(why)) from None
    memory = _float(raw, "mem_gb_per_gpu") * GIB if raw["mem_gb_per_gpu"] else None
    row = Row(
        source=raw["source"],
        name=raw["model"],
        gpu=cluster.gpu.name,
        model=model,
        recipe=recipe,
        cluster=cluster,
        stack=stack,
        free_microbatch=raw["micro_batch"] == "",
        free_recompute=raw["recompute"] == "",
        step_s=_step(raw, model, recipe),
        memory_bytes=memory,
        memory_kind=facts.get("memory", "allocated"),
        fits=raw["outcome"] != "OOM",
        peer_s=float(peer[1]) / 1e3 if (peer := PEER.search(raw["notes"])) else None,
    )
    if known:
        return row
    found = Guessed(**{f.name: getattr(row, f.name) for f in fields(row)})
    return replace(found, memory_kind=memory_kind(raw, stack))


def _facts(raw: dict[str, str]) -> dict[str, Any]:
    """All that the entries of plan_rows.toml say of a row."""
    found: dict[str, Any] = {}
    date = DATE.search(raw["notes"])
    columns = raw | {"date": date[1] if date else ""}
    for fact in FACTS:
        if raw["source"].startswith(fact["source"]) and fact.get("where", {}).items() <= columns.items():
            found |= fact
    return found


def _network(raw: dict[str, str], usual: str | None, gpu: str, each: int, *, alone: bool) -> Network | None:
    """The row's network, else its source's usual one; for an unknown source the vendor's reference node."""
    text = raw["interconnect"]
    default = None if usual is None else find_network(usual)
    found = network_of(text, gpu, each, default) if text or default is None else None
    if (found or default) is None and not alone:
        raise Unusable(f"network not known: {text or f'none named, and no usual one of {gpu}'}")
    return found or default


def _model(raw: dict[str, str]) -> Architecture:
    hidden, heads = _number(raw, "hidden"), _number(raw, "heads")
    name = raw["model"]
    gated = name.casefold().startswith(tuple(g.casefold() for g in GATED))
    ffn = _number(raw, "ffn_hidden", None if gated else 4 * hidden)
    vocab = _number(raw, "vocab", 32000)
    plain = not gated
    return OtherModel(
        num_hidden_layers=_number(raw, "layers"),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=_number(raw, "kv_heads", heads),
        head_dim=hidden // heads,
        vocab_size=vocab,
        gated=gated,
        tie_word_embeddings=name.startswith(TIED),
        layer_vectors=(13 if plain else 2) * hidden,
        learned_positions=_number(raw, "seq_len") if plain and not name.startswith("Nemotron") else 0,
    )


def _recipe(raw: dict[str, str], gpus: int) -> Recipe:
    cp = _number(raw, "cp", 1)
    # Where data parallel is said to make up the rest, the others are 1.
    rest = gpus // cp // _number(raw, "dp") if raw["dp"] not in ("", "n/a") else 0
    tp = _number(raw, "tp", 1 if rest == 1 else None)
    pp = _number(raw, "pp", 1 if rest == tp else None)
    vpp = _number(raw, "vpp", 1)
    if gpus % (tp * pp * cp):
        raise Unusable("layout does not divide the GPUs")
    dp = gpus // (tp * pp * cp)
    cut = raw["zero_or_fsdp"]
    sharding: Sharding = "full" if "FSDP" in cut and "FSDP=0" not in cut else "optimizer"
    if "ZeRO-2" in cut:
        sharding = "gradients"
    if "ZeRO-0" in cut:
        sharding = "none"
    shard = dp
    if "groups of 8" in cut:
        shard = min(8, dp)
    batch = _number(raw, "global_batch")
    micro = _number(raw, "micro_batch", 1)
    recompute = RECOMPUTE.get(raw["recompute"])
    if recompute is None:
        raise Unusable(f"recompute {raw['recompute']}")
    if pp == 1:
        vpp = 1
    return Recipe(
        layout=Layout(
            tensor=tp,
            shard=shard,
            replicate=dp // shard,
            pipeline=pp,
            stages_per_rank=vpp,
            schedule="interleaved-1f1b" if vpp > 1 else "1f1b",
        ),
        sequence=_number(raw, "seq_len"),
        global_batch=batch,
        microbatch=micro,
        context=cp,
        precision=_precision(raw["precision"]),
        sharding=sharding,
        reshard="SHARD_GRAD_OP" not in cut and pp == 1,
        recompute=recompute,
        sequence_parallel=raw["seq_parallel"] != "no",
    )


def _step(raw: dict[str, str], model: Architecture, recipe: Recipe) -> float | None:
    """Seconds a step: as given, or from tokens/s, or from TFLOP/s and the formula that its source used."""
    tokens = recipe.global_batch * recipe.sequence
    gpus = recipe.world
    if raw["step_time_s"]:
        return _float(raw, "step_time_s")
    if raw["tokens_per_s_per_gpu"]:
        return tokens / gpus / _float(raw, "tokens_per_s_per_gpu")
    if not raw["tflops_per_gpu"]:
        return None
    rate = _float(raw, "tflops_per_gpu") * 1e12 * gpus
    convention = raw["attn_flops_convention"]
    if "HFU" in convention:  # arXiv:2104.04473, equation 3
        h, s, v, layers = model.hidden_size, recipe.sequence, model.vocab_size, model.num_hidden_layers
        again = 96 if recipe.recompute == "full" else 72
        flops = again * tokens * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))
        return flops / rate
    if "full" in convention or "causal" in convention:
        flops = tokens * model.flops_per_token(recipe.sequence, full_attention="full" in convention)
        return flops / rate
    return None


def by(rows: list[Row], *keys: str) -> Iterator[tuple[tuple[str, ...], list[Row]]]:
    """Rows grouped by attributes, in the order of first appearance."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(str(getattr(row, k)) for k in keys), []).append(row)
    yield from groups.items()
