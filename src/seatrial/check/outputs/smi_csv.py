"""`nvidia-smi --query-gpu=... --format=csv`, with any columns, with or without units and header.

Judged like `nvidia-smi -q`. Column names: `nvidia-smi --help-query-gpu`; --query-remapped-rows has some of the same.
_PATHS maps them to their names in -q; other columns are only searched for errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.floors import find_sku
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.gpu_state import GpuStates, reasons
from seatrial.check.outputs.smi_query import LOST, Gpu, Query, Value
from seatrial.check.outputs.smi_query_damage import malformed
from seatrial.check.outputs.smi_query_judge import GpuJudge, differences, inventory
from seatrial.check.outputs.smi_state import states_of
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, evidence
from seatrial.check.ranges import listed
from seatrial.hardware.xid import address

_COLUMN = re.compile(r"[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*(?: \[[^\]]{1,10}\])?")
_KNOWN = re.compile(
    r"(?:index|name|gpu_name|uuid|gpu_uuid|serial|gpu_serial|count|timestamp|driver_version|vbios_version|pstate|pci\.\w+|gpu_bus_id|gpu_recovery_action|compute_mode"
    r"|persistence_mode|(?:memory|utilization|temperature|power|enforced\.power|clocks\w*|ecc|retired_pages|remapped_rows|pcie|fan|mig|fabric|inforom|gom)\..+)(?: \[.*\])?"
)
_VALUE = re.compile(
    r"GPU-[0-9a-f-]{36}|(?:NVIDIA|Tesla|Quadro|GeForce|TITAN) .{1,80}|[0-9A-F]{4,8}:[0-9A-F]{2}:[0-9A-F]{2}\.0"
)
# Column -> path in -q.
_PATHS = {
    "name": "product_name", "gpu_name": "product_name", "pstate": "performance_state", "memory.total": "fb_memory_usage.total",
    "ecc.mode.current": "ecc_mode.current", "mig.mode.current": "mig_mode.current",
    "ecc.errors.uncorrected.volatile.total": "ecc_errors.volatile.uncorrectable_total",
    "power.limit": "gpu_power_readings.current_power_limit",
    "clocks.current.sm": "clocks.sm", "clocks.max.sm": "max_clocks.sm",
    "pcie.link.gen.current": "pci.gpu_link_info.pcie_generation.current",
    "pcie.link.gen.gpucurrent": "pci.gpu_link_info.pcie_generation.current",
    "pcie.link.gen.max": "pci.gpu_link_info.pcie_generation.max",
    "pcie.link.width.current": "pci.gpu_link_info.link_width.current",
    "pcie.link.width.max": "pci.gpu_link_info.link_width.max",
    "retired_pages.single_bit_ecc.count": "retired_pages.single_bit_ecc",
    "retired_pages.double_bit.count": "retired_pages.double_bit_ecc",
    "retired_pages.pending": "retired_pages.pending_page_blacklist",
    "remapped_rows.correctable": "remapped_rows.correctable_error", "remapped_rows.uncorrectable": "remapped_rows.uncorrectable_error",
    "remapped_rows.failure": "remapped_rows.remapping_failure_occurred",
}  # fmt: skip
_HEAD = {"driver_version": "driver_version", "count": "attached_gpus"}  # of the whole node
_REASONS = re.compile(r"clocks_(?:event|throttle)_reasons\.active")
# Some versions print 0 and 1.
_YES_NO = ("retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]  # nothing is quoted


def _is_head(line: str) -> bool:
    cells = _cells(line)
    return all(_COLUMN.fullmatch(c) for c in cells) and any(_KNOWN.fullmatch(c) for c in cells)


def matches(text: str) -> bool:
    """Whether there is a header of known columns, or a row with a GPU's name, UUID or address among other cells."""
    lines = [x for x in text[:20_000].split("\n") if x.strip()]
    if any(
        _is_head(x) and ("," in x or (n + 1 < len(lines) and _VALUE.fullmatch(lines[n + 1].strip())))
        for n, x in enumerate(lines[:40])
    ):
        return True
    return any("," in x and any(_VALUE.fullmatch(c) for c in _cells(x)) for x in lines[:40])


def parse(lines: Lines, file: str) -> GpuStates:
    """Parse all rows. Raises ParseError if there is no GPU. `whole` is false without a header: columns are unknown."""
    columns: list[str] = []
    width = 0
    head: dict[str, Value] = {}
    gpus: list[Gpu] = []
    lost: list[tuple[int, str]] = []
    for number, line in lines:
        cells = _cells(line)
        if LOST.match(line) and not 1 < len(cells) == len(columns):
            lost.append((number, line.strip()))
        elif _is_head(line) and not gpus:
            columns = [re.sub(r" \[.*\]$", "", c) for c in cells]
        elif len(cells) != (len(columns) or width or len(cells)) or not (
            columns or any(_VALUE.fullmatch(c) for c in cells)
        ):
            continue  # cut off, or not a row
        else:
            width = len(cells)
            gpus.append(Gpu(None, number, dict(_values(columns, cells, number))))
            values = dict(zip(columns, cells, strict=True)) if columns else {}
            gpus[-1].pci = address(values.get("pci.bus_id", values.get("gpu_bus_id", "")))
            gpus[-1].index = int(values["index"]) if values.get("index", "").isdecimal() else None
            head |= {k: Value(values[c], number) for c, k in _HEAD.items() if c in values}
        lines.claim(number)
    if not gpus and not lost:
        raise ParseError("no GPU in the output", file=file)
    return states_of(Query(file, head, gpus, lost, bool(columns)), malformed)


def _values(columns: list[str], cells: list[str], number: int) -> Iterator[tuple[str, Value]]:
    for n, cell in enumerate(cells):
        name = columns[n] if columns else f"column {n + 1}"
        if _REASONS.fullmatch(name) and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
            active = reasons(int(cell, 16))
            for reason in reasons(-1):
                word = "Active" if reason in active else "Not Active"
                yield f"clocks_event_reasons.{reason}", Value(word, number)
        elif not name.endswith((".active", ".supported")):
            text = {"0": "No", "1": "Yes"}.get(cell, cell) if name in _YES_NO else cell
            yield _PATHS.get(name, name), Value(text, number)


def judge(states: GpuStates, context: Context) -> list[Finding]:
    """Judge like `nvidia-smi -q`, for the columns that are present."""
    add = FindingCollector(states.file, context, "GPU011")
    for line, text in states.lost:
        add("FAIL", text[:200], line, code="GPU002")
    names = {g.name for g in states.gpus}
    sku = find_sku(names.pop()) if len(names) == 1 else None
    indices = [n if g.index is None else g.index for n, g in enumerate(states.gpus)]
    again = len(set(indices)) < len(indices)  # with -l the same GPUs are printed repeatedly
    if states.whole and not again:
        places = evidence(states.file, (g.line for g in states.gpus if g.line is not None))
        add.found += count_findings(indices, sku, context, places)
        if states.attached is not None and len(indices) < states.attached:
            shown = f"{states.attached} GPUs attached, {len(indices)} in the output"
            add("UNJUDGED", f"{shown}: only these were selected, or it is truncated")
    add.found += differences(states, context)
    for place, gpu in enumerate(states.gpus):
        add.found += GpuJudge(states, context, place).faults()
        for what, line in gpu.damage:
            at = Target(gpu=indices[place] if states.whole else None, pci=gpu.pci)
            add("UNJUDGED", what, line, target=at)
    if not states.whole:
        add("UNJUDGED", "no header: the columns are unknown; collect it without noheader")
    return add.with_pass(f"GPU {listed(sorted(set(indices)))}: no faults in these columns")


TOOLS: tuple[Tool[GpuStates], ...] = (Tool("nvidia-smi --query-gpu", matches, parse, judge, inventory),)
