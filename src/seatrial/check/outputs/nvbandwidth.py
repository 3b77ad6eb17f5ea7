"""nvbandwidth, as text and as JSON (-j): copies between GPUs, and between GPUs and the host.

Format: NVIDIA/nvbandwidth, output.cpp, inline_common.h and json_output.cpp; published outputs of 0.5 to 0.10. All
figures are of one direction, except the "Total" of the bidirectional GPU-to-GPU tests (testcases_ce.cpp).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from seatrial.check.judging.findings import Direction, Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import Sku, What, find_sku, shares
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, read_json

_RUN = re.compile(r"Running (?P<test>[a-z][a-z0-9_]+)\.\s*")
_WORD = re.compile(r"(?P<status>Waived|WAIVED|Error|ERROR|Not Found|Passed):? ?(?P<text>.*)")
_DEVICE = re.compile(
    r"(?P<text>Device |Process \d+ \(.{1,120}\): device )?\d{1,3}: (?P<name>.{1,100}?)(?: \([0-9a-f:.]{7,20}\))?(?:: \(.*\))?\s*"
)
_TITLE = re.compile(r"(?i:(?:memcpy|memory|device|host).{0,80}\((?:GB/s|ns|nanoseconds)\)\s*)")
_HEAD = re.compile(r"\s+(?:\d+\s*)+")
_ROW = re.compile(r"\s*(?P<row>\d+)\s+(?P<cells>(?:(?:\d+(?:\.\d+)?(?:e\+\d+)?|N/A|-?nan|-?inf)\s*)+)")
_SUM = re.compile(
    r"(?P<what>SUM|MIN|MAX|AVG|COEFFICIENT_OF_VARIATION|&&&& PERF) (?P<test>\w+) (?P<value>\S+)\s*"
)
_FAULT = re.compile(
    r"\[CUDA_ERROR_\w+\].*|NVML_ERROR: .*|ASSERT in expression .*|.*Invalid value when checking the pattern.*"
)
_BESIDE = re.compile(
    r"(?:nvbandwidth Version: .*|Built from Git version:.*|MPI version: .*|CUDA (?:Runtime|Driver) Version(?: \(API\))?: [\d.]+(?: \(\d+\))?"
    r"|Driver Version: .*|(?=[\w.-]*[a-z])[a-z0-9][\w.-]{1,252})\s*"
)
_NOTE = re.compile(r"NOTE: .*|Performance can vary with .*|Additional system-specific tuning may .*")
# (pattern of the test, code, floor, direction of the floor)
_FLOORS: tuple[tuple[str, str, What, Direction], ...] = (
    (r"device_to_device_memcpy_\w+ ", "MSR004", "nvlink_copy", "one direction"),
    (r"device_to_device_bidirectional_memcpy_\w+ .*Total", "MSR004", "nvlink_copy", "both directions"),
    (r"(?:host_to_device|device_to_host)_memcpy_\w+ ", "MSR003", "host_to_device", "one direction"),
)
_FEW = 3  # a median of so few values says little


@dataclass
class Test:
    """One matrix of one test. `rows[i][j]` is None if not measured."""

    name: str
    title: str
    line: int | None
    status: str = ""
    rows: list[list[float | None]] = field(default_factory=list)
    total: float | None = None  # sum of all cells, as printed
    closed: bool = True


@dataclass(frozen=True)
class Bandwidths:
    """The whole run. `faults` are CUDA errors and data verification errors."""

    file: str
    devices: tuple[str, ...]
    tests: tuple[Test, ...]
    faults: tuple[tuple[int | None, str], ...]


def parse(lines: Lines, file: str) -> Bandwidths:
    """Parse the run. Raises ParseError if there is no test, or the JSON is incomplete."""
    devices: list[str] = []
    tests: list[Test] = []
    faults: list[tuple[int | None, str]] = []
    if '"nvbandwidth"' in lines.text:
        _from_json(read_json(lines, file), file, devices, tests, faults)
    name, columns = "", 0
    for number, line in lines if not tests else ():
        last = tests[-1] if tests else None
        if run := _RUN.fullmatch(line):
            name, columns = run["test"], 0
            tests.append(Test(name, "", number, closed=False))
        elif (device := _DEVICE.fullmatch(line)) and device["text"]:
            devices.append(device["name"])
        elif _FAULT.fullmatch(line):
            faults.append((number, line.strip()[:200]))
        elif (word := _WORD.fullmatch(line)) and not (last and last.rows and not last.closed):
            tests.append(Test(name, word["text"], number, word["status"].lower()))
        elif last is not None and _TITLE.fullmatch(line):
            # Bidirectional tests print several matrices, each with its own "SUM".
            tests.append(Test(name, line.strip(), number, closed=False))
            columns = 0
        elif last is not None and last.title and not columns and _HEAD.fullmatch(line):
            columns = len(line.split())
        elif last is not None and columns and not last.closed and (row := _ROW.fullmatch(line)):
            cells = row["cells"].split()
            if len(cells) != columns or int(row["row"]) != len(last.rows):
                continue
            last.rows.append([_number(c) for c in cells])
        elif last and last.rows and (match := _SUM.fullmatch(line)) and match["test"].startswith(last.name):
            last.closed = True
            last.total = _number(match["value"]) if match["what"] == "SUM" else last.total
        elif not _NOTE.fullmatch(line) and (last is not None or not _BESIDE.fullmatch(line)):
            continue
        lines.claim(number)
    # "Running ..." alone counts only if no result of that test follows.
    tests = [t for t in tests if t.rows or t.status or sum(o.name == t.name for o in tests) == 1]
    if not tests and not faults:
        raise ParseError("no nvbandwidth test in the output", file=file)
    return Bandwidths(file, tuple(devices), tuple(tests), tuple(faults))


def _number(cell: Any) -> float | None:
    text = str(cell)
    return float(text) if re.fullmatch(r"\d{1,12}(?:\.\d{1,9})?(?:e[+-]\d{1,2})?", text) else None


def _from_json(
    table: Any, file: str, devices: list[str], tests: list[Test], faults: list[tuple[int | None, str]]
) -> None:
    try:
        top = table["nvbandwidth"]
        cases = top.get("testcases") or []
        devices += [m["name"] for d in top.get("GPU Device list") or () if (m := _DEVICE.fullmatch(str(d)))]
        faults += [(None, str(e)[:200]) for e in [top.get("error"), *(t.get("error") for t in cases)] if e]
        for t in cases:
            rows = [[_number(c) for c in row] for row in t.get("bandwidth_matrix") or ()]
            title, total = str(t.get("bandwidth_description", "")), _number(t.get("sum"))
            tests.append(Test(str(t["name"]), title, None, str(t["status"]).lower(), rows, total))
    except (KeyError, TypeError, AttributeError) as error:
        raise ParseError(f"not the JSON of nvbandwidth: {error}"[:120], file=file) from None


def judge(run: Bandwidths, context: Context) -> list[Finding]:
    """Errors; then each matrix against the floor of the GPU model, else against its own median."""
    add = FindingCollector(run.file, context, "NOD022")
    for number, text in run.faults:
        add("FAIL", text, number)
    names = set(run.devices)
    sku = find_sku(names.pop()) if len(names) == 1 else find_sku(context.gpu)
    judged = 0
    for test in run.tests:
        if test.status in ("error", "not found"):
            text = f"{test.name}: {test.status} {test.title}"[:200]
            add("FAIL" if test.status == "error" else "UNJUDGED", text, test.line)
        elif test.rows and test.closed:
            judged += "latency" not in test.name and _matrix(add, test, sku)
        elif test.status != "waived":
            add("UNJUDGED", f"{test.name}: incomplete result, truncated", test.line, code="OUT002")
    if not judged and not add.found:
        add("UNJUDGED", "no bandwidth that could be judged", code="NCC002")
    return add.with_pass(f"copy tests judged: {judged}, none slow", code="NOD023")


def _matrix(add: FindingCollector, test: Test, sku: Sku | None) -> bool:
    """Report the slowest cell if it is too slow; returns whether the test could be judged."""
    between = test.name.startswith("device_to_device")
    rows = test.rows
    if between and test.line is None and len(rows) == 3 * len(rows[0]):
        # The JSON stacks the rows of both streams and puts their sum last.
        rows = rows[-len(rows[0]) :]
    pairs = [(v, i, j) for i, row in enumerate(rows) for j, v in enumerate(row) if not between or i != j]
    cells = [(v, i, j) for v, i, j in pairs if v is not None]
    if not cells:
        return False
    uneven = len({len(row) for row in rows}) > 1 or (between and len(rows) != len(rows[0]))
    off = 0.0 if test.total is None else abs(sum(v for v, _, _ in cells) - test.total)
    if uneven or off > 0.01 * len(cells):  # values are printed with two decimals
        text = f"{test.name}: the values do not match their sum"
        add("UNJUDGED", text, test.line, code="OUT002")
    if uneven:
        return False
    switched = sku is not None and sku.board == "switch"
    for _, i, j in [pair for pair in pairs if pair[0] is None][:1]:
        where = f"copies between GPU {i} and GPU {j}" if between else f"value of GPU {j}"
        text = f"{test.name}: no {where}, where others have some"
        add(
            "FAIL" if switched and between else "UNJUDGED",
            text,
            test.line,
            code="NOD023",
            target=_place(between, i, j),
        )
    low, i, j = min(cells)
    usual = median(v for v, _, _ in cells)
    text = f"{test.name}: {low:g} GB/s, the slowest of {len(cells)}; median {usual:g}"
    known = next((f for f in _FLOORS if re.match(f[0], f"{test.name} {test.title}")), None)
    _, code, what, direction = known or ("", "NOD023", None, "")
    floor = None if sku is None or what is None else sku.floor(what, direction=direction)
    slow = low < shares().broken * usual
    verdict: Verdict = "PASS"
    expected = Expected(usual, "GB/s", "median of the same test", direction)
    if low == 0:
        verdict = "FAIL"
    elif floor is not None and floor.verdict(low) != "PASS" and not test.name.endswith("_sm"):
        verdict, expected = floor.verdict(low), floor.expected()
    elif slow and (not between or switched):
        verdict = "FAIL" if known and low < usual / 2 else "WARN"
    elif slow or (floor is None and len(cells) < _FEW):
        verdict, text = "UNJUDGED", f"{text}; the required rate of these GPUs is unknown"
    if verdict != "PASS":
        at = _place(between, i, j)
        add(verdict, text, test.line, code=code, target=at, measured=low, expected=expected, median=usual)
    return verdict != "UNJUDGED"


def _place(between: bool, i: int, j: int) -> Target:
    return Target(gpu=i, peer=f"GPU {j}") if between else Target(gpu=j)


_BEGINS = (
    r"^nvbandwidth Version: |^Running (?:host|device|all|one|multinode)_\w+\.\s*$|^\s*{?\s*\"nvbandwidth\" ?:"
)
TOOLS: tuple[Tool[Bandwidths], ...] = (
    Tool("nvbandwidth", having(_BEGINS), parse, judge, first_line=re.compile(r"nvbandwidth Version: ")),
)
