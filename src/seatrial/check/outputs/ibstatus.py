"""Output of ibstatus (infiniband-diags): a shell script that prints the sysfs values of each port."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.network import at, damaged
from seatrial.check.outputs.ports import Block, PortFacts, PortsFacts, inventory, judge_ports, known_rate
from seatrial.check.outputs.sysfs import PHYSICAL, RATE, STATE, STATES
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.hardware import counters

_TITLE = re.compile(r"^\s*Infiniband device '(?P<device>[^']*)' port (?P<port>\d{1,3}) status:\s*$")
_FIELD = re.compile(r"^\s+(?P<name>[a-z][a-z_ ]*?):\s*(?P<value>.*?)\s*$")
_FATAL = re.compile(r"^Fatal error: +(?P<what>No devices|device '[^']*': sys files not found .*)$")
_OLD_KERNEL = "IB"  # what the script prints as the link layer if the kernel has no such file
_LID = r"0x[0-9a-f]{1,8}|unknown"  # "unknown": the script could not read the file
# Field -> regular expression of its value.
_FIELDS = {
    "default gid": ".+",
    "base lid": _LID,
    "sm lid": _LID,
    "state": rf"\d+: (?:{'|'.join(STATES)})",
    "phys state": PHYSICAL.pattern,
    "rate": RATE.pattern,
    "link_layer": f"InfiniBand|Ethernet|Unspecified|{_OLD_KERNEL}",
}


@dataclass(frozen=True)
class StatusFacts(PortsFacts):
    """The ports, or the script's own error (`fatal`, in line `fatal_line`) if it found no device."""

    fatal: str = ""
    fatal_line: int | None = None


def parse(lines: Lines, file: str) -> StatusFacts:
    """Parse all ports. Raises ParseError if there is neither a port nor the script's error. Damage is in `damage`."""
    blocks: list[Block] = []
    damage: list[tuple[str, int | None]] = []
    fatal, fatal_line = "", None
    for number, line in lines:
        if title := _TITLE.match(line):
            blocks.append(Block(f"{title['device']}/{title['port']}", number))
        elif error := _FATAL.match(line):
            fatal, fatal_line = error["what"], number
        elif (pair := _FIELD.match(line)) and blocks and pair["name"] in _FIELDS:
            if pair["name"] in blocks[-1].fields:
                continue
            blocks[-1].fields[pair["name"]] = pair["value"]
        else:
            continue
        lines.claim(number)
    if not blocks and not fatal:
        raise ParseError("no port in the output", file=file)
    if fatal and blocks:
        damage.append((f"it ended with an error: {fatal}", fatal_line))
    for block in blocks:
        damage += _port_damage(block)
    ports = tuple(_port(b) for b in blocks)
    return StatusFacts("ibstatus", file, ports, tuple(damage), fatal, fatal_line)


def _port_damage(port: Block) -> list[tuple[str, int | None]]:
    damage = port.damage(port.name, _FIELDS)
    if RATE.fullmatch(rate := port.fields.get("rate", "")) and _rate(rate) is None:
        damage.append((f"{port.name}: no port has the rate {rate[:40]!r}", port.line))
    if not re.fullmatch(r"[\w.-]+/\d+", port.name):
        damage.append(("a device with an invalid name", port.line))
    return damage


def _rate(text: str) -> float | None:
    found = RATE.fullmatch(text)
    rate = float(found["rate"] or found["plain"]) if found else None
    return rate if rate is not None and known_rate(rate) else None


def _port(block: Block) -> PortFacts:
    device, _, number = block.name.rpartition("/")
    state = STATE.fullmatch(block.fields.get("state", ""))
    physical = PHYSICAL.fullmatch(block.fields.get("phys state", ""))
    layer = block.fields.get("link_layer")
    port = counters.Port(
        device,
        int(number),
        None,  # the script does not print the adapter type
        state["state"] if state else None,
        "InfiniBand" if layer == _OLD_KERNEL else layer,
        _rate(block.fields.get("rate", "")),
    )
    return PortFacts(port, physical["state"] if physical else None, None, None, block.line)


def judge(facts: StatusFacts, context: Context) -> list[Finding]:
    """The ports' verdicts; UNJUDGED for damage and for a host without a device."""
    found = damaged(facts.damage, facts.file, facts.tool) + judge_ports(facts, context)
    if facts.fatal and not facts.ports:
        why = f"ibstatus: {facts.fatal}"
        place = (at(facts.file, facts.fatal_line),)
        target = Target(node=context.node)
        found.append(Finding("NET007", "UNJUDGED", target, why, evidence=place))
    return found


_MATCHES = having(rf"^\s*Infiniband device '[^'\n]*' port \d+ status:|{_FATAL.pattern}")
_BEGINS = re.compile(r"\s*Infiniband device '(?P<device>[^']*' port \d{1,3}) status:|Fatal error: ")
TOOLS: tuple[Tool[StatusFacts], ...] = (
    Tool("ibstatus", _MATCHES, parse, judge, inventory, first_line=_BEGINS),
)
