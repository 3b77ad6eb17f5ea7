"""Output of lspci: accelerators and adapters that do not answer any more, and with -vv links below what the card can do.

Format: pciutils, lspci.c and ls-caps.c (cap_express_link).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.say import Say
from seatrial.check.tool import Context, Lines, ParseError, Tool
from seatrial.hardware.xid import address

_DEVICE = re.compile(
    r"(?P<pci>(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (?P<kind>[A-Z0-9][\w /-]*?)(?: \[[0-9a-f]{4}\])?: (?P<name>\S.*?)"
    r"(?: \(rev (?P<rev>[0-9a-f]{2})\))?(?: \(prog-if [0-9a-f]{2}(?: \[[^\]]*\])?\))?\s*"
)
_LINK = re.compile(
    r"\s+Lnk(?P<what>Cap|Sta):\s+(?:Port #\d+, )?Speed (?P<speed>[\d.]+GT/s|unknown)[^,]*, Width x(?P<width>\d+).*"
)
_DEAD = re.compile(r"\s*!!! Unknown header type 7f\s*")
_DENIED = re.compile(r"\s+Capabilities: <access denied>\s*")
_GPU = re.compile(r"3D controller|Processing accelerators|VGA compatible controller|Display controller")
_ACCELERATOR = re.compile(r"NVIDIA|Instinct|Aldebaran|Aqua Vanjaram|MI\d{3}|Habana|Gaudi", re.IGNORECASE)
_ADAPTER = re.compile(
    r"Infiniband controller|ConnectX|BlueField|BCM57[5-9]|Pensando|Pollara|Elastic Fabric", re.IGNORECASE
)
_SWITCH = re.compile(r"NVSwitch|\[?Quantum|GH100 \[H100 NVSwitch\]|Bridge: NVIDIA", re.IGNORECASE)
_HYPER = re.compile(
    r"SXM|HGX|NVLink|OAM|Instinct", re.IGNORECASE
)  # on boards whose slots are as wide as the card


@dataclass
class Device:
    """One device that matters. `links` are the speed in GT/s and the lanes of LnkCap and LnkSta, with their lines."""

    pci: str
    kind: str
    name: str
    line: int
    gone: bool
    denied: bool = False
    links: dict[str, tuple[float | None, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bus:
    """Accelerators and adapters among `count` devices."""

    file: str
    devices: tuple[Device, ...]
    count: int


def matches(text: str) -> bool:
    """A line as "19:00.0 3D controller: NVIDIA Corporation ...": of a class that the bus has."""
    return (
        re.search(
            r"^(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9][\w /-]+(?: \[[0-9a-f]{4}\])?: \S",
            text,
            re.M,
        )
        is not None
    )


def parse(lines: Lines, file: str) -> Bus:
    """Raises ParseError where no device is in it. Of a device everything that is indented below it is known."""
    devices: list[Device] = []
    now: Device | None = None
    count = 0
    for number, line in lines:
        if found := _DEVICE.fullmatch(line):
            count += 1
            kind = "gpu" if _GPU.match(found["kind"]) and _ACCELERATOR.search(found["name"]) else ""
            kind = kind or ("nic" if _ADAPTER.search(f"{found['kind']}: {found['name']}") else "")
            kind = kind or ("switch" if _SWITCH.search(f"{found['kind']}: {found['name']}") else "")
            gone = found["rev"] == "ff"
            now = Device(address(found["pci"]) or found["pci"], kind, found["name"], number, gone)
            if kind or gone:
                devices.append(now)
        elif now is None or not line[:1].isspace():
            continue
        elif link := _LINK.fullmatch(line):
            speed = None if link["speed"] == "unknown" else float(link["speed"].removesuffix("GT/s"))
            now.links.setdefault(link["what"], (speed, int(link["width"]), number))
        elif _DENIED.fullmatch(line):
            now.denied = True
        elif _DEAD.fullmatch(line):
            now.gone = True
            devices += [now] if now not in devices else []
        lines.claim(number)
    if not count:
        raise ParseError("no device of the bus in it", file=file)
    return Bus(file, tuple(devices), count)


def judge(bus: Bus, context: Context) -> list[Finding]:
    """FAIL for what does not answer (rev ff), then links; UNJUDGED where -vv was not allowed to show them."""
    say = Say(bus.file, context)
    gpus = [d for d in bus.devices if d.kind == "gpu"]
    if gpus and context.gpus is not None:
        say.found += count_findings(range(len(gpus)), None, context, (bus.file,))
    for device in bus.devices:
        target = Target(pci=device.pci)
        if device.gone:
            text = f"{device.name[:80]} does not answer on the bus any more (rev ff)"
            say("PCI001", "FAIL", text, device.line, target=target, measured="ff")
        elif device.denied:
            say("PCI002", "UNJUDGED", "its link can only be seen by root", device.line, target=target)
        elif device.links:
            _link(say, device, target)
    if not bus.devices:
        say("PCI001", "UNJUDGED", f"no accelerator and no fabric adapter among {bus.count} devices")
    kinds = ", ".join(f"{n} {what}{'s' * (n > 1)}" for kind, what in (("gpu", "GPU"), ("nic", "adapter"), ("switch", "switch")) if (n := sum(d.kind == kind for d in bus.devices)))  # fmt: skip
    return say.all_well("PCI001", f"{kinds} on the bus, all answer")


def _link(say: Say, device: Device, target: Target) -> None:
    if not {"Cap", "Sta"} <= device.links.keys():
        say("PCI002", "UNJUDGED", "LnkCap or LnkSta is missing: cut off", device.line, target=target)
        return
    (could, widest, _), (speed, width, line) = device.links["Cap"], device.links["Sta"]
    if width < widest:
        verdict: Verdict = "FAIL" if width == 0 or _HYPER.search(device.name) else "WARN"
        expected = Expected(widest, "lanes", "LnkCap")
        say(
            "PCI002",
            verdict,
            f"{device.name[:60]}: x{width} of x{widest}",
            line,
            target=target,
            measured=width,
            unit="lanes",
            expected=expected,
        )
    # A GPU lowers its speed on purpose when it is idle, never its width.
    if device.kind != "gpu" and could is not None and (speed is None or speed < could):
        expected = Expected(could, "GT/s", "LnkCap")
        text = f"{device.name[:60]}: {speed or 0:g} GT/s of {could:g}"
        say("PCI002", "WARN", text, line, target=target, measured=speed, unit="GT/s", expected=expected)


TOOLS: tuple[Tool[Bus], ...] = (Tool("lspci", matches, parse, judge),)
