"""Output of AMD's GPU tools: `amd-smi` (table; `metric`, `bad-pages`, `static`, `list` as text or --json), `rocm-smi`.

Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py and CHANGELOG.md; ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py.
Judges memory errors, bad pages, throttling, XGMI and lost GPUs; other values only show that the GPU answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from seatrial.check.judging.findings import Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, read_json
from seatrial.check.ranges import listed

_GPU = re.compile(r"GPU: (?P<index>\d{1,3})\s*")
_FIELD = re.compile(r"(?P<indent>\s+)(?P<key>[A-Z][A-Z0-9_ ]{0,60}): ?(?P<value>.*?)\s*")
_MORE = re.compile(r"\s{8,}\S.*[\],]\s*")  # continuation line of a list
# A GPU has two table rows: name and errors, then its index.
_TABLE = re.compile(
    r"\| [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f] +\S.*? *\| +(?:N/A|\d+ %) +(?:N/A|\d+ .C) +(?P<ue>N/A|\d+) +\S+ W *\|\s*"
)
_SECOND = re.compile(r"\| +(?P<index>\d{1,3}) +(?:N/A|\d+) +(?:N/A|\d+) +\S+ *\|.*\|\s*")
_RULE = re.compile(r"\+-{70,}\+\s*")
_FRAME = re.compile(
    r"[|+][-=+|]+[|+]\s*|\| (?:AMD-SMI |VBIOS version|Platform: |BDF +GPU-Name|GPU +HIP-ID|Processes:| *GPU +PID| *No running processes|  ?\d+ +\d+ ).*\|\s*"
)
_CONCISE = re.compile(
    r"(?P<index>\d{1,3})\s+(?:\d+\s+0x[0-9a-f]+,\s+\d+\s+)?(?:-?\d+(?:\.\d+)?[\W_]?[cC]|N/A)\s.*\S\s*"
)
_COLUMNS = re.compile(r"(?:Device|GPU) +(?:Node|DID|Temp).*")
_ROCM = re.compile(r"GPU\[(?P<index>\d{1,3})\]\s*: (?P<key>[^:]{1,80}): *(?P<value>.*?)\s*")
_HEADS = re.compile(
    r"=+ ?.{0,60}? ?=+\s*|\s+\(DID,.*|\s+GUID\).*|WARNING: AMD GPU device\(s\) is/are in a low-power state\. .*"
)
_LOST = re.compile(
    r"(?i:Unable to (?:get|open|initialize)|ERROR: ?(?:root|No AMD GPUs|GPU\[)|AMDSMI_STATUS_\w+|RSMI_STATUS_\w+|Exception caught: ).*"
)
# (pattern of the field name, code, verdict for a count above zero or a word of _BAD, text)
_RULES: tuple[tuple[str, str, Verdict, str], ...] = (
    (r"(?:^|\.)(?:total|cache|\w+)?_?uncorrectable_count$|^uncorrectable error count$|^ue$", "GPU003", "FAIL", "uncorrectable memory errors"),
    (r"(?:^|\.)(?:total_)?deferred_count$", "GPU003", "WARN", "deferred memory errors"),
    (r"^bad_pages?\.(?:pending|un_res)|^(?:pending|un_res)\b", "GPU005", "WARN", "bad memory pages that wait for a reset"),
    (r"(?:^|\.)\w+_violation_status$|(?:^|\.)throttle_status$", "GPU007", "WARN", "throttled"),
    (r"(?:^|\.)xgmi_err$|xgmi error(?: count)?$", "NVL003", "WARN", "errors on links between GPUs"),
)  # fmt: skip
_BAD = re.compile(r"[1-9]\d{0,15}\b.*|ACTIVE|THROTTLED|ERROR|AMDSMI_XGMI_STATUS_(?:MULTIPLE_)?ERRORS?")
_NOTHING = ("N/A", "NULL", "NONE", "")
_GOOD = re.compile(
    r"0(?: \S+)?|NOT ACTIVE|UNTHROTTLED|NO BAD PAGES FOUND\.|NO ERROR|AMDSMI_XGMI_STATUS_NO_ERRORS"
)


@dataclass
class Gpu:
    """One GPU: dotted lower-case field name, including its sections -> value and line."""

    index: int
    line: int | None
    values: dict[str, tuple[str, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpus:
    """All GPUs of one output. `faults`: lines that report a failed query. `truncated`: the end of the output is missing."""

    tool: str
    file: str
    gpus: tuple[Gpu, ...]
    faults: tuple[tuple[int, str], ...] = ()
    torn: bool = False


def parse_amd(lines: Lines, file: str) -> Gpus:
    """Parse amd-smi. Raises ParseError if there is no GPU, or the JSON is incomplete."""
    if re.match(r"\s*[\[{]", lines.text):
        return _from_json(read_json(lines, file), file, "amd-smi")
    gpus: list[Gpu] = []
    faults: list[tuple[int, str]] = []
    stack: list[tuple[int, str]] = []
    errors: str | None = None  # of the GPU whose second row comes next
    rules = 0
    for number, line in lines:
        if gpu := _GPU.fullmatch(line):
            gpus.append(Gpu(int(gpu["index"]), number))
            stack = []
        elif gpus and not rules and (match := _FIELD.fullmatch(line)):
            while stack and stack[-1][0] >= len(match["indent"]):
                stack.pop()
            stack.append((len(match["indent"]), match["key"].lower()))
            name = ".".join(key for _, key in stack)
            if name in gpus[-1].values and _rule(name):
                continue  # belongs to another GPU whose header is missing
            gpus[-1].values[name] = (match["value"], number)
        elif first := _TABLE.fullmatch(line):
            errors = first["ue"]
        elif errors is not None and (second := _SECOND.fullmatch(line)):
            gpus.append(Gpu(int(second["index"]), number, {"ue": (errors, number)}))
            errors = None
        elif _LOST.match(line):
            faults.append((number, line.strip()[:200]))
        elif _RULE.fullmatch(line):
            rules += 1
        elif not _FRAME.fullmatch(line) and not (gpus and not rules and _MORE.fullmatch(line)):
            continue
        lines.claim(number)
    if not gpus and not faults:
        raise ParseError("no GPU in the output", file=file)
    table = rules > 0 or any("ue" in g.values for g in gpus)
    return Gpus("amd-smi", file, tuple(gpus), tuple(faults), table and (errors is not None or rules < 2))


def _from_json(table: Any, file: str, tool: str) -> Gpus:
    entries = table.get("gpu_data", [table]) if isinstance(table, dict) else table
    gpus: list[Gpu] = []
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not re.fullmatch(r"\d{1,3}", str(entry.get("gpu"))):
            raise ParseError(f"entry {len(gpus) + 1} of the JSON is not a GPU", file=file)
        gpus.append(Gpu(int(entry["gpu"]), None, {k: (v, None) for k, v in _flat("", entry) if k != "gpu"}))
    if not gpus:
        raise ParseError("no GPU in the JSON", file=file)
    return Gpus(tool, file, tuple(gpus))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and "value" not in value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}".strip(".").lower(), inner)
    else:
        yield path, str(value["value"] if isinstance(value, dict) else value)


def parse_rocm(lines: Lines, file: str) -> Gpus:
    """Parse rocm-smi. Raises ParseError if there is no GPU, or the JSON is incomplete."""
    if lines.text.lstrip().startswith("{"):
        cards = read_json(lines, file)
        entries = [{"gpu": k[4:]} | v for k, v in cards.items() if k != "system" and isinstance(v, dict)]
        return _from_json(entries, file, "rocm-smi")
    gpus: dict[int, Gpu] = {}
    faults: list[tuple[int, str]] = []
    columns = False
    for number, line in lines:
        if found := _ROCM.fullmatch(line) or (_CONCISE.fullmatch(line) if columns else None):
            values = {"key": "row", "value": line} | found.groupdict()
            gpu = gpus.setdefault(int(values["index"]), Gpu(int(values["index"]), number))
            gpu.values.setdefault(values["key"].strip().lower(), (values["value"], number))
        elif _LOST.match(line):
            faults.append((number, line.strip()[:200]))
        elif _COLUMNS.fullmatch(line):
            columns = True
        elif not _HEADS.fullmatch(line):
            continue
        lines.claim(number)
    if not gpus and not faults:
        raise ParseError("no GPU in the output", file=file)
    torn = "End of ROCm SMI Log" not in lines.text
    return Gpus("rocm-smi", file, tuple(gpus.values()), tuple(faults), torn)


def _rule(name: str) -> tuple[str, str, Verdict, str] | None:
    return next((rule for rule in _RULES if re.search(rule[0], name)), None)


def judge(output: Gpus, context: Context) -> list[Finding]:
    """Faults of each GPU; UNJUDGED for cut-off output and unknown values."""
    add = FindingCollector(output.file, context, "GPU011")
    for number, text in output.faults:
        lost = re.search(r"GPU\[|device|NO_DATA|BUSY|IO", text) is not None
        add("FAIL" if lost else "UNJUDGED", text, number, code="GPU002")
    if output.torn:
        add("UNJUDGED", f"{output.tool}: its last line is missing: truncated", code="OUT002")
    add.found += count_findings([g.index for g in output.gpus], None, context, (output.file,))
    seen = {n for g in output.gpus for n, (value, _) in g.values.items() if _rule(n) and value[:1].isdigit()}
    for gpu in output.gpus:
        target = Target(gpu=gpu.index)
        for name, (value, line) in gpu.values.items():
            rule, word = _rule(name), value.upper()
            if rule is None or word in _NOTHING or _GOOD.fullmatch(word):
                continue
            bad = _BAD.fullmatch(word) or rule[0].startswith("^bad_page")
            what = f"{rule[3]}: {name.rpartition('.')[2].replace('_', ' ')} {value}"[:200]
            add(rule[2] if bad else "UNJUDGED", what, line, code=rule[1], target=target, measured=value[:40])
        # In cut-off output the last GPU has fewer values than those before it.
        silent = {n for n in seen if gpu.values.get(n, ("", 0))[0].upper() in _NOTHING}
        silent = silent or {n for n in output.gpus[0].values if "process" not in n} - gpu.values.keys()
        if silent:
            add("UNJUDGED", f"no {min(silent)}, which other GPUs here have", gpu.line, target=target)
        row, line = gpu.values.get("row", ("", None))
        if re.search(r"\bN/A\s+N/A\b", row) and re.search(r"\bunknown\b|Unsupported|\bNone\b", row):
            text = (
                "neither temperature nor power nor clock can be read: in a low-power state, or not responding"
            )
            add("UNJUDGED", text, line, code="GPU002", target=target)
    if not any(value for g in output.gpus for value, _ in g.values.values()) and not add.found:
        add("UNJUDGED", f"{output.tool} reports nothing about its GPUs here")
    named = listed(sorted(g.index for g in output.gpus))
    return add.with_pass(f"GPU {named}: no faults reported by {output.tool}")


def inventory(output: Gpus) -> dict[str, str | int | float]:
    """The number of GPUs."""
    return {"GPUs": len(output.gpus)} if output.gpus else {}


_KEYS = "ecc|asic|uuid|bdf|power|usage|pcie|clock|temperature|throttle|retired|pending|un_res|bus|vbios|driver|board"
_AMD = having(rf"^\| AMD-SMI |^GPU: \d+\s*\n\s+[A-Z][A-Z0-9_]+:|\"gpu\": ?\d+,\s*\"(?:{_KEYS})\"")
_IS_ROCM = having(r"= ?ROCm System Management Interface ?=|End of ROCm SMI Log|\A\s*{\s*\"card\d+\": ?{")
TOOLS = (
    Tool("amd-smi", _AMD, parse_amd, judge, inventory),
    Tool("rocm-smi", _IS_ROCM, parse_rocm, judge, inventory),
)
