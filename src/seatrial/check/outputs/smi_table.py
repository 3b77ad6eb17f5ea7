"""The table that plain `nvidia-smi` prints: which GPUs are present, and errors in place of values."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.floors import find_sku
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, evidence, lines_of
from seatrial.hardware.xid import address

_HEAD = re.compile(r"NVIDIA-SMI\s+(?P<smi>\S+)\s+(?:KMD|Driver) Version:\s*(?P<driver>\S+)")
_ROW = re.compile(
    r"^\|\s{0,9}(?P<index>[0-9]{1,3})\s{1,9}(?P<name>\S.{0,60}?)\s{1,60}(?:(?:On|Off|N/A|ERR!)\s{0,9})?"
    r"\|\s{0,9}(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])\s"
)
_SECOND = re.compile(r"^\|\s*(?:N/A|ERR!|[0-9]+%)\s+(?:N/A|ERR!|[0-9]+C)\s")
_LOST = re.compile(
    r"GPU is lost|No devices (?:were )?found|has failed because it couldn't communicate|Unable to determine the device handle"
    r"|Failed to initialize NVML",
    re.IGNORECASE,
)
# Missing permission to use NVML says nothing about the driver.
_NOT_ALLOWED = re.compile(r"Failed to initialize NVML: Insufficient Permissions", re.IGNORECASE)
_INSTEAD = re.compile(
    r"^[ \t]*(?:No devices (?:were )?found|NVIDIA-SMI has failed|Unable to determine the device handle|Failed to initialize NVML)",
    re.MULTILINE | re.IGNORECASE,
)
_INFOROM = re.compile(
    r"^WARNING: infoROM is corrupted at gpu (?P<pci>[0-9A-Fa-f:.]{7,20})", re.MULTILINE | re.IGNORECASE
)
_BESIDE = re.compile(
    r"NVML library version: [0-9.]+|Make sure that the latest NVIDIA driver is installed and running\.",
    re.IGNORECASE,
)
_RULE = re.compile(r"\+[-=+]{40,}\+")
_END = re.compile(r"\+-{40,}\+")
_LONGEST = 12  # lines of a message in place of a table, with a prompt before it
_MEMORY = re.compile(r"(?P<used>[0-9]+|N/A|ERR!)\s*(?:MiB)?\s*/\s*(?P<total>[0-9]+)\s*MiB")
# Uncorrectable errors: at the end of a GPU's first line, and in the third column of each of its MIG devices.
_COUNTED = re.compile(
    r"\|\s*(?P<gpu>[0-9]{1,3})\s.*\|\s*(?:[0-9]+\s+(?=[0-9]+ \|.*\|))?(?P<ecc>[0-9]+) \|(?:[ 0-9]+\|)?\s*"
)


@dataclass
class Row:
    """One GPU: the content of its lines."""

    index: int
    name: str
    pci: str | None
    line: int
    errors: list[tuple[int, str]] = field(default_factory=list)
    uncorrected: dict[int, int] = field(default_factory=dict)  # line -> count, of the GPU and its MIG devices
    memory_mib: int | None = None
    second: bool = False  # whether its second line is there


@dataclass
class Table:
    """The whole table; `lost` are lines stating that a GPU or the driver does not answer."""

    file: str
    driver: str | None
    rows: list[Row]
    lost: list[tuple[int, str]]
    closed: bool
    ended: bool | None = None  # whether the list of processes below the GPUs is complete; None without one
    corrupt: list[tuple[int, str | None]] = field(default_factory=list)  # corrupt infoROMs: line, address


def matches(text: str) -> bool:
    """Whether this is the table, or the message that nvidia-smi prints in its place."""
    start = text[:20_000]
    if re.search(r"^\|\s*NVIDIA-SMI\s+\S+", start, re.MULTILINE):
        return True
    lines = [line for line in lines_of(start) if line.strip()]
    if len(lines) > _LONGEST or any(re.match(r"GPU \d+: ", line) for line in lines):
        return _INSTEAD.match(start.lstrip()) is not None
    return _INSTEAD.search(start) is not None


def parse(lines: Lines, file: str) -> Table:
    """Parse the table. Raises ParseError if there is no GPU and no reason why, or the table ends within a GPU."""
    head = _HEAD.search(lines.text)
    table = Table(file, head["driver"] if head else None, [], [], False)
    table.corrupt = inforom_lines(lines)
    inside, processes, below = False, False, ""
    width: int | None = None  # of all table lines
    for number, line in lines:
        if width is None and _HEAD.search(line):
            width = len(line.rstrip())
        found = _ROW.match(line)
        again = found is not None and any(r.index == int(found["index"]) for r in table.rows)
        again |= inside and table.rows[-1].second and _SECOND.match(line) is not None
        if len(line.rstrip()) == width and not (again or (processes and _END.fullmatch(below))):
            lines.claim(number)
        if processes:
            below = line.rstrip() if line.startswith(("|", "+")) else below
            continue
        if _LOST.search(line) and not (inside and line.startswith("|")):
            lines.claim(number)
            table.lost.append((number, line.strip()[:200]))
        elif _BESIDE.fullmatch(line.strip()):
            lines.claim(number)
        elif found is not None:
            row = Row(int(found["index"]), found["name"].strip(), address(found["pci"]), number)
            table.rows.append(row)
            inside, table.closed = True, False
        elif _RULE.fullmatch(line.rstrip()) and table.rows:
            inside, table.closed = False, True
        if inside and line.startswith("|"):
            row = table.rows[-1]
            if "ERR!" in line or "Unknown Error" in line or _LOST.search(line):
                row.errors.append((number, _named(line)))
            if _SECOND.match(line):
                row.second = True
                memory = _MEMORY.search(line)
                row.memory_mib = int(memory["total"]) if memory else row.memory_mib
        if counted := _COUNTED.fullmatch(line):
            of = [r for r in table.rows if r.index == int(counted["gpu"])] or table.rows[-1:]
            of[-1].uncorrected |= {number: int(counted["ecc"])} if int(counted["ecc"]) else {}
        processes = re.match(r"^\|\s*(?:Compute )?Processes", line, re.IGNORECASE) is not None
    if processes:
        table.ended = _END.fullmatch(below) is not None
    if not table.rows and not table.lost:
        raise ParseError("no GPU in the table of nvidia-smi", file=file)
    incomplete = next((r for r in table.rows if not r.second), None)
    if incomplete is not None or (table.rows and not table.closed):
        where = (incomplete or table.rows[-1]).line
        raise ParseError("the table ends within a GPU: truncated or damaged", file=file, line=where)
    return table


def inforom_lines(lines: Lines) -> list[tuple[int, str | None]]:
    """Line and PCI address of each GPU whose infoROM nvidia-smi reports as corrupt, which it does below any output."""
    found = [(number, m["pci"]) for number, line in lines if (m := _INFOROM.match(line))]
    lines.claim(*(number for number, _ in found))
    return [(number, address(pci)) for number, pci in found]


def inforom_findings(corrupt: Sequence[tuple[int, str | None]], file: str, context: Context) -> list[Finding]:
    """One finding for each of inforom_lines()."""
    text = "its infoROM is corrupt"
    return [
        Finding("GPU013", "FAIL", Target(node=context.node, pci=pci), text, evidence=evidence(file, [line]))
        for line, pci in corrupt
    ]


def _named(line: str) -> str:
    """What is malformed in a GPU's line; the fields are in the order of the header, "Fan Temp Perf Pwr:Usage/Cap"."""
    if lost := _LOST.search(line):
        return lost[0]
    words = line.strip("| ").split()
    names = ("fan", "temperature", "performance state", "power")
    if _SECOND.match(line):
        for name, word in zip(names, words, strict=False):
            if word == "ERR!":
                return f"ERR! instead of a value: {name}"
    return "ERR! instead of a value"


def judge(table: Table, context: Context) -> list[Finding]:
    """Errors, missing GPUs; one PASS for each GPU that shows neither."""
    add = FindingCollector(table.file, context, "GPU011")
    for line, text in table.lost:
        if _NOT_ALLOWED.search(text):
            add("UNJUDGED", text, line)
        else:
            add("FAIL", text, line, code="GPU002")
    add.found += inforom_findings(table.corrupt, table.file, context)
    names = {r.name for r in table.rows}
    sku = find_sku(context.gpu) or (find_sku(next(iter(names))) if len(names) == 1 else None)
    full = context.gpus or max(sku.counts if sku is not None else (), default=None)
    # Without the list of processes the table may have been cut off after any GPU.
    if table.rows and (table.ended is False or (table.ended is None and len(table.rows) != full)):
        why = "the process list below the GPUs is truncated or abridged, so there may be more GPUs"
        add("UNJUDGED", why, table.rows[-1].line)
    places = evidence(table.file, (r.line for r in table.rows))
    add.found += count_findings([r.index for r in table.rows], sku, context, places)
    for row in table.rows:
        target = Target(gpu=row.index, pci=row.pci)
        for line, text in row.errors:
            add("FAIL", text, line, code="GPU002", target=target, measured="ERR!")
        if row.uncorrected:
            count = sum(row.uncorrected.values())
            text = f"{count} uncorrectable memory errors since the driver was loaded"
            add("FAIL", text, *row.uncorrected, code="GPU003", target=target, measured=count, unit="errors")
        if not row.errors and not row.uncorrected:
            add("PASS", f"{row.name} responds, no error in the table", row.line, target=target)
    return add.found


def inventory(table: Table) -> dict[str, str | int | float]:
    """Number and kind of GPUs, driver, memory."""
    found: dict[str, str | int | float] = {"GPUs": len(table.rows)}
    if table.driver is not None:
        found["driver"] = table.driver
    if table.rows:
        found["GPU"] = ", ".join(sorted({r.name for r in table.rows}))
        sizes = sorted({r.memory_mib for r in table.rows if r.memory_mib is not None})
        found["memory"] = ", ".join(f"{s} MiB" for s in sizes)
    return found


_BEGINS = re.compile(r"\|\s*(?P<id>NVIDIA-SMI)\s+\S")
TOOLS: tuple[Tool[Table], ...] = (Tool("nvidia-smi", matches, parse, judge, inventory, first_line=_BEGINS),)
