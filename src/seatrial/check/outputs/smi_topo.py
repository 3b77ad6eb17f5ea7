"""How a node's GPUs are connected: the matrix of `nvidia-smi topo -m`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import find_sku
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed

# The header is underlined by escape sequences, which lack the escape character if copied from a terminal.
_COLOUR = re.compile(r"\x1b?\[[0-9]{1,2}(?:;[0-9]{1,2})*m")
_DEVICE = r"(?:GPU[0-9]{1,3}|NIC[0-9]{1,3}|[a-z][a-z0-9_]*_[a-z0-9_]+)"
# With a single GPU no entry distinguishes this matrix from that of -p2p.
_FIRST_ROW = r"^\s*GPU[0-9]{1,3}\s+(?:(?:X\s+)?(?:NV[0-9]|SYS|NODE|PHB|P[XI]B|PIX|C2C)|X\s*(?:$|[0-9]|N/A))"
_JOIN = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV[0-9]{1,2}|C2C|N/A", re.ASCII)
_GPU = re.compile(r"GPU(?P<index>[0-9]{1,3})", re.ASCII)
_LEGEND = re.compile(
    r"\s*(?:(?:NIC )?Legend:|(?:X|SYS|NODE|PHB|PXB|PIX|NV#|C2C)\s+= \S.*|NIC[0-9]{1,3}: \S+)\s*"
)
_AFFINITY = re.compile(r"[0-9,-]+|N/A")
# GPUs of a full NVLink mesh or an NVSwitch board, or of a virtual machine's part of it: machines with 16 are HGX-2.
_FULL_COUNTS = (2, 4, 8, 16)


@dataclass(frozen=True)
class Topology:
    """`joins[a][b]` is the matrix entry between the GPUs with the indices a and b: "NV18", "SYS", ..."""

    file: str
    gpus: tuple[int, ...]
    nics: tuple[str, ...]
    joins: dict[int, dict[int, str]]
    lines: dict[int, int]

    def links(self, one: int, other: int) -> int:
        """NVLinks between two GPUs."""
        join = self.joins[one][other]
        return int(join[2:]) if join.startswith("NV") else 0


def _header(line: str) -> list[str]:
    return re.findall(rf"(?<!\S){_DEVICE}(?!\S)", line.partition("CPU Affinity")[0], re.ASCII)


def matches(text: str) -> bool:
    """Whether a matrix of GPUs is in the text."""
    clean = _COLOUR.sub("", text[:20_000])
    return re.search(r"^\s+GPU[0-9]{1,3}\b.*$", clean, re.MULTILINE) is not None and (
        re.search(_FIRST_ROW, clean, re.MULTILINE) is not None
    )


def parse(lines: Lines, file: str) -> Topology:
    """Parse the matrix. Raises ParseError if it is incomplete or not symmetric."""
    devices: list[str] = []
    rows: dict[str, list[str]] = {}
    places: dict[str, int] = {}
    ended = False
    for number, raw in lines:
        line = _COLOUR.sub("", raw)
        words = line.split()
        if not words:
            ended = bool(rows)  # the legend follows
            continue
        if not devices:
            if line[:1].isspace() and _GPU.fullmatch(words[0]):
                devices = _header(line)
                lines.claim(number)
            continue
        name, values = words[0], words[1 : 1 + len(devices)]
        if ended or name not in devices or name in rows:
            if _LEGEND.fullmatch(line):
                lines.claim(number)
            continue
        odd = next((v for v in values if not _JOIN.fullmatch(v)), None)
        if len(values) < len(devices) or odd is not None:
            what = (
                f"{odd!r} is not a connection type"
                if odd is not None
                else f"{len(values)} of {len(devices)} columns"
            )
            raise ParseError(f"row {name}: {what}", file=file, line=number, source_line=line)
        rows[name], places[name] = values, number
        if all(_AFFINITY.fullmatch(word) for word in words[1 + len(devices) :]):
            lines.claim(number)
    if not devices:
        raise ParseError("no matrix with GPUs in its header", file=file)
    missing = [d for d in devices if d not in rows]
    if missing:
        last = max(places.values(), default=1)
        raise ParseError(f"the row of {missing[0]} is missing: the matrix is truncated", file=file, line=last)
    for i, one in enumerate(devices):
        for j, other in enumerate(devices):
            if rows[one][j] != rows[other][i] or (rows[one][j] == "X") != (i == j):
                text = f"{one} to {other} is {rows[one][j]}, {other} to {one} is {rows[other][i]}"
                raise ParseError(text, file=file, line=places[one])
    gpus = [(n, int(m["index"])) for n, d in enumerate(devices) if (m := _GPU.fullmatch(d))]
    joins = {index: {other: rows[devices[n]][k] for k, other in gpus} for n, index in gpus}
    nics = tuple(d for d in devices if not _GPU.fullmatch(d))
    return Topology(file, tuple(i for _, i in gpus), nics, joins, {i: places[devices[n]] for n, i in gpus})


def judge(topology: Topology, context: Context) -> list[Finding]:
    """Whether GPUs are missing, and whether all are connected like their siblings."""
    count, add = len(topology.gpus), FindingCollector(topology.file, context, "NVL006")
    _missing(topology, add)
    _uneven(topology, add)
    if add.found:
        return add.found
    lines = topology.lines.values()
    best = {g: max((topology.links(g, o) for o in topology.gpus if o != g), default=0) for g in topology.gpus}
    if count > 1 and not any(best.values()):
        sku = find_sku(context.gpu)
        if sku is not None and sku.board not in ("switch", "mesh"):
            add("PASS", f"{count} {sku.name} GPUs, none connected by NVLink", *lines, code="NVL008")
        else:
            why = "no NVLink between any GPUs, and the output does not name the GPU model, so it is unknown whether it must have some"
            add("UNJUDGED", why, *lines)
        return add.found
    peers = sorted({sum(topology.links(g, o) > 0 for o in topology.gpus if o != g) for g in topology.gpus})
    text = f"{count} GPU{'s' * (count != 1)}, each connected by NVLink to {listed(peers)} others"
    if peers and max(peers) < count - 1:
        text += ": other paths go over PCIe and the CPUs"
    add("PASS", text, *lines, code="NVL008")
    return add.found


def _missing(topology: Topology, add: FindingCollector) -> None:
    count, sku, context = len(topology.gpus), find_sku(add.context.gpu), add.context
    full = count > 2 and all(topology.links(a, b) for a in topology.gpus for b in topology.gpus if a != b)
    if context.gpus is not None:
        expected = Expected(context.gpus, "GPUs", "job or peers")
        wrong = count != context.gpus
    elif sku is not None and sku.counts:
        expected = Expected(listed(sku.counts), "GPUs", sku.source)
        wrong = count not in sku.counts
    elif full:
        source = "docs.nvidia.com, Fabric Manager user guide: an NVSwitch board, or a part of it, shows 2, 4 or 8 GPUs; HGX-2: 16"
        expected, wrong = Expected(listed(_FULL_COUNTS), "GPUs", source), count not in _FULL_COUNTS
    else:
        return
    holes = set(range(max(topology.gpus) + 1)) - set(topology.gpus)
    if wrong or holes:
        text = f"{count} GPUs, expected: {expected.value}"
        if full:
            text = f"{count} GPUs, all connected by NVLink, {expected.value} are expected"
        add("FAIL", text, *topology.lines.values(), code="GPU001", measured=count, expected=expected)


def _uneven(topology: Topology, add: FindingCollector) -> None:
    """GPUs with fewer NVLinks than their peers have."""
    gpus = topology.gpus
    peers = {g: [o for o in gpus if o != g and topology.links(g, o)] for g in gpus}
    best = {g: max((topology.links(g, o) for o in peers[g]), default=0) for g in gpus}
    total = {g: sum(topology.links(g, o) for o in peers[g]) for g in gpus}
    top = max(best.values(), default=0)
    sku = find_sku(add.context.gpu)
    must = sku.links if sku is not None and sku.board == "switch" and len(gpus) > 1 else None
    most = max(total.values(), default=0)
    if sku is not None and sku.board == "mesh" and len(gpus) > 7:
        most = max(most, sku.links or 0)
    full = any(len(p) == len(gpus) - 1 for p in peers.values()) and len(gpus) > 2
    pairs = bool(top) and all(len(p) <= 1 for p in peers.values())
    for gpu in gpus:
        have, wanted, text = best[gpu], must or top, ""
        if must is not None and have < must:
            text = f"{have} NVLinks to its peers, {must} expected of a {sku.name if sku else ''}"
        elif full and len(peers[gpu]) < len(gpus) - 1:
            text = f"NVLink to only {len(peers[gpu])} of {len(gpus) - 1} other GPUs"
            # The peers of a GPU without any NVLink are not at fault.
            if peers[gpu] and all(not peers[o] for o in gpus if o != gpu and o not in peers[gpu]):
                text = ""
        elif pairs and not have and not _odd_one(peers):
            text = "no NVLink, but others are connected in pairs"
        elif have and have < top:
            text = f"{have} NVLinks to its best peer, others have {top}"
        elif not full and not pairs and total[gpu] < most:
            have, wanted, text = total[gpu], most, f"{total[gpu]} NVLinks in all, {most} expected"
        if text:
            source = sku.source if sku and wanted == sku.links else "the node's other GPUs"
            expected = Expected(wanted or None, "links", source)
            verdict: Verdict = "WARN" if pairs and not have else "FAIL"
            add(verdict, text, topology.lines[gpu], target=Target(gpu=gpu), measured=have, expected=expected)


def _odd_one(peers: dict[int, list[int]]) -> bool:
    """Whether one card has no partner because an odd number of cards is bridged in pairs."""
    return len(peers) % 2 == 1 and sum(not p for p in peers.values()) == 1


def inventory(topology: Topology) -> dict[str, str | int | float]:
    """Number of GPUs, of NICs, and all NVLinks between GPUs."""
    links = sum(topology.links(a, b) for a in topology.gpus for b in topology.gpus if a < b)
    return {"GPUs": len(topology.gpus), "NICs in topo": len(topology.nics), "NVLinks between GPUs": links}


_BEGINS = re.compile(
    r"(?=[\s\x1b\[])(?:\x1b?\[[0-9;]*m|\s)*(?P<id>GPU)[0-9]{1,3}(?:\x1b?\[[0-9;]*m|\s)+(?:GPU[0-9]|CPU Affinity|NIC[0-9]|[a-z0-9]+_)"
)
TOOLS: tuple[Tool[Topology], ...] = (
    Tool("nvidia-smi topo -m", matches, parse, judge, inventory, first_line=_BEGINS),
)
