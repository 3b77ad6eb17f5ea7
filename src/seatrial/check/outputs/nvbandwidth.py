"""nvbandwidth, as text and as JSON (-j): copies between GPUs, and between GPUs and the host.

Format: NVIDIA/nvbandwidth, output.cpp, inline_common.h and json_output.cpp. All its figures are of one direction, but the "Total" of
the bidirectional tests between GPUs (testcases_ce.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from seatrial.check.findings import Direction, Expected, Finding, Target, Verdict
from seatrial.check.floors import Floor, Sku, What, find_sku, shares
from seatrial.check.outputs.say import Say
from seatrial.check.tool import Context, Lines, ParseError, Tool, read_json

_RUN = re.compile(r"Running (?P<test>[a-z][a-z0-9_]+)\.\s*")
_WORD = re.compile(r"(?P<status>Waived|WAIVED|Error|ERROR|Not Found|Passed):? ?(?P<text>.*)")
_DEVICE = re.compile(
    r"(?:Device |Process \d+ \(.{1,120}\): device )?(?P<index>\d{1,3}): (?P<name>.{1,100}?) \([0-9a-f:.]{7,20}\)(?:: \(.*\))?\s*"
)
_TITLE = re.compile(
    r"(?:memcpy|memory|device|Host|Device).{0,80}\((?:GB/s|ns|nanoseconds)\)\s*", re.IGNORECASE
)
_HEAD = re.compile(r"\s+(?:\d+\s*)+")
_ROW = re.compile(r"\s*(?P<row>\d+)\s+(?P<cells>(?:(?:\d+(?:\.\d+)?(?:e\+\d+)?|N/A|-?nan|-?inf)\s*)+)")
_SUM = re.compile(r"(?:SUM|MIN|MAX|AVG|&&&& PERF) (?P<test>\w+) (?P<value>\S+)\s*")
_FAULT = re.compile(
    r"\[CUDA_ERROR_\w+\].*|NVML_ERROR: .*|ASSERT in expression .*|.*Invalid value when checking the pattern.*"
)
_BESIDE = re.compile(
    r"(?:nvbandwidth Version: .*|Built from Git version:.*|MPI version: .*|NOTE: .*|Performance can vary with .*|CUDA (?:Runtime|Driver) Version: \d+"
    r"|Driver Version: .*|[\w.-]{1,253})\s*"
)
# What a test is held to: its floor, and the direction of that.
_FLOORS: tuple[tuple[str, str, What, Direction], ...] = (
    (r"device_to_device_memcpy_(?:read|write)_(?:ce|sm)", "", "nvlink_copy", "one direction"),
    (
        r"device_to_device_bidirectional_memcpy_(?:read|write)_(?:ce|sm)",
        "Total",
        "nvlink_copy",
        "both directions",
    ),
    (r"(?:host_to_device|device_to_host)_memcpy_(?:ce|sm)", "", "host_to_device", "one direction"),
)
_FEW = 3  # values whose median says little
_CODES: dict[What, str] = {"nvlink_copy": "MSR004", "host_to_device": "MSR003"}


@dataclass
class Test:
    """One matrix of one test. `rows[i][j]` is None where nothing was measured."""

    name: str
    title: str
    line: int | None
    status: str = ""
    columns: int = 0
    rows: list[list[float | None]] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True)
class Bandwidths:
    """The whole run. `faults` are errors of CUDA, and data that did not arrive."""

    file: str
    devices: tuple[str, ...]
    tests: tuple[Test, ...]
    faults: tuple[tuple[int | None, str], ...]


def matches(text: str) -> bool:
    """Its version, its JSON, or a test of its that runs."""
    return (
        re.search(
            r"^nvbandwidth Version: |^Running (?:host|device|all|one|multinode)_\w+\.\s*$|^\s*\"nvbandwidth\" ?:",
            text,
            re.M,
        )
        is not None
    )


def parse(lines: Lines, file: str) -> Bandwidths:
    """Raises ParseError where no test is in it, or the JSON is not whole."""
    if '"nvbandwidth"' in lines.text and (table := read_json(lines, file)):
        return _from_json(table, file)
    devices: list[str] = []
    tests: list[Test] = []
    faults: list[tuple[int | None, str]] = []
    name = ""
    for number, line in lines:
        last = tests[-1] if tests else None
        if run := _RUN.fullmatch(line):
            name = run["test"]
            tests.append(Test(name, "", number))
        elif device := _DEVICE.fullmatch(line):
            devices.append(device["name"])
        elif _FAULT.fullmatch(line):
            faults.append((number, line.strip()[:200]))
        elif (word := _WORD.fullmatch(line)) and not (last and last.rows and not last.closed):
            tests.append(Test(name, word["text"], number, word["status"].lower(), closed=True))
        elif _TITLE.fullmatch(line) and last is not None:
            # A test of both directions has several matrices, and one "SUM" below each.
            tests.append(Test(name, line.strip(), number))
        elif last is not None and last.title and not last.columns and _HEAD.fullmatch(line):
            last.columns = len(line.split())
        elif last is not None and last.columns and not last.closed and (row := _ROW.fullmatch(line)):
            cells = row["cells"].split()
            if len(cells) != last.columns or int(row["row"]) != len(last.rows):
                continue
            last.rows.append([_number(c) for c in cells])
        elif (
            last is not None and last.rows and (total := _SUM.fullmatch(line)) and total["test"] == last.name
        ):
            last.closed = True
        elif not _BESIDE.fullmatch(line) or (
            last is not None and not line.startswith(("NOTE", "Performance"))
        ):
            continue
        lines.claim(number)
    tests = [
        t for t in tests if t.rows or t.status or not any(o.name == t.name and o is not t for o in tests)
    ]
    if not tests and not faults:
        raise ParseError("no test of nvbandwidth in it", file=file)
    return Bandwidths(file, tuple(devices), tuple(tests), tuple(faults))


def _number(cell: Any) -> float | None:
    text = str(cell)
    return float(text) if re.fullmatch(r"\d{1,12}(?:\.\d{1,9})?(?:e[+-]\d{1,2})?", text) else None


def _from_json(table: Any, file: str) -> Bandwidths:
    try:
        top = table["nvbandwidth"]
        devices = tuple(
            m["name"] for d in top.get("GPU Device list") or () if (m := _DEVICE.fullmatch(str(d)))
        )
        tests = [
            Test(
                str(t["name"]),
                str(t.get("bandwidth_description", "")),
                None,
                str(t["status"]).lower(),
                0,
                [[_number(c) for c in row] for row in t.get("bandwidth_matrix") or ()],
                True,
            )
            for t in top.get("testcases") or ()
        ]
        faults = [
            (None, str(e)[:200])
            for e in [top.get("error"), *(t.get("error") for t in top.get("testcases") or ())]
            if e
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ParseError(f"not the JSON of nvbandwidth: {error}"[:120], file=file) from None
    if not tests and not faults:
        raise ParseError("no test of nvbandwidth in it", file=file)
    return Bandwidths(file, devices, tuple(tests), tuple(faults))


def judge(run: Bandwidths, context: Context) -> list[Finding]:
    """Errors, then each matrix by the floor of the GPUs, else by its own median."""
    say = Say(run.file, context)
    for number, text in run.faults:
        say("NOD022", "FAIL", text, number)
    names = set(run.devices)
    sku = find_sku(names.pop()) if len(names) == 1 else find_sku(context.gpu)
    judged = 0
    for test in run.tests:
        if test.status in ("error", "not found"):
            say(
                "NOD022",
                "FAIL" if test.status == "error" else "UNJUDGED",
                f"{test.name}: {test.status} {test.title}"[:200],
                test.line,
            )
        elif not test.rows or not test.closed:
            if test.status != "waived":
                say(
                    "OUT002",
                    "UNJUDGED",
                    f"{test.name}: no whole result, it did not end or is cut off",
                    test.line,
                )
        elif "latency" not in test.name:
            judged += _matrix(say, test, sku)
    if not judged and not say.found:
        say("NCC002", "UNJUDGED", "no bandwidth in it that could be judged")
    return say.all_well("NOD023", f"{judged} tests of copies, none slow")


def _matrix(say: Say, test: Test, sku: Sku | None) -> bool:
    """A finding about the slowest cell where it is not well; whether the test could be judged."""
    known = next(
        ((w, d) for p, title, w, d in _FLOORS if re.fullmatch(p, test.name) and title in test.title), None
    )
    between = test.name.startswith("device_to_device")
    # The JSON has what both streams read one below the other, their sum last.
    rows: Sequence[list[float | None]] = (
        test.rows[-len(test.rows) // 3 :]
        if between and "Total" in test.title and test.line is None
        else test.rows
    )
    cells = [
        (v, i, j)
        for i, row in enumerate(rows)
        for j, v in enumerate(row)
        if v is not None and not (between and i == j)
    ]
    if not cells:
        return False
    low, i, j = min(cells)
    usual = median(v for v, _, _ in cells)
    what, direction = known or (None, "")
    floor: Floor | None = None if sku is None or what is None else sku.floor(what, direction=direction)
    code = _CODES.get(what, "NOD023") if what is not None else "NOD023"
    target = Target(gpu=i, peer=f"GPU {j}") if between else Target(gpu=j)
    text = f"{test.name}: {low:g} GB/s, the slowest of {len(cells)}; {usual:g} in the middle"
    slow = low < shares().broken * usual
    verdict: Verdict = "PASS"
    expected = None
    if low == 0:
        verdict = "FAIL"
    elif floor is not None and floor.verdict(low) != "PASS" and not test.name.endswith("_sm"):
        verdict, expected = floor.verdict(low), floor.expected()
    elif slow and (not between or (sku is not None and sku.board == "switch")):
        verdict = "FAIL" if what is not None and low < usual / 2 else "WARN"
        expected = Expected(usual, "GB/s", "median of the same test", direction)
    elif slow or (floor is None and len(cells) < _FEW):
        verdict, text = "UNJUDGED", f"{text}; what these GPUs must reach is not known"
    if verdict != "PASS":
        say(
            code,
            verdict,
            text,
            test.line,
            target=target,
            measured=low,
            unit="GB/s",
            expected=expected,
            median=usual,
        )
    return verdict != "UNJUDGED"


TOOLS: tuple[Tool[Bandwidths], ...] = (
    Tool("nvbandwidth", matches, parse, judge, begins=re.compile(r"nvbandwidth Version: ")),
)
