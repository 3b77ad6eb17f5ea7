"""`scontrol show node` (Slurm), also with --oneliner: whether a node accepts work and has its configured GPUs.

Format: SchedMD/slurm, src/api/node_info.c and slurm_protocol_defs.c (node_state_flags).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed

_PAIR = re.compile(r"(?P<key>[A-Z][A-Za-z_]{1,30})=(?P<value>.*?)(?=\s+[A-Z][A-Za-z_]{1,30}=|\s*$)")
_LINE = re.compile(r"\s*[A-Z][A-Za-z_]{1,30}=.*")
_REASON = re.compile(r"\s{5,}\S.*")  # continuation line of a reason
_NEEDED = ("State", "CfgTRES")
# States and flags that keep work away. Planned ones, and those of running work, are fine.
_OUT = re.compile(r"DOWN|ERROR|FAIL(?:ING)?|NOT_RESPONDING|INVALID_REG|INVAL")
_ASIDE = re.compile(
    r"DRAIN(?:ED|ING)?|MAINT(?:ENANCE)?|REBOOT_(?:REQUESTED|ISSUED)|POWER(?:ED|ING)?_DOWN|BLOCKED|UNKNOWN|FUTURE"
)
_GOOD = re.compile(
    r"IDLE|ALLOCATED|MIXED|COMPLETING|CLOUD|DYNAMIC_NORM|RESERVED|PLANNED|RESUME|POWER(?:ING)?_UP|EXTERNAL"
)


@dataclass
class Node:
    """One node: its fields, and the line of its name."""

    name: str
    line: int
    fields: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeFacts:
    """All nodes of one output."""

    file: str
    nodes: tuple[Node, ...]


def parse(lines: Lines, file: str) -> NodeFacts:
    """Parse all nodes. Raises ParseError if there is no node."""
    nodes: list[Node] = []
    for number, line in lines:
        if _LINE.fullmatch(line):
            pairs = {p["key"]: p["value"] for p in _PAIR.finditer(line.strip())}
            if "NodeName" in pairs:
                nodes.append(Node(pairs["NodeName"], number))
            elif not nodes or any(k in nodes[-1].fields for k in pairs):
                continue
            nodes[-1].fields |= pairs
        elif not nodes or "Reason" not in nodes[-1].fields or not _REASON.fullmatch(line):
            continue
        lines.claim(number)
    if not nodes:
        raise ParseError("no Slurm node in the output", file=file)
    return NodeFacts(file, tuple(nodes))


def judge(facts: NodeFacts, context: Context) -> list[Finding]:
    """FAIL for a node that is down or does not respond, WARN for one that is drained or otherwise taken out."""
    add = FindingCollector(facts.file, context, "SLM001")
    for node in facts.nodes:
        at, fields = Target(node=node.name), node.fields
        # "MIXED+DRAIN"; older versions print "IDLE*", where the star means NOT_RESPONDING.
        words = fields.get("State", "").replace("*", "+NOT_RESPONDING").strip("+").split("+")
        reason = f": {fields['Reason']}" if fields.get("Reason") else ""
        if bad := [w for w in words if _OUT.fullmatch(w)] or [w for w in words if _ASIDE.fullmatch(w)]:
            text = f"Slurm: {', '.join(bad).lower().replace('_', ' ')}{reason}"[:300]
            add(
                "FAIL" if _OUT.fullmatch(bad[0]) else "WARN",
                text,
                node.line,
                target=at,
                measured=fields["State"],
            )
        if unknown := [w for w in words if not any(p.fullmatch(w) for p in (_OUT, _ASIDE, _GOOD))]:
            add("UNJUDGED", f"Slurm state {', '.join(unknown)[:60]!r} is unknown", node.line, target=at)
        if lacking := [k for k in _NEEDED if k not in fields]:
            add("UNJUDGED", f"no {lacking[0]}: truncated", node.line, target=at)
        if drained := fields.get("GresDrain", "").replace("N/A", ""):
            add("WARN", f"Slurm has drained generic resources: {drained[:120]}", node.line, target=at)
    return add.with_pass(f"available in Slurm: {listed(n.name for n in facts.nodes)}")


_FIRST = r"NodeName=(?P<id>\S+) +(?:Arch|CpuBind|CoresPerSocket)="
TOOLS: tuple[Tool[NodeFacts], ...] = (
    Tool("scontrol show node", having(f"^{_FIRST}"), parse, judge, first_line=re.compile(_FIRST)),
)
