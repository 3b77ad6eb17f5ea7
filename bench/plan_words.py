"""Guesses stack and network of a published row from its wording, if its source is not described.

Results are marked as guesses (`plan_rows.Guessed`): wording identifies kernels and ports, not their settings.
"""

from __future__ import annotations

import re
from dataclasses import replace

from seatrial.hardware.networks import (
    Network,
    find_network,
    latencies,
    networks,
    reference_node,
    reference_nodes,
)
from seatrial.plan.model.recipe import Recipe

# The first that a text matches, from the most particular on.
STACKS = (
    (r"\bseatrial", "seatrial"),
    (r"bigscience|\bbloom\b", "megatron-deepspeed-bf16"),
    (r"megatron[- ]?deepspeed|\bvtrain", "megatron-deepspeed"),
    (r"megascale", "megascale"),
    (r"torch[- ]?titan", "torchtitan"),
    (r"max[- ]?text|\bpax(?:ml)?\b", "maxtext"),
    (r"llm[- ]?foundry|mosaic\s?ml|\bcomposer\b", "llm-foundry"),
    (r"intern[- ]?evo", "internevo"),
    (r"gpt[- ]?neox|deeperspeed", "megatron-2021"),
    (r"megatron[- ]?bridge|\bnemo\b", "nemo"),
    # ZeRO around Hugging Face models, as DeepSpeed's.
    (r"colossal[- ]?ai", "deepspeed"),
    (r"megatron[- ]?core|\bmcore\b", "megatron"),
    (r"megatron", "megatron of its year"),
    (r"deepspeed", "deepspeed"),
    # torchtitan is FSDP without anything around it.
    (r"\bfsdp2?\b", "torchtitan"),
)
FIELDS = ("source", "notes", "precision")
_YEAR = re.compile(r"\b(20[12]\d)\b")
_ARXIV = re.compile(r"\b([12]\d)(?:0[1-9]|1[0-2])\.\d{4,5}\b")
# Megatron-LM as it was: the last year of each.
_MEGATRON = ((2020, "megatron-2020"), (2022, "megatron-2021"), (2023, "megatron-2023"))

_KINDS = (
    ("omni-path", re.compile(r"omni-?path|\bopa\b", re.I)),
    ("slingshot", re.compile(r"slingshot", re.I)),
    ("efa", re.compile(r"\befa", re.I)),
    ("roce", re.compile(r"\broce", re.I)),
    ("infiniband", re.compile(r"infiniband|\bib\b|(?<![a-wyz])[efhnx]dr(?:-?\d+)?\b", re.I)),
    ("ethernet", re.compile(r"ethernet|\btcp\b|\d+\s*gbe\b", re.I)),
)
# Gb/s of a port that InfiniBand's names stand for.
_SPEEDS = {"fdr": 56.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
_SPEED = re.compile(r"(?<![a-wyz])([efhnx]dr)(?:-?(\d+))?\b", re.I)
_RATE = r"(\d[\d,]*(?:\.\d+)?)\s*([GgTt][bB]?)(?:it|[eE])?(?:ps|/s)?"
_COUNT = re.compile(r"\b(\d+)\s*(?:[xX×]|(?:NIC|port|HCA|card|rail|link)s?\b)", re.I)
_AFTER = re.compile(
    r"\s*(?:of\s+|at\s+|@\s*)?(?:[A-Za-z]+-?\d*\s+)?(?:" + _RATE + r"|(\d+)\b(?!\s*(?:GPU|node)))"
)
_TOTAL = re.compile(_RATE + r"\s*(?:RDMA|RoCE|IB|InfiniBand|EFA)?\s*(?:/|per|a|each)\s*(node|gpu)\b", re.I)
_ALONE = re.compile(_RATE)
# A port of more than this is none yet: the figure is a node's.
_FASTEST_PORT = 800.0
_INSTANCES = (
    (r"\bp6-?b300\b", "AWS P6-B300 EFAv4"),
    (r"\bp6-?b200\b", "AWS P6-B200 EFAv4"),
    (r"\bp5en\b", "AWS P5en EFAv3"),
    (r"\bp5\b", "AWS P5 EFAv2"),
    (r"\bp4de?\b", "AWS P4d"),
    (r"\ba3[- ]?mega", "GCP A3 Mega"),
    (r"\ba3[- ]?high", "GCP A3 High"),
    (r"\bselene\b", "InfiniBand HDR 8x200"),
)
# The instances that a GPU is rented in, by the beginning of their network's name.
_CLOUDS = {
    "A100": "AWS P4d",
    "H100": "AWS P5 ",
    "H200": "AWS P5en",
    "B200": "AWS P6-B200",
    "B300": "AWS P6-B300",
}

# Without sequence parallel or distributed optimizer, and those that cut everything over their ranks, where nothing else is said.
OLD = ("megatron-2020", "megatron-2021", "megatron-deepspeed")
FULL = ("seatrial", "torchtitan", "llm-foundry", "maxtext")
# Experts, which the planner does not know.
_EXPERTS = re.compile(r"moe|mixtral|deepseek-?v[23]|\ba\d+b\b|\d+x\d+b|grok|dbrx", re.I)


def stack_of(raw: dict[str, str]) -> str | None:
    """The stack named by a row's source, else its notes, else its precision; None if none is."""
    for field in FIELDS:
        text = raw[field].casefold()
        for pattern, stack in STACKS:
            if re.search(pattern, text):
                return _megatron(raw) if stack == "megatron of its year" else stack
    return None


def _megatron(raw: dict[str, str]) -> str:
    text = " ".join(raw[field] for field in (*FIELDS, "url_or_ref"))
    years = [int(y) for y in _YEAR.findall(text)] or [2000 + int(y) for y in _ARXIV.findall(text)]
    if not years:
        return "megatron"
    return next((stack for last, stack in _MEGATRON if min(years) <= last), "megatron")


def network_of(text: str, gpu: str, gpus_per_node: int, usual: Network | None = None) -> Network | None:
    """The network between nodes by a row's wording; None if unknown.

    `usual` is what its source usually has: where the words say no more than the same rate, it is that one.
    """
    low = text.casefold()
    for pattern, name in _INSTANCES:
        if re.search(pattern, low):
            return find_network(name)
    for node in reference_nodes():
        if node.name.casefold() in low and _COUNT.search(text) is None:
            return find_network(node.network)
    kind = next((name for name, pattern in _KINDS if pattern.search(text)), None)
    ports = _ports(text, gpus_per_node)
    if ports is None:
        return _vendors(text, kind, gpu, gpus_per_node)
    nics, each = ports
    known = [n for n in networks() if n.nics_per_node * n.gbps_per_nic == nics * each]
    known = [n for n in known if n.gpus_per_node == gpus_per_node]
    if usual in known and (kind is None or _is(usual, kind)):
        return usual
    if kind is None:
        return None
    same = [n for n in known if _is(n, kind)]
    if same:
        # Clouds have one network for each GPU, some of them at the same rate.
        own = _CLOUDS.get(gpu.split()[0].split("-")[0], "")
        return next((n for n in same if n.name.startswith(own)), same[0])
    # Other ports of a known kind: its latency and what it reaches, at their rate.
    like = next((n for n in networks() if _is(n, kind)), None)
    made = like or Network("", 1, 1.0, 1, latencies().hop_us, "", latencies().hop_source)
    name = f"{kind} {nics:g}x{each:g}"
    return replace(
        made, name=name, nics_per_node=nics, gbps_per_nic=each, gpus_per_node=gpus_per_node, source=text
    )


def _is(network: Network | None, kind: str | None) -> bool:
    """Whether a network of the catalogue is of this kind."""
    name = "" if network is None else network.name.casefold()
    return kind is not None and (kind in name or (kind == "infiniband" and "xdr" in name))


def _gbps(value: str, unit: str) -> float:
    """Decimal Gb/s; a capital B means bytes."""
    rate = float(value.replace(",", "")) * (1000 if unit[0] in "tT" else 1)
    return 8 * rate if unit.endswith("B") else rate


def _ports(text: str, gpus_per_node: int) -> tuple[int, float] | None:
    """(ports of a node, Gb/s of each)."""
    count, alone = _COUNT.search(text), _ALONE.search(text)
    if count is not None and int(count[1]):
        after = _AFTER.match(text, count.end())
        each = _speed(text)
        if after is not None:
            each = _gbps(after[1], after[2]) if after[1] else float(after[3])
        elif each is None and alone is not None:
            each = _gbps(alone[1], alone[2])
        if each:
            return int(count[1]), each
    total = _TOTAL.search(text)
    if total is not None:
        rate = _gbps(total[1], total[2])
        return (gpus_per_node, rate) if total[3].casefold() == "gpu" else (1, rate)
    if alone is not None and (rate := _gbps(alone[1], alone[2])) > _FASTEST_PORT:
        return 1, rate
    return None


def _vendors(text: str, kind: str | None, gpu: str, gpus_per_node: int) -> Network | None:
    """Ports of the vendor's reference node for the GPU, if the wording gives only their rate, or nothing."""
    node = reference_node(gpu, gpus_per_node)
    found = None if node is None else find_network(node.network)
    if not text or found is None:
        return found
    alone = _ALONE.search(text)
    rate = _speed(text) or (_gbps(alone[1], alone[2]) if alone else None)
    return found if _is(found, kind) and rate in (None, found.gbps_per_nic) else None


def _speed(text: str) -> float | None:
    """Gb/s of InfiniBand's speed names."""
    named = _SPEED.search(text)
    return None if named is None else float(named[2] or _SPEEDS[named[1].casefold()])


def has_experts(raw: dict[str, str]) -> bool:
    """By the model's name, or the size of its expert-parallel groups."""
    return bool(_EXPERTS.search(raw["model"])) or raw["ep"] not in ("", "n/a", "0", "1")


def as_stack(raw: dict[str, str], recipe: Recipe, stack: str) -> Recipe:
    """Fill in unstated sharding and sequence parallel with the stack's defaults."""
    said, cut, old = raw["seq_parallel"].casefold(), raw["zero_or_fsdp"], stack.startswith(OLD)
    recipe = replace(recipe, sequence_parallel=said.startswith("y") or (not said.startswith("n") and not old))
    if "ZeRO-3" in cut or (cut == "" and stack.startswith(FULL)):
        return replace(recipe, sharding="full")
    return replace(recipe, sharding="none") if cut == "" and old else recipe


def memory_kind(raw: dict[str, str], stack: str) -> str:
    """The kind of a row's memory figure: by its notes, else what its stack logs."""
    text = raw["notes"].casefold()
    for word, kind in (("reserved", "reserved"), ("allocated", "allocated"), ("nvidia-smi", "device")):
        if word in text:
            return kind
    return "allocated" if stack.startswith(("megatron", "nemo")) else "reserved"
