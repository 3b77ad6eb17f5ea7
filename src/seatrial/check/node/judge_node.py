"""The verdicts on one node's measurements of itself, and on the node stage of all nodes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from seatrial.check.intake.collect import Piece
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.compare import Plan, against_siblings
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.report import Judged, Report
from seatrial.check.node.columns import gpus_of
from seatrial.check.node.judge_host import judge_interface, judge_limits, judge_storage
from seatrial.check.node.judge_load import PAIRS, Peers, judge_gpu_load, judge_gpu_presence, judge_rates
from seatrial.check.node.judge_pairs import judge_pairs
from seatrial.check.node.node_clock import judge_clock
from seatrial.check.node.node_stage import FACTS_VERSION
from seatrial.check.outputs.gpu_state import GpuState, GpuStates
from seatrial.check.outputs.tool import Lines

Facts = Mapping[str, Any]

TOOL = "node"  # name of the node's own measurements in the report
# The absence of these tools is no finding: nothing needs them where they are missing.
_OPTIONAL = ("mlxlink",)
_HANGING = ("hung", "stuck")


def judge_node(
    facts: Facts | None,
    node: str,
    *,
    peers: Peers | None = None,
    gpus_elsewhere: bool = False,
) -> list[Finding]:
    """Judge everything but tool outputs and what columns.columns() takes. None (no answer) gives no finding here.

    `peers` are the measurements of all nodes. `gpus_elsewhere`: other nodes have GPUs, so this one should too.
    """
    if facts is None:
        return []
    found: list[Finding] = []
    gpus = len(gpus_of(facts))
    rdma = bool(facts["ports"]["before"])
    # The plan's number alone is not enough: without GPUs the same job runs its ranks on CPUs.
    wanted = facts["options"]["device"] == "cuda" or gpus_elsewhere
    found += judge_gpu_presence(facts, node, wanted=wanted)
    found += judge_gpu_load(facts, node)
    peers = peers or Peers()
    found += judge_rates(facts, node, peers)
    found += judge_pairs(facts, node, peers.values.get(PAIRS, []))
    memory = facts["inventory"]["memory_bytes"]
    found += judge_limits(facts["limits"], node, rdma=rdma, gpus=gpus, memory_bytes=memory)
    found.append(judge_clock(facts["clock"], node))
    if facts["storage"] is not None:
        found += judge_storage(facts["storage"], node)
    found.append(judge_interface(facts["interface"], node, rdma=rdma))
    found += _calls(facts, node)
    found += _kernel(facts, node)
    return found


def _calls(facts: Facts, node: str) -> Iterator[Finding]:
    """Tools and probes without an answer: a hang is a fault, a missing tool leaves the result unknown."""
    target = Target(node=node)
    gpus = facts["gpus"]
    # Clock services can be queried in several ways; only a hang is worth reporting.
    clock = [c for c in facts["clock"]["no_answer"] if c["ended"] in _HANGING]
    calls = [*facts["calls"], *clock]
    if gpus is not None and gpus.get("problem") is not None:
        # The probe exits normally if it can report why NVML is unusable.
        ended = gpus["ended"] if gpus["ended"] in _HANGING else "failed"
        calls.append({"name": "NVML", "ended": ended, "why": gpus["problem"], "seconds": None})
    rates = facts["rates"]
    if rates is not None and rates["ended"] != "ok":
        why = f"{rates['problem']}, during: {rates['doing']}"
        calls.append({"name": "rates", "ended": rates["ended"], "why": why, "seconds": rates["seconds"]})
    for call in calls:
        if call["ended"] == "ok" or (call["ended"] == "absent" and call["name"].startswith(_OPTIONAL)):
            continue
        if call["ended"] in _HANGING:
            yield Finding("NOD002", "FAIL", target, call["why"], call["seconds"], "s of waiting")
        else:
            yield Finding("NOD001", "UNJUDGED", target, call["why"])
    for failure in [] if rates is None else rates["failed"]:
        text = f"{failure['part']}: {failure['problem']}"
        if failure["hardware"]:
            yield Finding("NOD022", "FAIL", target, text)
        else:
            yield Finding("NOD001", "UNJUDGED", target, text)
    for name in [] if rates is None else rates["skipped"]:
        why = f"{name}: no time was left"
        yield Finding("NOD001", "UNJUDGED", target, why)


def _kernel(facts: Facts, node: str) -> Iterator[Finding]:
    """Whether part of the log is lost. An unreadable log is reported with the driver's messages (MSR008)."""
    kernel = facts["kernel"]
    target = Target(node=node)
    if kernel["text"] is not None and kernel["lost"]:
        why = f"the log of {kernel['source']} does not reach back to boot"
        if facts["gpus"] is None:
            yield Finding("NOD014", "PASS", target, f"{why}; sufficient without GPUs")
        else:
            yield Finding("NOD014", "UNJUDGED", target, why)


def judged_node(
    facts: Facts | None,
    node: str,
    *,
    peers: Peers | None = None,
    gpus_elsewhere: bool = False,
) -> Judged:
    """judge_node() with the node's inventory, as report.Report and compare.against_siblings() take it."""
    found = judge_node(facts, node, peers=peers, gpus_elsewhere=gpus_elsewhere)
    return Judged(f"node {node}", node, TOOL, tuple(found), inventory_of(facts))


def inventory_of(facts: Facts | None) -> dict[str, str | int | float]:
    """Properties that nodes which train together should share; unknown ones are omitted."""
    if facts is None:
        return {}
    own = facts["inventory"]
    found: dict[str, str | int | float | None] = {
        "kernel": own["kernel"],
        "architecture": own["architecture"],
        "system": own["system"],
        "CPU": own["cpu"],
        "CPUs": facts["limits"]["cpus"],
        # The firmware reserves a little, not the same amount on all nodes.
        "host memory, GiB": None
        if own["memory_bytes"] is None
        else round(own["memory_bytes"] / (8 << 30)) * 8,
        "NICs": _ids(own["pci_nics"]) or None,
        "GPU chips": _ids(own["pci_gpus"]) or None,
        "torch": own["packages"].get("torch"),
    }
    if facts["gpus"] is not None and facts["gpus"].get("problem") is None:
        found["GPUs"] = sum("lost" not in g for g in facts["gpus"]["gpus"])
    return {name: value for name, value in found.items() if value is not None}


def _ids(devices: list[dict[str, str]]) -> str:
    """Devices by kind: "8 x 10de:2335, 1 x 1af4:1041"."""
    return ", ".join(f"{n} x {ids}" for ids, n in sorted(Counter(d["ids"] for d in devices).items()))


def pieces_of(facts: Facts | None, node: str) -> list[Piece]:
    """The tool outputs among the facts, for offline.judge_pieces()."""
    if facts is None:
        return []
    found = [_piece(output, node) for output in facts["outputs"]]
    kernel = facts["kernel"]
    if kernel["text"] is not None:
        cut = f" (of {kernel['lines']} lines only the relevant and the newest)" if kernel["cut"] else ""
        found.append(Piece(f"{node}: {kernel['source']}{cut}", node, Lines.of(kernel["text"])))
    return found


def _piece(output: Mapping[str, Any], node: str) -> Piece:
    file, states = f"{node}: {output['tool']}", output.get("states")
    if states is None:
        return Piece(file, node, Lines.of(output["text"]))
    gpus = [GpuState(**gpu) for gpu in states["gpus"]]
    return Piece(file, node, states=GpuStates(**{**states, "file": file, "gpus": gpus}))


def judge_stage(
    facts: Mapping[str, Facts | None], *, plan: Plan | None = None, port_gbit_s: float | None = None
) -> Report:
    """Judge the node stage of all nodes: tool outputs (offline.judge_pieces), judge_node() with peers, and differences.

    Rates that columns.columns() takes are judged by nodes.judge_nodes(), clock offsets by node_clock.judge_offsets().
    """
    strange = {node for node, own in facts.items() if own is not None and own.get("version") != FACTS_VERSION}
    others = [_strange(node) for node in strange]
    facts = {node: own for node, own in facts.items() if node not in strange}
    pieces = [piece for node, own in facts.items() for piece in pieces_of(own, node)]
    report = judge_pieces(pieces, plan=plan, port_gbit_s=port_gbit_s)
    peers = Peers.of(facts.values())
    some = any(gpus_of(own) for own in facts.values())
    mine = [
        judged_node(own, node, peers=peers, gpus_elsewhere=some)
        for node, own in facts.items()
        if own is not None
    ]
    # Without findings: rates have limits of their own here, and were compared above.
    differs, _ = against_siblings([replace(each, findings=()) for each in mine])
    return Report((*mine, *report.judged), (*report.compared, *differs, *others))


def _strange(node: str) -> Finding:
    why = "another version of seatrial runs there; its measurements cannot be read here"
    return Finding("NOD001", "UNJUDGED", Target(node=node), why)
