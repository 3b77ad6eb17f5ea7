"""Findings from comparing outputs: nodes that should be alike, and the job's plan. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import judge_share
from seatrial.check.judging.report import Judged
from seatrial.check.ranges import listed

HIGHER_IS_BETTER = ("Gb/s", "GB/s", "TB/s", "MB/s", "TFLOP/s", "GFLOP/s")
LOWER_IS_BETTER = ("µs", "us", "ms", "s")
PEERS = 2  # fewer peers decide nothing: of two nodes that differ, either may be the faulty one
# For these a lower number means that something is missing; for all others a difference is only suspicious.
_COUNTS = ("GPUs", "fabric ports")

Inventory = Mapping[str, str | int | float]


@dataclass(frozen=True)
class Plan:
    """What the job needs of the nodes."""

    nodes: int
    gpus_per_node: int
    source: str


def usual_counts(inventories: Sequence[tuple[str | None, Inventory]]) -> dict[str, int]:
    """Count -> its value on more than half of the named nodes, from three nodes on. Takes each output's inventory."""
    usual = {}
    for name in _COUNTS:
        least: dict[str, int] = {}
        for node, inventory in inventories:
            if node is not None and isinstance(value := inventory.get(name), int):
                least[node] = min(value, least.get(node, value))
        value, times = Counter(least.values()).most_common(1)[0] if least else (0, 0)
        if len(least) > PEERS and times * 2 > len(least):
            usual[name] = value
    return usual


def against_siblings(judged: Sequence[Judged]) -> tuple[list[Finding], list[Judged]]:
    """Differences between the named nodes, and `judged` with the peers' medians filled in."""
    named = [j for j in judged if j.node is not None]
    found = contradictions(named) + _inventories(named) + _absent(named)
    slower, medians = _measurements(named)
    put = [replace(j, findings=tuple(medians.get(id(f), f) for f in j.findings)) for j in judged]
    return found + slower, put


def _inventories(named: Sequence[Judged]) -> list[Finding]:
    """Compare each property per tool: two tools may write the same value differently."""
    fields: dict[tuple[str, str], dict[str, str | int | float]] = {}
    for each in named:
        for name, value in each.inventory.items():
            fields.setdefault((name, each.tool), {})[each.node or ""] = value
    found: dict[tuple[str | None, str], Finding] = {}
    for (name, _), values in fields.items():
        ranked = Counter(values.values()).most_common()
        if len(ranked) < 2:
            continue
        usual, times = ranked[0]
        if len(values) > PEERS and times * 2 > len(values):
            for node, value in values.items():
                if value != usual:
                    who = f"{times} of {len(values)} nodes"
                    found.setdefault((node, name), _differs(node, name, value, usual, who))
        else:
            who = "; ".join(
                f"{value}: {listed((n for n, v in values.items() if v == value), 24)}" for value, _ in ranked
            )
            text = f"{name} differs, and no value has a majority: {who[:300]}"
            found.setdefault((None, name), Finding("CMP001", "WARN", Target(), text))
    return list(found.values())


def contradictions(judged: Sequence[Judged]) -> list[Finding]:
    """Counts that outputs of one named node disagree on: something disappeared in between, or one output is damaged."""
    fields: dict[tuple[str, str], dict[str | int | float, Judged]] = {}
    for each in judged:
        for name in (n for n in _COUNTS if n in each.inventory and each.node is not None):
            fields.setdefault((each.node or "", name), {}).setdefault(each.inventory[name], each)
    found = []
    for (node, name), values in fields.items():
        if len(values) > 1:
            text = f"{name}: " + ", ".join(f"{value} by {j.tool}" for value, j in values.items())
            places = tuple(j.file for j in values.values())
            found.append(Finding("CMP001", "WARN", Target(node=node), text, evidence=places))
    return found


def _differs(node: str, name: str, value: str | int | float, usual: str | int | float, who: str) -> Finding:
    less = name in _COUNTS and not isinstance(value, str) and not isinstance(usual, str) and value < usual
    verdict: Verdict = "FAIL" if less else "WARN"
    text = f"{name} {value}, its peers have {usual}"
    measured = value if isinstance(value, str) else float(value)
    expected = Expected(usual if isinstance(usual, str) else float(usual), "", f"peers: {who}")
    return Finding("CMP001", verdict, Target(node=node), text, measured=measured, expected=expected)


def _absent(named: Sequence[Judged]) -> list[Finding]:
    """Outputs that most nodes provided and some did not: what is missing was not judged."""
    nodes = list(dict.fromkeys(j.node for j in named))
    holders: dict[str, set[str | None]] = {}
    for each in named:
        if each.tool:
            holders.setdefault(each.tool, set()).add(each.node)
    found = []
    for tool, have in holders.items():
        if len(have) < 2 or len(have) * 2 <= len(nodes):
            continue
        for node in (n for n in nodes if n not in have):
            why = f"no readable output of {tool}, which {len(have)} of {len(nodes)} nodes have provided"
            action = f"collect the output of {tool} on this node too, and find out why it is missing"
            found.append(Finding("CMP001", "UNJUDGED", Target(node=node), why, action=action))
    return found


def _measurements(named: Sequence[Judged]) -> tuple[list[Finding], dict[int, Finding]]:
    """Findings for slow nodes, and, by id(), every finding that has peers, with their median."""
    alike: dict[tuple[object, ...], list[tuple[Finding, float]]] = {}
    for each in named:
        for finding in each.findings:
            value = finding.measured
            if isinstance(value, str | bool) or value is None or finding.target.node is None:
                continue
            if finding.unit in HIGHER_IS_BETTER + LOWER_IS_BETTER and value > 0:
                alike.setdefault(meaning(finding), []).append((finding, float(value)))
    found: list[Finding] = []
    medians: dict[int, Finding] = {}
    for group in alike.values():
        ordered = sorted(value for _, value in group)
        peers = len(group) - 1
        for finding, value in group:
            if peers < PEERS:
                continue
            usual = median_of_others(ordered, value)
            median = usual if finding.peers_median is None else finding.peers_median
            medians[id(finding)] = replace(finding, peers_median=median)
            ratio = value / usual if finding.unit in HIGHER_IS_BETTER else usual / value
            verdict = judge_share(ratio)
            if verdict == "PASS" or finding.verdict in ("FAIL", "WARN"):
                continue
            text = f"{value:.4g} {finding.unit}, the median of {peers} peers is {usual:.4g} ({finding.code})"
            means = finding.expected or Expected(None, finding.unit)
            expected = replace(means, value=usual, source="median of the peers")
            slow = ("CMP002", verdict, finding.target, text, value, finding.unit, expected, usual)
            found.append(Finding(*slow, evidence=finding.evidence))
    return found, medians


def median_of_others(ordered: Sequence[float], value: float) -> float:
    """The median of a sorted list without one `value`, by bisection: a thousand nodes need a thousand of them."""
    own, n = bisect_left(ordered, value), len(ordered) - 1
    low, high = ((n - 1) // 2, n // 2)
    return (ordered[low + (low >= own)] + ordered[high + (high >= own)]) / 2


def meaning(finding: Finding) -> tuple[object, ...]:
    """What a measurement means: only measurements with the same meaning can be compared."""
    e = finding.expected
    how = ("", "", None) if e is None else (e.direction, e.algorithm, e.size_bytes)
    return (finding.code, finding.unit, *how)


def against_plan(judged: Sequence[Judged], plan: Plan) -> list[Finding]:
    """Whether the outputs cover as many nodes as the job needs. Each node's GPUs are judged with its own outputs."""
    nodes = {j.node for j in judged if j.node is not None}
    if not nodes or len(nodes) >= plan.nodes:
        return []
    text = f"{len(nodes)} provided, the job requires {plan.nodes} nodes"
    expected = Expected(plan.nodes, "nodes", plan.source)
    why = "no output from the other nodes"
    return [Finding("CMP003", "UNJUDGED", Target(), text, len(nodes), "nodes", expected, why_unjudged=why)]
