"""Verdicts on a node's RDMA ports from any source: which are the training fabric, and which of those are faulty."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.network import BROKEN, SUSPECT, TARGET_SOURCE, NetworkContext, gbit
from seatrial.check.outputs.tool import Context
from seatrial.check.ranges import listed
from seatrial.hardware import counters

# Maximum rate of a port of each adapter in Gb/s. Names: pci.ids; rates: NVIDIA's user manuals of the adapters.
# MT4126 is the virtual function of any of them, so it says nothing.
_ADAPTER_GBIT_S = {
    "MT4099": 56.0,  # ConnectX-3
    "MT4103": 56.0,  # ConnectX-3 Pro
    "MT4113": 56.0,  # Connect-IB
    "MT4115": 100.0,  # ConnectX-4
    "MT4117": 50.0,  # ConnectX-4 Lx
    "MT4119": 100.0,  # ConnectX-5
    "MT4121": 100.0,  # ConnectX-5 Ex
    "MT4123": 200.0,  # ConnectX-6
    "MT4125": 200.0,  # ConnectX-6 Dx
    "MT4127": 50.0,  # ConnectX-6 Lx
    "MT4129": 400.0,  # ConnectX-7
    "MT4131": 800.0,  # ConnectX-8
    "MT41686": 200.0,  # BlueField-2
    "MT41692": 400.0,  # BlueField-3
}
# Rates that ports train at: lanes of SDR (2.5) to XDR (200) times 1, 2, 4, 8 or 12, and Ethernet's.
_RATES = frozenset(
    {2.5, 5, 8, 10, 14, 16, 20, 25, 28, 30, 32, 40, 50, 56, 60, 64, 80, 96, 100, 112, 120, 128, 160}
)
_RATES_HIGH = frozenset({168, 200, 300, 400, 600, 800, 1200, 1600})
_BRIDGE_GBIT_S = 100.0
_BRIDGES = 4  # ConnectX-7 ports of a B200 or B300 board that belong to its NVLink


@dataclass(frozen=True)
class PortFacts:
    """One port as a tool reports it. `port.state` is in capitals; missing values are None."""

    port: counters.Port
    physical: str | None  # "LinkUp", "Polling", "Disabled", ...
    image_guid: str | None  # the same for all ports of one card
    firmware: str | None
    line: int | None

    @property
    def name(self) -> str:
        return self.port.name


@dataclass
class Block:
    """The fields of a device or a port, as ibstat or ibv_devinfo prints them."""

    name: str
    line: int
    fields: dict[str, str] = field(default_factory=dict)
    ports: list[Block] = field(default_factory=list)

    def damage(self, where: str, forms: Mapping[str, str]) -> list[tuple[str, int | None]]:
        """The fields of `forms` (name -> regular expression) that are missing, or have a value of another form."""
        found: list[tuple[str, int | None]] = []
        for name, form in forms.items():
            value = self.fields.get(name)
            if value is None or not re.fullmatch(form, value):
                text = f"`{name}` is {value[:40]!r}" if value else f"no `{name}`"
                found.append((f"{where}: {text}", self.line))
        return found


@dataclass(frozen=True)
class PortsFacts:
    """All ports of one node. `damage`: what is damaged, and in which line."""

    tool: str
    file: str
    ports: tuple[PortFacts, ...]
    damage: tuple[tuple[str, int | None], ...] = ()


def known_rate(gbit_s: float) -> bool:
    """Whether any port can train at this rate; any other rate is a sign of damaged text."""
    return gbit_s in _RATES or gbit_s in _RATES_HIGH


def fabric_ports(ports: Sequence[PortFacts]) -> list[PortFacts]:
    """The ports of the training fabric: the group (same adapter and link layer) that carries the most in total.

    NVLink bridges are excluded: ports that hardware.counters.fabric() excludes and that are exactly four, or several of
    one card. A single ConnectX-7 at 100 Gb/s is not a bridge but a faulty port.
    """
    groups: dict[tuple[str | None, str | None], list[PortFacts]] = {}
    for each in _without_bridges(ports):
        groups.setdefault((each.port.adapter, each.port.link_layer), []).append(each)
    if not groups:
        return []

    def carries(key: tuple[str | None, str | None]) -> tuple[float, bool]:
        group = groups[key]
        seen = max((p.port.gbit_s or 0.0 for p in group if p.port.state == "ACTIVE"), default=0.0)
        return len(group) * max(seen, 0.0 if seen else _ADAPTER_GBIT_S.get(key[0] or "", 1.0)), key[
            1
        ] == "InfiniBand"

    return groups[max(groups, key=carries)]


def _without_bridges(ports: Sequence[PortFacts]) -> list[PortFacts]:
    if all(p.port.adapter is None for p in ports):
        return _without_likely_bridges(ports)
    kept = {p.name for p in counters.fabric(p.port for p in ports)}
    dropped = [p for p in ports if p.name not in kept]
    cards = Counter(p.image_guid for p in dropped)
    bridges = {
        p.name
        for p in dropped
        if (len(dropped) == _BRIDGES if p.image_guid is None else cards[p.image_guid] > 1)
    }
    return [p for p in ports if p.name not in bridges]


def _without_likely_bridges(ports: Sequence[PortFacts]) -> list[PortFacts]:
    """Exclude bridges if the adapters are unknown: exactly four InfiniBand ports at 100 Gb/s next to faster ones.

    Four ports that have all trained down to 100 look the same; the number of fabric ports then shows it.
    """
    fabric = [p for p in ports if p.port.link_layer == "InfiniBand"]
    slow = {p.name for p in fabric if p.port.gbit_s == _BRIDGE_GBIT_S}
    faster = [p for p in fabric if (p.port.gbit_s or 0.0) > _BRIDGE_GBIT_S]
    return [p for p in ports if p.name not in slow] if len(slow) == _BRIDGES and faster else list(ports)


def judge_ports(facts: PortsFacts, context: Context) -> list[Finding]:
    """State and rate of each fabric port, and one finding about the ports of other networks that are down."""
    fabric = fabric_ports(facts.ports)
    add = FindingCollector(facts.file, context, "NET001")
    if fabric:
        _states(fabric, add)
        _rates(fabric, add)
    _others(facts, fabric, add)
    _strangers(facts, fabric, add)
    wanted = context.fabric_ports if isinstance(context, NetworkContext) else None
    if wanted is not None and len(fabric) < wanted:
        expected = Expected(wanted, "ports", "the job, or most of the peers")
        text = f"{len(fabric)} fabric ports of {wanted}"
        add("FAIL", text, code="NET003", measured=len(fabric), expected=expected)
    if fabric and not any(f.verdict in ("FAIL", "WARN") for f in add.found):
        rates = sorted({p.port.gbit_s for p in fabric if p.port.gbit_s is not None})
        kind = " ".join(x for x in (fabric[0].port.adapter, fabric[0].port.link_layer) if x)
        speed = f"at {', '.join(map(gbit, rates))} Gb/s" if rates else "(rate not in the output)"
        text = f"{len(fabric)} fabric port{'s' * (len(fabric) > 1)} ({kind}) active {speed}"
        add("PASS", text, measured=len(fabric), unit="ports")
    return add.found


def _strangers(facts: PortsFacts, fabric: list[PortFacts], add: FindingCollector) -> None:
    """UNJUDGED for InfiniBand ports of unknown adapters that are slower than the fabric: they may not belong to it."""
    rate = max((p.port.gbit_s or 0.0 for p in fabric), default=0.0)
    for p in _without_bridges(facts.ports):
        if p in fabric or p.port.link_layer != "InfiniBand" or (own := p.port.gbit_s or 0.0) >= rate:
            continue
        if re.fullmatch(r"MT\d+", p.port.adapter or "") and p.port.adapter not in (
            *_ADAPTER_GBIT_S,
            "MT4126",
        ):
            unknown = f"whether {p.port.adapter} belongs to it is unknown"
            text = f"{gbit(own)} Gb/s, the fabric {gbit(rate)}; {unknown}"
            add("UNJUDGED", text, p.line, code="NET002", target=Target(port=p.name))


def _healthy(each: PortFacts) -> bool:
    return each.port.state == "ACTIVE" and each.physical in (None, "LinkUp")


def _states(fabric: list[PortFacts], add: FindingCollector) -> None:
    down = [p for p in fabric if not _healthy(p)]
    # A port number that no card uses, such as the second: not cabled.
    numbers = {p.port.number for p in down}
    unused = (
        len(numbers) == 1
        and len(down) < len(fabric)
        and all(p in down for p in fabric if p.port.number in numbers)
        and {p.port.device for p in fabric if p not in down} >= {p.port.device for p in down}
    )
    healthy = f"{len(fabric) - len(down)} of {len(fabric)} ports like it are"
    expected = Expected("Active, LinkUp", source=healthy)
    for each in down:
        state = (each.port.state or "unknown").capitalize()
        text = f"{state}, physical state {each.physical or 'unknown'}"
        if state.startswith("Init"):
            text += ": the link is up, but not configured by a subnet manager"
        if unused:
            text += f"; port {each.port.number} is the same on every adapter: not cabled?"
        verdict: Verdict = "WARN" if unused else "FAIL"
        add(verdict, text, each.line, target=Target(port=each.name), measured=state, expected=expected)


def _rates(fabric: list[PortFacts], add: FindingCollector) -> None:
    active = [(p, p.port.gbit_s) for p in fabric if _healthy(p) and p.port.gbit_s is not None]
    if not active:
        return
    usual = median_high([rate for _, rate in active])
    word = add.context.port_gbit_s if isinstance(add.context, NetworkContext) else None
    wanted, source = (word, "--port-gbit-s") if word is not None else (usual, "median of the ports like it")
    slow = [(p, rate) for p, rate in active if rate < SUSPECT * wanted]
    few = word is not None or len(slow) * 2 < len(active)
    expected = Expected(wanted, "Gb/s", f"{source}; {TARGET_SOURCE}", "one direction")
    for each, rate in slow:
        verdict: Verdict = "FAIL" if rate < BROKEN * wanted and few else "WARN"
        text, target = f"trained at {gbit(rate)} Gb/s, {gbit(wanted)} expected", Target(port=each.name)
        places = (verdict, text, each.line)
        add(*places, code="NET002", target=target, measured=rate, expected=expected, median=usual)


def _others(facts: PortsFacts, fabric: list[PortFacts], add: FindingCollector) -> None:
    """Down ports outside the fabric: storage, management, unused. A fault only if they would complete it."""
    names = {p.name for p in fabric}
    down = [p for p in _without_bridges(facts.ports) if p.name not in names and not _healthy(p)]
    alike = [p for p in down if fabric and p.port.adapter == fabric[0].port.adapter]
    whole = len(fabric) + len(alike)
    if alike and whole in (2, 4, 8, 16) and len(fabric) not in (2, 4, 8, 16):
        text = f"{_names(alike)} down: the same adapters as the {len(fabric)} fabric ports, on another link layer"
        for p in alike:
            add("WARN", text, p.line, target=Target(port=p.name))
    elif down:
        add("PASS", f"{_names(down)} down: not the training fabric, so not a fault", down[0].line)


def _names(ports: Sequence[PortFacts]) -> str:
    kinds = sorted({" ".join(x for x in (p.port.adapter, p.port.link_layer) if x) for p in ports})
    return f"{listed(p.name for p in ports)} ({', '.join(kinds)})"


def inventory(facts: PortsFacts) -> Mapping[str, str | int | float]:
    """Properties that must agree between nodes that should be alike."""
    fabric = fabric_ports(facts.ports)
    if not fabric:
        return {}
    firmware = sorted({p.firmware for p in fabric if p.firmware})
    values: dict[str, str | int | float] = {"fabric ports": len(fabric)}
    if firmware:
        values["NIC firmware"] = ", ".join(firmware)
    if all(p.port.gbit_s is not None for p in fabric) and len({p.port.gbit_s for p in fabric}) == 1:
        values["fabric port rate, Gb/s"] = fabric[0].port.gbit_s or 0.0
    return values


def rates(facts: PortsFacts) -> dict[str, float]:
    """Device -> rate of its active port in Gb/s; devices whose ports disagree are left out."""
    seen: dict[str, set[float]] = {}
    for each in facts.ports:
        if _healthy(each) and each.port.gbit_s is not None:
            seen.setdefault(each.port.device, set()).add(each.port.gbit_s)
    return {device: rate for device, (rate, *rest) in ((d, tuple(r)) for d, r in seen.items()) if not rest}
