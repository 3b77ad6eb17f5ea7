"""Lists of InfiniBand links, one per line: `iblinkinfo` (with or without -l) and `ibnetdiscover -p`.

Formats: rdma-core, infiniband-diags/iblinkinfo.c and ibnetdiscover.c (dump_ports_report). Judged like `ibnetdiscover`.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.outputs.topology import Link, Topology, judge_topology

_NODE = re.compile(r"(?P<kind>Switch|CA|Router): (?:0x[0-9a-f]+ )?(?P<name>.*?):\s*")
_INFO = re.compile(
    r"\s*(?:0x[0-9a-f]+ )?(?:\"\s*(?P<name>[^\"]*)\" )?\s*(?P<lid>\d+) +(?P<port>\d+)\[ *\d*\] ==\((?P<state>[^)]*(?:\(FDR10\)[^)]*)?)\)==> +"
    r"(?:(?:0x[0-9a-f]+ +)?(?P<far_lid>\d+) +(?P<far_port>\d+)\[ *\d*\] \"(?P<far>[^\"]*)\" \((?P<could>[^)]*)\)"
    r"|\[ *\] \"\" \( \)|\"Port not available\")\s*"
)
_STATE = re.compile(
    r"\s*(?:(?P<width>\d+)X +(?P<speed>\d+(?:\.\d+)?) Gbps(?: \((?P<fdr10>FDR10)\))? +)?(?P<state>\w+)/ *(?P<physical>\w+)\)?(?: \(HOQ:.*)?\s*"
)
_PORT = re.compile(
    r"(?P<kind>CA|SW|RT) +(?P<lid>\d+) +(?P<port>\d+) (?P<guid>0x[0-9a-f]{16}) (?P<width>\d+|\?)(?:x|\?) (?P<speed>\w+|\?{3})"
    r"(?: - (?P<far_kind>CA|SW|RT) +(?P<far_lid>\d+) +(?P<far_port>\d+) (?P<far_guid>0x[0-9a-f]{16}) \( '(?P<name>.*)' - '(?P<far>.*)' \)| +'.*')\s*"
)
# Signalling rate of a lane in Gb/s: InfiniBand Architecture Specification; libibmad/dump.c.
_SPEEDS = {
    "2.5": "SDR", "5.0": "DDR", "10.0": "QDR", "14.0625": "FDR", "25.78125": "EDR", "53.125": "HDR", "106.25": "NDR", "212.5": "XDR",
}  # fmt: skip


@dataclass(frozen=True)
class End:
    """One end of a link. `near` and `far` are (LID or GUID of the node, port); `could` is what both ends support."""

    switch: bool
    name: str
    near: tuple[str, int]
    far: tuple[str, int]
    far_name: str
    rate: str | None
    state: str
    could: str
    line: int


@dataclass(frozen=True)
class LinkFacts:
    """All link ends. `damage`: what is damaged, and in which line."""

    tool: str
    file: str
    ends: tuple[End, ...]
    damage: tuple[tuple[str, int | None], ...]


def parse_info(lines: Lines, file: str) -> LinkFacts:
    """Parse iblinkinfo. Raises ParseError if there is no link."""
    ends: list[End] = []
    ports: Counter[str] = Counter()  # -l omits the node type, but only switches have more than two ports
    kind, name = "", ""
    for number, line in lines:
        if node := _NODE.fullmatch(line):
            kind, name = node["kind"], node["name"]
        elif (found := _INFO.fullmatch(line)) and (state := _STATE.fullmatch(found["state"])):
            ports[found["lid"]] += 1
            speed = state["fdr10"] or _SPEEDS.get(state["speed"] or "")
            if found["far_lid"] is not None:
                if state["width"] is not None and speed is None:
                    continue  # unknown speed
                near, far = (found["lid"], int(found["port"])), (found["far_lid"], int(found["far_port"]))
                rate = None if speed is None else f"{state['width']}x{speed}"
                own, other = (found["name"] or name).strip(), found["far"].strip()
                text = f"{state['state']}/{state['physical']}"
                ends.append(
                    End(kind == "Switch", own, near, far, other, rate, text, found["could"].strip(), number)
                )
        else:
            continue
        lines.claim(number)
    ends = [replace(e, switch=e.switch or (not kind and ports[e.near[0]] > 2)) for e in ends]
    return _facts("iblinkinfo", file, ends)


def parse_ports(lines: Lines, file: str) -> LinkFacts:
    """Parse ibnetdiscover -p. Raises ParseError if there is no link."""
    ends: list[End] = []
    for number, line in lines:
        if (found := _PORT.fullmatch(line)) is None:
            continue
        lines.claim(number)
        if found["far_guid"] is not None:
            known = found["width"] != "?" and found["speed"] != "???"
            rate = f"{found['width']}x{found['speed']}" if known else None
            near, far = (found["guid"], int(found["port"])), (found["far_guid"], int(found["far_port"]))
            ends.append(
                End(found["kind"] == "SW", found["name"], near, far, found["far"], rate, "", "", number)
            )
    return _facts("ibnetdiscover -p", file, ends)


def _facts(tool: str, file: str, ends: list[End]) -> LinkFacts:
    if not ends:
        raise ParseError("no link between two ports in it", file=file)
    known = {(e.near, e.far) for e in ends}
    listed, both = {e.near[0] for e in ends}, any(not e.switch for e in ends)
    # Each link is printed from both ends if both nodes are listed: old versions of iblinkinfo list only switches.
    unmatched = [e for e in ends if (e.far, e.near) not in known and (both or e.far[0] in listed)]
    damage: list[tuple[str, int | None]] = [
        (f"port {e.near[1]} of {e.name} leads to {e.far_name}, which does not list it", e.line)
        for e in unmatched[:1]
    ]
    if len(known) < len(ends):
        damage.append(("a link is listed twice", None))
    return LinkFacts(tool, file, tuple(ends), tuple(damage))


def judge(facts: LinkFacts, context: Context) -> list[Finding]:
    """Links that are not active or slower than both ends support; then leaves and links compared with each other."""
    add = FindingCollector(facts.file, context, "TOP002")
    seen: set[frozenset[tuple[str, int]]] = set()  # links reported already, from either end
    for end in facts.ends:
        target = Target(peer=end.name, port=str(end.near[1]))
        link = f"{end.name} port {end.near[1]} to {end.far_name}"
        slow, ill = bool(end.could), end.state not in ("", "Active/LinkUp")
        if (pair := frozenset((end.near, end.far))) in seen or not (slow or ill):
            continue
        seen.add(pair)
        if ill:
            add("FAIL", f"{link}: {end.state}", end.line, target=target, measured=end.state)
        else:
            could = Expected(
                end.could.removeprefix("Could be "), source="capability of both ends, from iblinkinfo"
            )
            text = f"{link}: {end.rate}, {end.could[:1].lower()}{end.could[1:]}"
            add("FAIL", text, end.line, target=target, measured=end.rate, expected=could)
    switches = {e.near[0] for e in facts.ends if e.switch}
    links = [
        Link(e.name, e.near[1], e.far[0] in switches, e.far_name, e.rate)
        for e in facts.ends
        if e.switch and frozenset((e.near, e.far)) not in seen
    ]
    if not links and not add.found:
        add("UNJUDGED", "no switch lists its links", code="TOP001")
    found = [*damaged(facts.damage, facts.file, facts.tool), *add.found]
    judged = judge_topology(Topology({}, tuple(links), facts.file)) if links else []
    return found + [f for f in judged if f.verdict != "PASS" or not found]


_INFOS = having(r"^.{0,200}\d\[ *\d*\] ==\(.{0,60}\)==> ")
_PORTS = having(r"^(?:CA|SW) +\d+ +\d+ 0x[0-9a-f]{16} \d+x \w+ ")
TOOLS: tuple[Tool[LinkFacts], ...] = (
    Tool("iblinkinfo", _INFOS, parse_info, judge),
    Tool("ibnetdiscover -p", _PORTS, parse_ports, judge),
)
