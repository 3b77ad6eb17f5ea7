"""Read and judge the output of ibnetdiscover: leaves with fewer uplinks, links narrower than others."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from seatrial.base.errors import InputError
from seatrial.check.judging.findings import Finding
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.outputs.topology import AGGREGATION, Topology, judge_topology, parse_ibnetdiscover

_NODE = re.compile(r'^(?:Switch|Ca|Rt)\s+(?P<ports>\d+)\s+"(?P<id>[^"]+)"')
_LINK = re.compile(r'^\[(?P<port>\d+)\](?:\([^)]*\))?(?:\[ext \d+\])?\s+"(?P<id>[^"]+)"\[(?P<peer>\d+)\]')
_KNOWN = re.compile(
    r"^(?:#|# Topology file: generated on .*|# Initiated from node [0-9a-f]+ port [0-9a-f]+|# (?:Non-)?Chassis.*"
    r"|(?:vendid|devid|sysimgguid|switchguid|caguid|rtguid|chassisguid)=0x[0-9a-f]+(?:\([0-9a-f]+\))?(?:\s+#.*)?|Chassis \d+.*)$",
    re.I,
)


@dataclass(frozen=True)
class FabricFacts:
    """The topology. `damage`: what is damaged, and in which line."""

    file: str
    topology: Topology
    damage: tuple[tuple[str, int | None], ...]


def parse(lines: Lines, file: str) -> FabricFacts:
    """Parse the topology. Raises ParseError if no switch has a link, or a switch, node or link cannot be read."""
    try:
        topology = parse_ibnetdiscover(lines.text, file)
    except InputError as error:
        first = error.diagnostics[0]
        line = None if first.line is None else lines.whole[min(first.line, len(lines.whole)) - 1][0]
        raise ParseError(first.message, file=file, line=line, source_line=first.source_line) from None
    return FabricFacts(file, topology, tuple(_damage(lines)))


def _damage(lines: Lines) -> list[tuple[str, int | None]]:
    """Find ports listed twice, links listed at only one end, and more links than ports. Claims the tool's lines.

    The tool prints each link at both ends, so an end without the other means that the output was cut off.
    """
    damage: list[tuple[str, int | None]] = []
    ends: dict[tuple[str, str, str, str], int] = {}
    ports: dict[str, int] = {}
    inside = ""
    for number, line in lines:
        line = line.rstrip()
        if node := _NODE.match(line):
            inside = node["id"]
            ports[inside] = int(node["ports"])
        elif link := _LINK.match(line):
            end = (inside, link["port"], link["id"], link["peer"])
            if end in ends:
                damage.append((f"port {link['port']} of {inside} twice", number))
            # Not all versions print the far end of a switch's own port for SHARP.
            if not AGGREGATION.search(line):
                ends[end] = number
        elif _KNOWN.match(line.strip()) is None:
            continue
        lines.claim(number)
    for (near, port, far, peer), number in ends.items():
        if (far, peer, near, port) not in ends:
            damage.append((f"port {port} of {near} leads to {far}, which does not list it", number))
            break  # one is enough to show that the output is truncated
    for name, used in Counter(near for near, *_ in ends).items():
        if used > ports.get(name, used):
            damage.append((f"{name} has {ports[name]} ports but {used} links", None))
    return damage


def judge(facts: FabricFacts, context: Context) -> list[Finding]:
    """Verdicts on leaves and links, and UNJUDGED for damage. They concern the fabric, so they name no node."""
    return damaged(facts.damage, facts.file, "ibnetdiscover") + judge_topology(facts.topology)


_MATCHES = having(r'^(?:Switch|Ca)\s+\d+\s+"[SH]-[0-9a-f]+"')
_BEGINS = re.compile(r'# (?P<id>Topology file: generated on)|vendid=0x|(?:Switch|Ca|Rt)\s+\d+\s+"')
TOOLS: tuple[Tool[FabricFacts], ...] = (Tool("ibnetdiscover", _MATCHES, parse, judge, first_line=_BEGINS),)
