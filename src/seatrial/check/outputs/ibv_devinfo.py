"""Output of ibv_devinfo (libibverbs), with or without -v.

Format: rdma-core, libibverbs/examples/devinfo.c. Only -v prints a port's rate and physical state.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.outputs.finding_collector import having
from seatrial.check.outputs.network import NetworkContext, at, damaged, gbit
from seatrial.check.outputs.ports import Block, PortFacts, PortsFacts, inventory, judge_ports, known_rate
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.hardware import counters

_DEVICE = re.compile(r"^hca_id:\s*(?P<name>\S.*?)\s*$")
_PORT = re.compile(r"^\s+port:\s*(?P<number>\d{1,3})\s*$")
_FIELD = re.compile(r"^\s+(?P<name>[a-z][\w ]{0,60}?):\s*(?P<value>.*?)\s*$")
# Lines below the capabilities that -v prints: flags in capitals or words, and sentences without a value.
_FLAG = re.compile(r"^(?:\t| {4})\s*[A-Za-z][\w \t.,()/-]{0,80}(?:[:=]\s*(?:0x)?[0-9A-Fa-f]*)?\s*$")
_GID = re.compile(
    r"^\s+GID\[\s*\d+\]:\s*(?:(?:[0-9a-f]{4}:){7}[0-9a-f]{4}|[0-9a-f:.]+(?=,))(?:, (?:RoCE v[12](?:\.\d)?|IB/RoCE v1))?\s*$"
)
_SECTION = re.compile(r"^\s+Device ports:\s*$")  # NVIDIA's own builds
_CODED = re.compile(r"(?P<word>.*?)\s*\((?P<code>\d{1,5})\)")
_LIST = re.compile(r"^(?P<count>\d{1,3}) HCAs? found:\s*$")
_LISTED = re.compile(r"\s+[\w.-]+\s*")
# Not "No IB devices found": perftest prints it too, and its reader reports the same.
_ERROR = re.compile(
    r"^(?:Failed to get IB devices list: .*|IB device '[^']*' wasn't found|Failed to open device"
    r"|Failed to query device props)\s*$"
)
_GUID, _NUMBER, _CODE = r"(?:[0-9a-f]{4}:){3}[0-9a-f]{4}", r"\d{1,6}", r".*?\s*\(\d{1,5}\)"
# Field -> regular expression of its value.
_DEVICE_FIELDS = {
    "transport": r"[\w ]+ \(-?\d{1,3}\)",
    "node_guid": _GUID,
    "sys_image_guid": _GUID,
    "vendor_id": r"0x[0-9a-f]{4,8}",
    "vendor_part_id": _NUMBER,
    "hw_ver": r"0x[0-9A-F]{1,8}",
    "phys_port_cnt": r"\d{1,3}",
}
_PORT_FIELDS = {
    "state": _CODE,
    "max_mtu": _CODE,
    "active_mtu": _CODE,
    "sm_lid": _NUMBER,
    "port_lid": _NUMBER,
    "port_lmc": r"0x[0-9a-f]{2}",
    "link_layer": "InfiniBand|Ethernet|Unspecified|Unknown|IB",
}
_VERBOSE_FIELDS = {"active_width": _CODE, "active_speed": _CODE}
_PLAIN = (*_DEVICE_FIELDS, "fw_ver", "board_id")
_STATES = {"PORT_DOWN": 1, "PORT_INIT": 2, "PORT_ARMED": 3, "PORT_ACTIVE": 4}
# Code -> name in devinfo.c (which spells "TRAINNING"), name in ibstat and sysfs.
_PHYSICAL = {
    1: ("SLEEP", "Sleep"),
    2: ("POLLING", "Polling"),
    3: ("DISABLED", "Disabled"),
    4: ("PORT_CONFIGURATION TRAINNING", "PortConfigurationTraining"),
    5: ("LINK_UP", "LinkUp"),
    6: ("LINK_ERROR_RECOVERY", "LinkErrorRecovery"),
    7: ("PHY TEST", "PhyTest"),
}
_LANES = {1: "1X", 2: "4X", 4: "8X", 8: "12X", 16: "2X"}
# Gb/s per lane by the code of ibv_query_port(3): SDR, DDR, QDR, FDR10, FDR, EDR, HDR, NDR, XDR. Older builds print
# "invalid speed" for a code that they do not know.
_LANE_GBIT_S = {1: 2.5, 2: 5.0, 4: 10.0, 8: 10.0, 16: 14.0, 32: 25.0, 64: 50.0, 128: 100.0, 256: 200.0}
_NDR = 128
_MELLANOX = ("0x02c9", "0x15b3")
_XDR_ADAPTERS = ("MT4131",)


@dataclass(frozen=True)
class DevinfoFacts(PortsFacts):
    """The ports, or the tool's own error (`error`, in line `error_line`). `listed`: number of devices that -l found."""

    error: str = ""
    error_line: int | None = None
    listed: int | None = None


def parse(lines: Lines, file: str) -> DevinfoFacts:
    """Parse all ports. Raises ParseError if nothing of the tool is in it. Damage is recorded in `damage`."""
    damage: list[tuple[str, int | None]] = []
    devices: list[Block] = []
    verbose = re.search(r"^\s+(?:max_mr_size|active_width):", lines.text, re.MULTILINE) is not None
    error, error_line, listed = "", None, None
    for number, line in lines:
        if device := _DEVICE.match(line):
            devices.append(Block(device["name"], number))
        elif message := _ERROR.match(line):
            error, error_line = message[0].strip(), number
        elif found := _LIST.match(line):
            listed = int(found["count"])
        elif devices:
            if not _read_line(devices[-1], line, number, verbose):
                continue
        elif listed is None or not _LISTED.fullmatch(line):
            continue
        lines.claim(number)
    if not devices and not error and listed is None:
        raise ParseError("no device in the output", file=file)
    if error and devices:
        damage.append((f"a device is missing: {error}", error_line))
    ports = []
    for each in devices:
        damage += _device_damage(each)
        for port in each.ports:
            damage += _port_damage(each, port, verbose)
            ports.append(_port(each, port))
    return DevinfoFacts("ibv_devinfo", file, tuple(ports), tuple(damage), error, error_line, listed)


def _read_line(device: Block, line: str, number: int, verbose: bool) -> bool:
    """Add one line to its device or port; False if the tool does not print it there."""
    if port := _PORT.match(line):
        device.ports.append(Block(port["number"], number))
        return True
    if _SECTION.match(line):
        return not device.ports
    block = device.ports[-1] if device.ports else device
    known = _PORT_FIELDS if device.ports else _PLAIN
    if (pair := _FIELD.match(line)) and (verbose or pair["name"] in known):
        fresh = pair["name"] not in block.fields
        block.fields.setdefault(pair["name"], pair["value"])
        # Capabilities repeat names ("max_sge", "supported_qp"); what is judged appears once.
        return fresh or pair["name"] not in (*known, *_VERBOSE_FIELDS, "phys_state")
    if verbose and _GID.match(line):
        block.fields.setdefault("GID", line.strip())
        return True
    return verbose and not device.ports and _FLAG.match(line) is not None


def _device_damage(device: Block) -> list[tuple[str, int | None]]:
    damage = device.damage(device.name, _DEVICE_FIELDS)
    if not re.fullmatch(r"[\w.-]+", device.name):
        damage.append(("a device with an invalid name", device.line))
    count = device.fields.get("phys_port_cnt", "")
    # Also if -i selected one port of several: the others are then unknown.
    if count.isdecimal() and len(device.ports) != int(count):
        text = f"{device.name}: {int(count)} ports announced, {len(device.ports)} shown"
        damage.append((text, device.line))
    return damage


def _port_damage(device: Block, port: Block, verbose: bool) -> list[tuple[str, int | None]]:
    where, fields = f"{device.name}/{port.name}", port.fields
    forms = _PORT_FIELDS | (_VERBOSE_FIELDS if verbose else {})
    if "phys_state" in fields or (verbose and device.fields.get("transport", "").startswith("InfiniBand")):
        forms["phys_state"] = _CODE
    if verbose and fields.get("link_layer") == "InfiniBand":
        forms["GID"] = ".+"  # the last item printed for a port, and each InfiniBand port has one
    damage = port.damage(where, forms)
    state, physical = _coded(fields, "state"), _coded(fields, "phys_state")
    width, speed = _coded(fields, "active_width"), _coded(fields, "active_speed")
    lane = None if speed is None else _LANE_GBIT_S.get(speed[1])
    for name, right in (
        ("state", state is None or _STATES.get(state[0]) == state[1]),
        ("phys_state", physical is None or _PHYSICAL.get(physical[1], ("", ""))[0] == physical[0]),
        ("active_width", width is None or _LANES.get(width[1]) == width[0]),
        ("active_speed", speed is None or (lane and speed[0] in (f"{lane:.1f} Gbps", "invalid speed"))),
    ):
        if not right:
            damage.append((f"{where}: unknown `{name}` {fields[name][:40]!r}", port.line))
    return damage


def _coded(fields: dict[str, str], name: str) -> tuple[str, int] | None:
    found = _CODED.fullmatch(fields.get(name, ""))
    return (found["word"], int(found["code"])) if found else None


def _adapter(device: Block) -> str | None:
    """Adapter type as in sysfs, such as "MT4129"; for other vendors, vendor and part ID."""
    vendor, part = device.fields.get("vendor_id", ""), device.fields.get("vendor_part_id", "")
    if not vendor or not part.isdecimal() or int(part) == 0:
        return None
    return f"MT{part}" if vendor in _MELLANOX else f"{vendor}:{part}"


def _rate(adapter: str | None, port: Block) -> float | None:
    width, speed = _coded(port.fields, "active_width"), _coded(port.fields, "active_speed")
    if width is None or speed is None or width[1] not in _LANES or speed[1] not in _LANE_GBIT_S:
        return None
    # ibv_query_port(3): a library without a code for XDR reports NDR instead.
    if speed[1] == _NDR and adapter in _XDR_ADAPTERS:
        return None
    rate = int(_LANES[width[1]].rstrip("X")) * _LANE_GBIT_S[speed[1]]
    return rate if known_rate(rate) else None


def _port(device: Block, port: Block) -> PortFacts:
    state, physical = _coded(port.fields, "state"), _coded(port.fields, "phys_state")
    layer, adapter = port.fields.get("link_layer"), _adapter(device)
    return PortFacts(
        counters.Port(
            device.name,
            int(port.name),
            adapter,
            state[0].removeprefix("PORT_") if state else None,
            "InfiniBand" if layer == "IB" else layer,
            _rate(adapter, port),
        ),
        None if physical is None else _PHYSICAL.get(physical[1], ("", "unknown"))[1],
        device.fields.get("sys_image_guid"),
        device.fields.get("fw_ver"),
        port.line,
    )


def judge(facts: DevinfoFacts, context: Context) -> list[Finding]:
    """The ports' verdicts; UNJUDGED for damage, for a host without a device, and if a required rate is not printed."""
    found = damaged(facts.damage, facts.file, facts.tool) + judge_ports(facts, context)
    target = Target(node=context.node)
    place = (at(facts.file, facts.error_line),)
    if not facts.ports and (facts.error or not facts.listed):
        why = f"ibv_devinfo: {facts.error or 'no device'}"
        found.append(Finding("NET007", "UNJUDGED", target, why, evidence=place))
    elif not facts.ports:
        why = f"{facts.listed} devices are listed; run it without -l to see their state"
        found.append(Finding("NET001", "UNJUDGED", target, why, evidence=place))
    asked = context.port_gbit_s if isinstance(context, NetworkContext) else None
    if asked is not None and facts.ports and all(p.port.gbit_s is None for p in facts.ports):
        why = "ibv_devinfo prints the rate only with -v"
        expected = Expected(asked, "Gb/s", "--port-gbit-s", "one direction")
        text = f"whether the ports run at {gbit(asked)} Gb/s is not in the output"
        found.append(
            Finding("NET002", "UNJUDGED", target, text, expected=expected, why_unjudged=why, evidence=place)
        )
    return found


_MATCHES = having(rf"^hca_id:\s|{_LIST.pattern}|{_ERROR.pattern}")
_BEGINS = re.compile(r"hca_id:\s*(?P<device>\S+)|\d{1,3} HCAs? found:")
TOOLS: tuple[Tool[DevinfoFacts], ...] = (
    Tool("ibv_devinfo", _MATCHES, parse, judge, inventory, first_line=_BEGINS),
)
