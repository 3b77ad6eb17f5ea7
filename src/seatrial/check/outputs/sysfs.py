"""The tree of /sys/class/infiniband: a copy of its folder, or `grep -r . /sys/class/infiniband` as text."""

from __future__ import annotations

import re
from pathlib import Path

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.ports import PortFacts, PortsFacts, inventory, judge_ports, known_rate
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.hardware import counters

_LINE = re.compile(
    r"^(?P<path>\S*?)(?P<device>[\w.-]+)/(?P<file>ports/\d+/[\w/.-]+|hca_type|fw_ver|board_id|sys_image_guid|node_guid|node_type|node_desc):(?P<value>.*)$"
)
_GREP = re.compile(r"grep: \S+: (?:Invalid argument|Operation not supported|Is a directory|No such device)$")
_NEEDED = ("state", "phys_state", "rate", "link_layer")
STATE = re.compile(r"\d+: (?P<state>[A-Z_]+)")
PHYSICAL = re.compile(r"\d+: (?P<state>[A-Za-z]+)")
RATE = re.compile(
    r"(?P<rate>\d{1,5}(?:\.\d)?) Gb/sec \(\d+X [A-Z0-9]+\)|(?P<plain>\d{1,5}(?:\.\d)?) Gb/sec(?: \(\w+\))?"
)
STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
FILES = (
    "hca_type",
    "fw_ver",
    "board_id",
    "sys_image_guid",
    "ports/*/*",
    "ports/*/counters/*",
    "ports/*/hw_counters/*",
)
_LARGEST_BYTES = 4096  # of one file of sysfs: a page


def is_tree(folder: Path) -> bool:
    """Whether a folder is such a tree: devices with ports, which have a state or a rate."""
    return any(
        p.parent.name.isdigit() and p.is_file()
        for name in ("state", "rate", "phys_state")
        for p in folder.glob(f"*/ports/*/{name}")
    )


def read_tree(folder: Path, file: str) -> PortsFacts:
    """Read the ports of a tree; unreadable or missing files are damage. Raises ParseError if there is no port."""
    files: dict[str, dict[str, str]] = {}
    damage: list[tuple[str, int | None]] = []
    for device in sorted(p for p in folder.iterdir() if p.is_dir()):
        mine: dict[str, str] = {}
        # By name, not recursively: on a live machine symlinks lead from here through all of /sys.
        for path in sorted(p for pattern in FILES for p in device.glob(pattern) if p.is_file()):
            name = str(path.relative_to(device))
            try:
                with path.open("rb") as f:
                    mine[name] = f.read(_LARGEST_BYTES).decode("ascii", "replace").strip()
            except OSError as error:
                damage.append((f"{device.name}/{name}: {error.strerror}", None))
        files[device.name] = mine
    return _ports(files, damage, file)


def parse(lines: Lines, file: str) -> PortsFacts:
    """Like read_tree(), from the text that grep prints for the tree."""
    files: dict[str, dict[str, str]] = {}
    damage: list[tuple[str, int | None]] = []
    for number, line in lines:
        if (found := _LINE.match(line)) and found["file"] not in files.setdefault(found["device"], {}):
            files[found["device"]][found["file"]] = found["value"].strip()
        elif not _GREP.match(line):
            continue
        lines.claim(number)
    return _ports(files, damage, file)


def _ports(files: dict[str, dict[str, str]], damage: list[tuple[str, int | None]], file: str) -> PortsFacts:
    ports = []
    for device, mine in files.items():
        numbers = sorted({int(name.split("/")[1]) for name in mine if re.match(r"ports/\d+/", name)})
        if not numbers:
            damage.append((f"{device}: no port", None))
        for number in numbers:
            values = {name: mine.get(f"ports/{number}/{name}") for name in _NEEDED}
            where = f"{device}/{number}"
            damage += [(f"{where}: no `{name}`", None) for name, value in values.items() if not value]
            state = STATE.fullmatch(values["state"] or "")
            physical = PHYSICAL.fullmatch(values["phys_state"] or "")
            rate = RATE.fullmatch(values["rate"] or "")
            gbit_s = float(rate["rate"] or rate["plain"]) if rate else None
            if values["state"] and (state is None or state["state"] not in STATES):
                damage.append((f"{where}: unknown state {values['state'][:40]!r}", None))
            if values["phys_state"] and physical is None:
                damage.append((f"{where}: unknown physical state {values['phys_state'][:40]!r}", None))
            if values["rate"] and (gbit_s is None or not known_rate(gbit_s)):
                damage.append((f"{where}: no port has the rate {values['rate'][:40]!r}", None))
            if values["link_layer"] not in (None, "", "InfiniBand", "Ethernet", "Unspecified"):
                damage.append((f"{where}: unknown link layer", None))
            counted: dict[str, int] = {}
            for name, value in mine.items():
                if re.fullmatch(rf"ports/{number}/(?:hw_)?counters/\w+", name):
                    if value.isdecimal() and value.isascii():
                        counted[name.rpartition("/")[2]] = int(value)
                    elif value:
                        damage.append((f"{where}: {name.rpartition('/')[2]} is not a number", None))
            adapter, layer = mine.get("hca_type") or None, values["link_layer"] or None
            word = state["state"] if state else None
            port = counters.Port(device, number, adapter, word, layer, gbit_s, counted)
            stated = physical["state"] if physical else None
            ports.append(PortFacts(port, stated, mine.get("sys_image_guid"), mine.get("fw_ver"), None))
    if not ports:
        raise ParseError("no port in the output", file=file)
    return PortsFacts("sysfs", file, tuple(ports), tuple(damage))


def judge(facts: PortsFacts, context: Context) -> list[Finding]:
    """The ports' verdicts. One reading of the error counters decides nothing; only saturated ones are reported."""
    found = damaged(facts.damage, facts.file, facts.tool) + judge_ports(facts, context)
    for each in counters.first_findings({p.name: p.port for p in facts.ports}):
        if each.signal != "counter_saturated":
            continue  # counters that RoCE ports lack matter only for monitoring under load
        why = "one reading of lifetime counters proves nothing, and these are saturated; read them before and after a load"
        target, place = Target(node=context.node), (facts.file,)
        found.append(Finding("NET011", "UNJUDGED", target, each.message, why_unjudged=why, evidence=place))
    return found


_MATCHES = having(r"^\S*/ports/\d+/(?:state|phys_state|rate|link_layer):\S")
_BEGINS = re.compile(
    r"\S*?[\w.-]+/(?:ports/\d+/[\w/.-]+|hca_type|fw_ver|board_id|sys_image_guid|node_guid|node_type|node_desc):"
)
TOOLS = (Tool("sysfs", _MATCHES, parse, judge, inventory, first_line=_BEGINS),)
