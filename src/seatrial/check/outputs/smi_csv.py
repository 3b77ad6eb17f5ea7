"""`nvidia-smi --query-gpu=... --format=csv`, with any columns, with or without units and header.

Judged as `nvidia-smi -q` is. Column names: `nvidia-smi --help-query-gpu`; --query-remapped-rows has some of the same.
_PATHS maps them to their names in -q; other columns are only searched for errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from seatrial.check.findings import Finding, Target
from seatrial.check.floors import find_sku
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.say import Say
from seatrial.check.outputs.smi_query import LOST, Gpu, Query, Value
from seatrial.check.outputs.smi_query_damage import malformed
from seatrial.check.outputs.smi_query_judge import Judge, inventory
from seatrial.check.tool import Context, Lines, ParseError, Tool, evidence, listed
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
_YES_NO = (
    "retired_pages.pending",
    "remapped_rows.pending",
    "remapped_rows.failure",
)  # some versions print 0 and 1
# NVML, nvmlClocksEventReasons: bits of clocks_event_reasons.active (clocks_throttle_reasons.active before driver 535).
_BITS = {
    0x1: "idle", 0x8: "hw_slowdown", 0x20: "sw_thermal_slowdown", 0x40: "hw_thermal_slowdown", 0x80: "hw_power_brake_slowdown",
}  # fmt: skip


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split(",")]  # nothing is quoted


def _is_head(line: str) -> bool:
    cells = _cells(line)
    return all(_COLUMN.fullmatch(c) for c in cells) and any(_KNOWN.fullmatch(c) for c in cells)


def matches(text: str) -> bool:
    """A header of known columns; or rows that each have a GPU's name, UUID or address among other cells."""
    lines = [x for x in text[:20_000].split("\n") if x.strip()]
    if any(
        _is_head(x) and ("," in x or (n + 1 < len(lines) and _VALUE.fullmatch(lines[n + 1].strip())))
        for n, x in enumerate(lines[:40])
    ):
        return True
    return any("," in x and any(_VALUE.fullmatch(c) for c in _cells(x)) for x in lines[:40])


def parse(lines: Lines, file: str) -> Query:
    """Raises ParseError if there is no GPU. `whole` is false without a header: the columns are unknown then."""
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
            said = dict(zip(columns, cells, strict=True)) if columns else {}
            gpus[-1].pci = address(said.get("pci.bus_id", said.get("gpu_bus_id", "")))
            gpus[-1].index = int(said["index"]) if said.get("index", "").isdecimal() else None
            head |= {k: Value(said[c], number) for c, k in _HEAD.items() if c in said}
        lines.claim(number)
    if not gpus and not lost:
        raise ParseError("no GPU in it", file=file)
    return Query(file, False, head, gpus, lost, bool(columns))


def _values(columns: list[str], cells: list[str], number: int) -> Iterator[tuple[str, Value]]:
    for n, cell in enumerate(cells):
        name = columns[n] if columns else f"column {n + 1}"
        if _REASONS.fullmatch(name) and re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
            for bit, reason in _BITS.items():
                word = "Active" if int(cell, 16) & bit else "Not Active"
                yield f"clocks_event_reasons.{reason}", Value(word, number)
        elif not name.endswith((".active", ".supported")):
            text = {"0": "No", "1": "Yes"}.get(cell, cell) if name in _YES_NO else cell
            yield _PATHS.get(name, name), Value(text, number)


def judge(query: Query, context: Context) -> list[Finding]:
    """As nvidia-smi -q, for the columns that are present."""
    say, work = Say(query.file, context, "GPU011"), Judge(query, context)
    for line, text in query.lost:
        say("FAIL", text[:200], line, code="GPU002")
    names = {g.name for g in query.gpus}
    sku = find_sku(names.pop()) if len(names) == 1 else None
    indices = [n if g.index is None else g.index for n, g in enumerate(query.gpus)]
    again = len(set(indices)) < len(indices)  # with -l the same GPUs are printed repeatedly
    if query.whole and not again:
        say.found += count_findings(indices, sku, context, evidence(query.file, (g.line for g in query.gpus)))
        if query.attached is not None and len(indices) < query.attached:
            shown = f"{query.attached} GPUs attached, {len(indices)} in the output"
            say("UNJUDGED", f"{shown}: asked for only these, or cut off")
    say.found += work.alike()
    for index, gpu in zip(indices, query.gpus, strict=True):
        say.found += work.of_gpu(index, gpu)
        for what, value in malformed(gpu):
            at = Target(gpu=index if query.whole else None, pci=gpu.pci)
            say("UNJUDGED", what, value.line, target=at)
    if not query.whole:
        say("UNJUDGED", "no head: which value is which is not known; collect it without noheader")
    return say.all_well(f"GPU {listed(sorted(set(indices)))}: nothing wrong in these columns")


TOOLS: tuple[Tool[Query], ...] = (Tool("nvidia-smi --query-gpu", matches, parse, judge, inventory),)
