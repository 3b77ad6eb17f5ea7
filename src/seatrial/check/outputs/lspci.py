"""lspci: accelerators and adapters that do not answer, and with -vv PCIe links below the card's capability.

Format: pciutils, lspci.c and ls-caps.c (cap_express_link).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed
from seatrial.hardware.xid import address

_DEVICE = re.compile(
    r"(?P<pci>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<kind>[A-Z0-9][\w /-]*?)(?: \[[0-9a-f]{4}\])?: (?P<name>\S.*?)"
    r"(?: \(rev (?P<rev>[0-9a-f]{2})\))?(?: \(prog-if [0-9a-f]{2}(?: \[[^\]]*\])?\))?\s*"
)
_LINK = re.compile(
    r"\s+Lnk(?P<what>Cap|Sta):\s+(?:Port #\d+, )?Speed (?P<speed>[\d.]+GT/s|unknown)[^,]*, Width x(?P<width>\d+).*"
)
# Sticky error bits set by the device itself. Other bits are set on healthy devices too, by unanswered requests.
_STATUS = re.compile(r"\s+(?:DevSta|UESta):.*")
_FATAL = re.compile(r"\b(FatalErr|DLP|SDES|TLP|FCP|CmpltTO|RxOF|MalfTLP|ECRC)\+")
_DEAD = re.compile(r"\s*!!! Unknown header type 7f\s*")
# Detail lines below a device: with -x its registers; also lspci's complaint about a missing library. Unlike the
# indented lines of nvidia-smi, none has a space before its colon.
_DETAIL = re.compile(
    r"(?!.* : )(?:\t+ ?| {4,})(?:10Bit|[A-Z!<\[])[^|]*|[0-9a-f]{2,3}:(?: [0-9a-f]{2}){1,16}\s*|lspci: Unable to load libkmod .*"
)
_DENIED = re.compile(r"\s+Capabilities: <access denied>\s*")
_KINDS = (
    ("GPU", re.compile(r"(?i:(?:3D|VGA compatible|Display) controller|Processing accelerators)\b.*\b(?i:NVIDIA|Instinct|Aldebaran|Aqua Vanjaram|MI\d{3}|Habana|Gaudi)")),
    ("adapter", re.compile(r"Infiniband controller|.*(?:ConnectX|BlueField|BCM57[5-9]|Pensando|Pollara|Elastic Fabric)", re.IGNORECASE)),
    ("NVSwitch", re.compile(r".*NVSwitch|Bridge: NVIDIA", re.IGNORECASE)),
)  # fmt: skip
# Boards whose slots are as wide as the card.
_HYPER = re.compile(r"SXM|HGX|NVLink|OAM|Instinct", re.IGNORECASE)


@dataclass
class Device:
    """One relevant device. `links`: speed in GT/s, lanes and line of LnkCap and LnkSta."""

    pci: str
    kind: str
    name: str
    line: int
    gone: bool
    denied: bool = False
    errors: dict[str, int] = field(default_factory=dict)  # name -> line
    links: dict[str, tuple[float | None, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bus:
    """Accelerators and adapters among `count` devices. `whole`: the output covers the whole bus."""

    file: str
    devices: tuple[Device, ...]
    count: int
    whole: bool


def parse(lines: Lines, file: str) -> Bus:
    """Parse the bus. Raises ParseError if there is no device."""
    devices: list[Device] = []
    now: Device | None = None
    count, whole = 0, False
    for number, line in lines:
        if found := _DEVICE.fullmatch(line):
            count += 1
            whole = whole or found["kind"] == "Host bridge"
            text = f"{found['kind']}: {found['name']}"
            kind = next((kind for kind, pattern in _KINDS if pattern.match(text)), "")
            gone = found["rev"] == "ff"
            now = Device(address(found["pci"]) or found["pci"], kind, found["name"], number, gone)
            if kind or gone:
                devices.append(now)
        elif now is None or not _DETAIL.fullmatch(line):
            continue
        elif link := _LINK.fullmatch(line):
            if link["what"] in now.links:
                continue  # belongs to another device whose header is missing
            speed = None if link["speed"] == "unknown" else float(link["speed"].removesuffix("GT/s"))
            now.links[link["what"]] = (speed, int(link["width"]), number)
        elif _STATUS.fullmatch(line):
            now.errors |= dict.fromkeys(_FATAL.findall(line), number)
        elif _DENIED.fullmatch(line):
            now.denied = True
        elif _DEAD.fullmatch(line):
            now.gone = True
            devices += [now] if now not in devices else []
        lines.claim(number)
    if not count:
        raise ParseError("no PCI device in the output", file=file)
    return Bus(file, tuple(devices), count, whole)


def judge(bus: Bus, context: Context) -> list[Finding]:
    """FAIL for devices that do not answer (rev ff); then links; UNJUDGED if -vv had no permission to read them."""
    add = FindingCollector(bus.file, context, "PCI001")
    gpus = [d for d in bus.devices if d.kind == "GPU"]
    if bus.whole and not gpus and context.gpus:
        add("FAIL", f"no GPU on the bus, {context.gpus} expected", code="GPU001", measured=0)
    elif bus.whole:
        add.found += count_findings(range(len(gpus)), None, context, (bus.file,))
    shown = any(d.links for d in bus.devices)  # with -vv
    for device in bus.devices:
        target = Target(pci=device.pci)
        if device.gone:
            text = f"{device.name[:80]} no longer responds on the bus (rev ff)"
            add("FAIL", text, device.line, target=target, measured="ff")
            continue
        if device.errors:
            text = f"{device.name[:60]}: PCIe errors since its last reset: {listed(device.errors)}"
            add("WARN", text, *device.errors.values(), code="SYS003", target=target)
        if device.denied:
            add("UNJUDGED", "its link is only visible to root", device.line, code="PCI002", target=target)
        elif device.links or (device.kind and shown):
            _link(add, device, target)
    if not bus.devices:
        add("UNJUDGED", f"no accelerator and no fabric adapter among {bus.count} devices")
    counts = [(sum(d.kind == kind for d in bus.devices), kind) for kind in ("GPU", "adapter", "NVSwitch")]
    kinds = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for n, kind in counts if n)
    return add.with_pass(f"{kinds} on the bus, all respond")


def _link(add: FindingCollector, device: Device, target: Target) -> None:
    if not {"Cap", "Sta"} <= device.links.keys():
        add("UNJUDGED", "LnkCap or LnkSta is missing: truncated", device.line, code="PCI002", target=target)
        return
    (could, widest, _), (speed, width, line) = device.links["Cap"], device.links["Sta"]
    about = device.name[:60]
    if width < widest:
        verdict: Verdict = "FAIL" if width == 0 or _HYPER.search(device.name) else "WARN"
        least, text = Expected(widest, "lanes", "LnkCap"), f"{about}: x{width} of x{widest}"
        add(verdict, text, line, code="PCI002", target=target, measured=width, expected=least)
    # An idle GPU lowers its link speed on purpose, never the width.
    if device.kind != "GPU" and could is not None and (speed is None or speed < could):
        least, text = Expected(could, "GT/s", "LnkCap"), f"{about}: {speed or 0:g} GT/s of {could:g}"
        add("WARN", text, line, code="PCI002", target=target, measured=speed, expected=least)


def inventory(bus: Bus) -> dict[str, str | int | float]:
    """The number of GPUs that answer; nothing if the output does not cover the whole bus."""
    gpus = sum(d.kind == "GPU" and not d.gone for d in bus.devices)
    return {"GPUs": gpus} if bus.whole and gpus else {}


_MATCHES = having(
    r"^(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9][\w /-]+(?: \[[0-9a-f]{4}\])?: \S"
)
TOOLS: tuple[Tool[Bus], ...] = (Tool("lspci", _MATCHES, parse, judge, inventory),)
