"""Output of ibstat (infiniband-diags)."""

from __future__ import annotations

import re

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.ports import Block, PortFacts, PortsFacts, inventory, judge_ports, known_rate
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.hardware import counters

_CA = re.compile(r"^\s*CA '(?P<name>[^']*)'\s*$")
_PORT = re.compile(r"^\s*Port (?P<number>\d+):\s*$")
_FIELD = re.compile(r"^\s+(?P<name>[A-Z][\w ]*?):(?P<value>.*)$")
_HEX, _NUMBER = r"0x[0-9a-f]{1,16}", r"\d{1,6}"
# Field -> regular expression of its value.
_CA_FIELDS = {
    "CA type": r"MT\d{4,5}(?!\d).*|(?!MT\d)[\w. ()/-]*",
    "Number of ports": ".*",
    "Firmware version": ".*",
    "Hardware version": ".*",
    "Node GUID": _HEX,
    "System image GUID": _HEX,
}
_PORT_FIELDS = {
    "State": "Down|Initializing|Init|Armed|Active|ActiveDefer",
    "Physical state": "No state change|Sleep|Polling|Disabled|PortConfigurationTraining|LinkUp|LinkErrorRecovery|Phy ?Test|<unknown>",
    "Rate": ".*",
    "Base lid": _NUMBER,
    "LMC": _NUMBER,
    "SM lid": _NUMBER,
    "Capability mask": _HEX,
    "Port GUID": _HEX,
    "Link layer": "InfiniBand|Ethernet|IB|Unspecified|Unknown",
}


def matches(text: str) -> bool:
    """Whether there are a line `CA 'mlx5_0'` and a field of ibstat."""
    return bool(re.search(r"^\s*CA '[^'\n]*'\s*$", text, re.MULTILINE)) and bool(
        re.search(r"^\s*(?:CA type|Number of ports|State|Physical state|Port \d+)\s*:", text, re.MULTILINE)
    )


def parse(lines: Lines, file: str) -> PortsFacts:
    """Parse all ports. Raises ParseError if there is no CA. Other damage is recorded in `damage`."""
    damage: list[tuple[str, int | None]] = []
    cas: list[Block] = []
    block: Block | None = None
    for number, line in lines:
        if ca := _CA.match(line):
            block = Block(ca["name"], number)
            cas.append(block)
        elif (port := _PORT.match(line)) and cas:
            block = Block(port["number"], number)
            cas[-1].ports.append(block)
        elif (pair := _FIELD.match(line)) and block is not None:
            known = _PORT_FIELDS if block is not cas[-1] else _CA_FIELDS
            if pair["name"] not in known or pair["name"] in block.fields:
                continue
            block.fields[pair["name"]] = pair["value"].strip()
        else:
            continue
        lines.claim(number)
    if not cas:
        raise ParseError("no CA in the output", file=file)
    ports = []
    for each in cas:
        damage += _ca_damage(each)
        for port_block in each.ports:
            damage += _port_damage(each, port_block)
            ports.append(_port(each, port_block))
    return PortsFacts("ibstat", file, tuple(ports), tuple(damage))


def _ca_damage(ca: Block) -> list[tuple[str, int | None]]:
    damage = ca.damage(f"CA {ca.name}", _CA_FIELDS)
    if not re.fullmatch(r"[\w.:-]+", ca.name):
        damage.append(("a CA with an invalid name", ca.line))
    if (count := ca.fields.get("Number of ports", str(len(ca.ports)))) != str(len(ca.ports)):
        damage.append((f"CA {ca.name}: {count} ports announced, {len(ca.ports)} shown", ca.line))
    return damage


def _port_damage(ca: Block, port: Block) -> list[tuple[str, int | None]]:
    damage = port.damage(f"{ca.name}/{port.name}", _PORT_FIELDS)
    rate = _rate(port)
    if "Rate" in port.fields and (rate is None or not known_rate(rate)):
        text = f"{ca.name}/{port.name}: no port has the rate {port.fields['Rate'][:20]!r}"
        damage.append((text, port.line))
    return damage


def _rate(port: Block) -> float | None:
    text = port.fields.get("Rate", "").split(" ")[0]
    return float(text) if re.fullmatch(r"\d{1,5}(?:\.\d{1,3})?", text) else None


def _port(ca: Block, port: Block) -> PortFacts:
    state = port.fields.get("State")
    layer = port.fields.get("Link layer")
    return PortFacts(
        counters.Port(
            ca.name,
            int(port.name),
            ca.fields.get("CA type") or None,
            None if state is None else state.upper(),
            "InfiniBand" if layer == "IB" else layer,
            _rate(port),
        ),
        port.fields.get("Physical state"),
        ca.fields.get("System image GUID"),
        ca.fields.get("Firmware version"),
        port.line,
    )


def judge(facts: PortsFacts, context: Context) -> list[Finding]:
    """The ports' verdicts, and UNJUDGED for damage. A CA without ports is UNJUDGED, never a pass."""
    found = damaged(facts.damage, facts.file, facts.tool) + judge_ports(facts, context)
    if not found:
        why = "the output contains no port"
        found.append(Finding("NET001", "UNJUDGED", Target(node=context.node), why, evidence=(facts.file,)))
    return found


TOOLS = (
    Tool("ibstat", matches, parse, judge, inventory, first_line=re.compile(r"\s*CA '(?P<device>[^']*)'\s*$")),
)
