"""The leaf switch of each port of each node: from `ibnetdiscover` output or a Slurm topology.conf."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import read_named
from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import shares
from seatrial.check.names import hostlist
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.tool import Context

T = TypeVar("T", int, str)


@dataclass(frozen=True)
class Link:
    """One end of a fabric link, seen from a switch. `rate` as ibnetdiscover prints it ("4xNDR"), None if missing."""

    switch: str  # display name
    port: int
    to_switch: bool
    peer: str
    rate: str | None


@dataclass(frozen=True)
class Topology:
    """Leaf switches by (node, device); device None is every port of the node. `links` is empty if not in the source."""

    leaves: Mapping[tuple[str, str | None], str]
    links: tuple[Link, ...] = ()
    source: str = ""
    _by_node: dict[str, set[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for (node, _), leaf in self.leaves.items():
            self._by_node.setdefault(node, set()).add(leaf)

    def leaf(self, node: str, device: str | None = None) -> str | None:
        """The leaf switch of a port; None if unknown.

        If the source does not name the node's ports like `device`, it is known only if all of them share a leaf.
        """
        found = self.leaves.get((node, device)) or self.leaves.get((node, None))
        if found is None and len(names := self._by_node.get(node, set())) == 1:
            return next(iter(names))
        return found

    def table(self, nodes: Sequence[str], devices: Sequence[str]) -> list[list[str | None]]:
        """`leaf` of every node (rows) and device (columns)."""
        return [[self.leaf(node, device) for device in devices] for node in nodes]


def read_topology(path: Path) -> Topology:
    """Read a topology of either format, recognised by its content. Raises InputError if it is neither, or damaged."""
    try:
        text = read_named(path).decode("utf-8", errors="replace")
    except OSError as error:
        raise InputError(Diagnostic(f"cannot read the topology: {error.strerror}", file=str(path))) from error
    return parse_topology(text, str(path))


def parse_topology(text: str, source: str) -> Topology:
    """Parse a topology of either format. Raises InputError if it is neither, or damaged."""
    if re.search(r"(?im)^\s*SwitchName\s*=", text):
        return parse_slurm(text, source)
    if re.search(r'(?m)^(?:Switch|Ca)\s+\d+\s+"', text):
        return parse_ibnetdiscover(text, source)
    raise InputError(
        Diagnostic(
            "not a topology: it contains neither a switch of ibnetdiscover nor a SwitchName of Slurm",
            file=source,
            hint="provide the output of `ibnetdiscover`, or Slurm's topology.conf",
        )
    )


# -- ibnetdiscover (format: rdma-core, infiniband-diags/man/common/sec_topology-file.rst)

_NODE = re.compile(r'^(?P<kind>Switch|Ca|Rt)\s+\d+\s+"(?P<id>[^"]+)"\s*#\s*"(?P<name>[^"]*)"')
_LINK = re.compile(
    r'^\[(?P<port>\d+)\](?:\([^)]*\))?(?:\[ext \d+\])?\s+"(?P<id>[^"]+)"\[(?P<peer>\d+)\](?:\([^)]*\))?[^#]*#\s*(?P<rest>.*)$'
)
_NAME = re.compile(r'"(?P<name>[^"]*)"')
_RATE = re.compile(r"\b(?P<rate>\d+x(?:[A-Z]+\d*))\s*$")
AGGREGATION = re.compile(r"aggregation node", re.IGNORECASE)  # SHARP's own port inside a switch, not a node
_LANES = re.compile(r"(?P<lanes>\d+)x(?P<speed>.*)")
# From slowest to fastest.
IB_SPEEDS = ("SDR", "DDR", "QDR", "FDR10", "FDR", "EDR", "HDR", "NDR", "XDR")


def parse_ibnetdiscover(text: str, source: str) -> Topology:
    """The leaves (switches with a node on them) and all links. Raises InputError, also if the text is cut off.

    A node's description is "HOST DEVICE" ("h100-01 mlx5_0", as rdma-ndd sets it) or only the host.
    """
    problems: list[Diagnostic] = []
    names: dict[str, str] = {}
    seen: list[tuple[str, int, str, str, str | None]] = []  # switch id, port, peer id, peer's name, rate
    inside: str | None = None
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if node := _NODE.match(line):
            inside = node["id"] if node["kind"] == "Switch" else None
            names[node["id"]] = node["name"]
        elif line.startswith("["):
            link = _LINK.match(line)
            name = _NAME.search(link["rest"]) if link else None
            if link is None or name is None:
                problems.append(
                    Diagnostic("a link that cannot be read", source, number, 1, len(line), raw.rstrip())
                )
            elif inside is not None:
                rate = _RATE.search(link["rest"])
                seen.append(
                    (inside, int(link["port"]), link["id"], name["name"], rate["rate"] if rate else None)
                )
        elif line.startswith(("Switch", "Ca\t", "Ca ")):
            inside = None
            problems.append(
                Diagnostic("a switch or node that cannot be read", source, number, 1, len(line), raw.rstrip())
            )
    missing = sorted({peer for _, _, peer, _, _ in seen if peer.startswith("S-") and peer not in names})
    if missing:
        text = f"cut off: {len(missing)} switches are linked but not described, {missing[0]} first"
        problems.append(Diagnostic(text, source, hint="collect the complete output again"))
    if not problems and not seen:
        problems.append(Diagnostic("it contains no switch with a link", source))
    if problems:
        raise InputError(problems)
    shown = _shown(names)
    leaves: dict[tuple[str, str | None], str] = {}
    links = []
    for switch, port, peer, description, speed in seen:
        to_switch = peer.startswith("S-")
        if AGGREGATION.search(description):
            continue
        links.append(Link(shown[switch], port, to_switch, shown[peer] if to_switch else description, speed))
        if not to_switch:
            host, _, device = description.partition(" ")
            leaves[host, device.strip() or None] = shown[switch]
    return Topology(leaves, tuple(links), source)


def _shown(names: Mapping[str, str]) -> dict[str, str]:
    """The display name of each switch: its description, with the GUID if several have the same."""
    counts = Counter(names.values())
    return {
        key: name if name and counts[name] == 1 else f"{name} {key}".strip() for key, name in names.items()
    }


def judge_topology(topology: Topology) -> list[Finding]:
    """Leaf switches with fewer uplinks than their siblings, and links narrower or slower than others of their kind."""
    if not topology.links:
        why = "the source of the topology names no links"
        return [Finding("TOP001", "UNJUDGED", Target(), "uplinks are unknown", why_unjudged=why)]
    add = FindingCollector(topology.source, Context(), "TOP001")  # about the fabric, not about one node
    leaves = {link.switch for link in topology.links if not link.to_switch}
    uplinks = Counter(link.switch for link in topology.links if link.to_switch and link.peer not in leaves)
    usual = _most_frequent(uplinks[leaf] for leaf in leaves) or 0
    expected = Expected(usual, "links", "most frequent among the leaf switches")
    for leaf in sorted(leaf for leaf in leaves if uplinks[leaf] < usual):
        verdict: Verdict = "FAIL" if uplinks[leaf] < shares().broken * usual else "WARN"
        text, have = (
            f"{leaf}: {uplinks[leaf]} links to the switches above, its peers have {usual}",
            uplinks[leaf],
        )
        add(verdict, text, target=Target(peer=leaf), measured=have, expected=expected, median=float(usual))
    for up in (False, True):
        kind = [link for link in topology.links if link.to_switch == up]
        best = _most_frequent(link.rate for link in kind if link.rate)
        expected = Expected(best, "", "most frequent among links of its kind")
        for link in kind:
            if best is not None and link.rate is not None and _speed(link.rate) < _speed(best):
                text = f"{link.switch} port {link.port} to {link.peer}: {link.rate}, others {best}"
                target = Target(peer=link.switch, port=str(link.port))
                add("FAIL", text, code="TOP002", target=target, measured=link.rate, expected=expected)
    if not add.found:
        add("PASS", f"leaf switches: {len(leaves)}, uplinks of each: {usual}", measured=usual)
    return add.found


def _most_frequent(values: Iterable[T]) -> T | None:
    return max(Counter(values).items(), key=lambda item: (item[1], str(item[0])), default=(None, 0))[0]


def _speed(rate: str) -> tuple[int, int]:
    """Sort key: generation before lanes. An unknown generation counts as the newest, so that it is not blamed."""
    found = _LANES.match(rate)
    assert found is not None
    speed = found["speed"]
    return (IB_SPEEDS.index(speed) if speed in IB_SPEEDS else len(IB_SPEEDS), int(found["lanes"]))


# -- Slurm's topology.conf (topology.conf(5), topology/tree)


def parse_slurm(text: str, source: str) -> Topology:
    """The switches with nodes of their own. Slurm knows one leaf per node, whatever the rail. Raises InputError."""
    problems: list[Diagnostic] = []
    leaves: dict[tuple[str, str | None], str] = {}
    first: dict[str, int] = defaultdict(int)
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        fields = {key.lower(): value for key, value in re.findall(r"(\w+)\s*=\s*(\S+)", line)}
        name = fields.get("switchname")
        if name is None:
            problems.append(Diagnostic("no SwitchName", source, number, 1, len(line), raw.rstrip()))
            continue
        for node in _hosts(fields.get("nodes", ""), source, number, raw, problems):
            if (node, None) in leaves:
                text = f"{node} is below {leaves[node, None]} (line {first[node]}) and below {name}"
                problems.append(Diagnostic(text, source, number, source_line=raw.rstrip()))
            leaves[node, None], first[node] = name, number
    if not problems and not leaves:
        problems.append(Diagnostic("no switch has nodes", source))
    if problems:
        raise InputError(problems)
    return Topology(leaves, (), source)


def _hosts(expression: str, source: str, number: int, raw: str, problems: list[Diagnostic]) -> list[str]:
    try:
        return hostlist(expression)
    except ValueError as error:
        problems.append(Diagnostic(str(error), source, number, source_line=raw.rstrip()))
        return []
