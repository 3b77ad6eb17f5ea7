"""Outputs of AMD's tools for its GPUs: `amd-smi` (its table; `metric`, `bad-pages`, `static`, `list` as text or --json) and `rocm-smi`.

Formats: ROCm/amdsmi, amdsmi_cli/amdsmi_commands.py and CHANGELOG.md; ROCm/rocm_smi_lib, python_smi_tools/rocm_smi.py.
Of what they say memory errors, bad pages, the PCIe link, throttling and lost GPUs are judged, the rest is told to be there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from seatrial.check.findings import Finding, Target, Verdict
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.say import Say
from seatrial.check.tool import Context, Lines, ParseError, Tool, read_json

_GPU = re.compile(r"GPU: (?P<index>\d{1,3})\s*")
_FIELD = re.compile(r"(?P<indent>\s+)(?P<key>[A-Z][A-Z0-9_ ]{0,60}): ?(?P<value>.*?)\s*")
_MORE = re.compile(r"\s{8,}\S.*[\],]\s*")  # a list that goes on in the next line
_TABLE = re.compile(
    r"\| (?P<pci>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]) +(?P<name>\S.*?) *\| +(?:N/A|\d+ %) +(?:N/A|\d+ .C) +(?P<ue>N/A|\d+) +\S+ W *\|\s*"
)
_SECOND = re.compile(r"\| +(?P<index>\d{1,3}) +(?:N/A|\d+) +(?:N/A|\d+) +\S+ *\|.*\|\s*")
_FRAME = re.compile(
    r"[|+][-=+|]+[|+]\s*|\| (?:AMD-SMI |VBIOS version|Platform: |BDF +GPU-Name|GPU +HIP-ID|Processes:| *GPU +PID| *No running processes|  ?\d+ +\d+ ).*\|\s*"
)
_CONCISE = re.compile(
    r"(?P<index>\d{1,3})\s+(?:\d+\s+0x[0-9a-f]+,\s+\d+\s+)?(?:-?\d+(?:\.\d+)?[\W_]?[cC]|N/A)\s.*\S\s*"
)
_ROCM = re.compile(r"GPU\[(?P<index>\d{1,3})\]\s*: (?P<key>[^:]{1,80}): *(?P<value>.*?)\s*")
_HEADS = re.compile(
    r"=+ ?.{0,60}? ?=+\s*|(?:Device|GPU) +(?:Node|DID|Temp).*|\s+\(DID,.*|\s+GUID\).*|WARNING: AMD GPU device\(s\) is/are in a low-power state\. .*"
)
_LOST = re.compile(
    r"(?:Unable to (?:get|open|initialize)|ERROR: ?(?:root|No AMD GPUs|GPU\[)|AMDSMI_STATUS_\w+|RSMI_STATUS_\w+|Exception caught: ).*",
    re.IGNORECASE,
)
# Name of a value, by its end -> verdict where it is more than zero, or one of these words.
_RULES: tuple[tuple[str, str, Verdict, str], ...] = (
    (r"(?:^|\.)(?:total|cache|\w+)?_?uncorrectable_count$|^uncorrectable error count$|^ue$", "GPU003", "FAIL", "uncorrectable memory errors"),
    (r"(?:^|\.)deferred_count$|(?:^|\.)total_deferred_count$", "GPU003", "WARN", "deferred memory errors"),
    (r"^bad_pages?\.(?:pending|un_res)|^(?:pending|un_res)\b", "GPU005", "WARN", "bad memory pages that wait for a reset"),
    (r"(?:^|\.)\w+_violation_status$|(?:^|\.)throttle_status$", "GPU007", "WARN", "held down"),
    (r"(?:^|\.)xgmi_err$|^xgmi error count$|xgmi error$", "NVL003", "WARN", "errors on links between GPUs"),
)  # fmt: skip
_BAD_WORDS = (
    "ACTIVE",
    "THROTTLED",
    "ERROR",
    "AMDSMI_XGMI_STATUS_ERROR",
    "AMDSMI_XGMI_STATUS_MULTIPLE_ERRORS",
)
_GOOD_WORDS = (
    "N/A",
    "NOT ACTIVE",
    "UNTHROTTLED",
    "NONE",
    "NO BAD PAGES FOUND.",
    "NO ERROR",
    "AMDSMI_XGMI_STATUS_NO_ERRORS",
    "",
    "NULL",
)


@dataclass
class Gpu:
    """One GPU: name of a value in small letters, with the sections around it -> what it says, and its line."""

    index: int
    line: int | None
    values: dict[str, tuple[str, int | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Gpus:
    """All GPUs of one output; `faults` are lines in which the tool says that it could not ask one. `torn`: it does not end."""

    tool: str
    file: str
    gpus: tuple[Gpu, ...]
    faults: tuple[tuple[int, str], ...] = ()
    torn: str = ""


def _is_amd(text: str) -> bool:
    return (
        re.search(
            r"^\| AMD-SMI |^GPU: \d+\s*\n\s+[A-Z][A-Z0-9_]+:|\"gpu\": ?\d+,\s*\"(?:ecc|asic|uuid|bdf|power|usage|pcie|clock|temperature|throttle|retired|pending|un_res|bus|vbios|driver|board)\"",
            text,
            re.M,
        )
        is not None
    )


def _is_rocm(text: str) -> bool:
    return "ROCm System Management Interface" in text or "End of ROCm SMI Log" in text


def parse_amd(lines: Lines, file: str) -> Gpus:
    """amd-smi. Raises ParseError where no GPU is in it, or the JSON is not whole."""
    if re.match(r"\s*[\[{]", lines.text):
        return _from_json(read_json(lines, file), file)
    gpus: list[Gpu] = []
    faults: list[tuple[int, str]] = []
    stack: list[tuple[int, str]] = []
    pending: tuple[str, str] | None = None
    table = False
    for number, line in lines:
        if gpu := _GPU.fullmatch(line):
            gpus.append(Gpu(int(gpu["index"]), number))
            stack = []
        elif gpus and not table and (said := _FIELD.fullmatch(line)):
            indent = len(said["indent"])
            while stack and stack[-1][0] >= indent:
                stack.pop()
            stack.append((indent, said["key"].lower()))
            gpus[-1].values.setdefault(".".join(key for _, key in stack), (said["value"], number))
        elif first := _TABLE.fullmatch(line):
            pending, table = (first["name"], first["ue"]), True
        elif pending is not None and (second := _SECOND.fullmatch(line)):
            gpus.append(
                Gpu(
                    int(second["index"]),
                    number,
                    {"market_name": (pending[0], number), "ue": (pending[1], number)},
                )
            )
            pending = None
        elif _LOST.match(line):
            faults.append((number, line.strip()[:200]))
        elif not _FRAME.fullmatch(line) and not (gpus and not table and _MORE.fullmatch(line)):
            continue
        lines.claim(number)
    if not gpus and not faults:
        raise ParseError("no GPU in it", file=file)
    rules = lines.text.count(
        "+------------------------------------------------------------------------------+"
    )
    torn = (
        "the table is not whole: cut off"
        if (table or "| AMD-SMI " in lines.text) and (pending is not None or rules < 2)
        else ""
    )
    return Gpus("amd-smi", file, tuple(gpus), tuple(faults), torn)


def _from_json(table: Any, file: str) -> Gpus:
    entries = table.get("gpu_data", [table]) if isinstance(table, dict) else table
    gpus = []
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("gpu"), int):
            gpus.append(Gpu(entry["gpu"], None, {k: (v, None) for k, v in _flat("", entry) if k != "gpu"}))
    if not gpus:
        raise ParseError("no GPU in the JSON", file=file)
    return Gpus("amd-smi", file, tuple(gpus))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and "value" not in value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}".strip(".").lower(), inner)
    else:
        yield path, str(value["value"] if isinstance(value, dict) else value)


def parse_rocm(lines: Lines, file: str) -> Gpus:
    """rocm-smi. Raises ParseError where no GPU is in it."""
    gpus: dict[int, Gpu] = {}
    faults: list[tuple[int, str]] = []
    for number, line in lines:
        if said := _ROCM.fullmatch(line):
            gpu = gpus.setdefault(int(said["index"]), Gpu(int(said["index"]), number))
            gpu.values.setdefault(said["key"].strip().lower(), (said["value"], number))
        elif row := _CONCISE.fullmatch(line):
            gpus.setdefault(int(row["index"]), Gpu(int(row["index"]), number)).values["row"] = (
                line.strip(),
                number,
            )
        elif _LOST.match(line):
            faults.append((number, line.strip()[:200]))
        elif not _HEADS.fullmatch(line):
            continue
        lines.claim(number)
    if not gpus and not faults:
        raise ParseError("no GPU in it", file=file)
    torn = "" if "End of ROCm SMI Log" in lines.text else "its closing line is missing: cut off"
    return Gpus("rocm-smi", file, tuple(gpus.values()), tuple(faults), torn)


def judge(output: Gpus, context: Context) -> list[Finding]:
    """What each GPU says that is wrong; UNJUDGED for what is cut off and for values that are not known."""
    say = Say(output.file, context)
    for number, text in output.faults:
        say(
            "GPU002", "FAIL" if re.search(r"GPU\[|device|NO_DATA|BUSY|IO", text) else "UNJUDGED", text, number
        )
    if output.torn:
        say("OUT002", "UNJUDGED", f"{output.tool}: {output.torn}")
    say.found += count_findings([g.index for g in output.gpus], None, context, (output.file,))
    for gpu in output.gpus:
        target = Target(gpu=gpu.index)
        for name, (value, line) in gpu.values.items():
            rule = next((r for r in _RULES if re.search(r[0], name)), None)
            if rule is None or value.upper() in _GOOD_WORDS or re.fullmatch(r"0(?: \S+)?", value):
                continue
            bad = (
                re.match(r"[1-9]\d{0,15}\b", value) is not None
                or value.upper() in _BAD_WORDS
                or name.startswith(("bad_page", "pending", "un_res"))
            )
            what = f"{rule[3]}: {name.rpartition('.')[2].replace('_', ' ')} {value}"[:200]
            say(rule[1], rule[2] if bad else "UNJUDGED", what, line, target=target, measured=value[:40])
        _row(say, gpu, target)
    if not any(g.values for g in output.gpus) and not say.found:
        say("GPU011", "UNJUDGED", f"{output.tool} says nothing of its GPUs here")
    return say.all_well(
        "GPU011", f"{len(output.gpus)} GPUs answer, nothing wrong in what {output.tool} says of them"
    )


def _row(say: Say, gpu: Gpu, target: Target) -> None:
    """A line of rocm-smi's table: a GPU that has no temperature, no clock and no power cap was not asked in vain."""
    row, line = gpu.values.get("row", ("", None))
    if row and re.search(r"\bN/A\s+N/A\b", row) and re.search(r"\bunknown\b|Unsupported|\bNone\b", row):
        text = (
            "neither temperature nor power nor clock can be read: in a low-power state, or it does not answer"
        )
        say("GPU002", "UNJUDGED", text, line, target=target)


TOOLS: tuple[Tool[Gpus], ...] = (
    Tool("amd-smi", _is_amd, parse_amd, judge),
    Tool("rocm-smi", _is_rocm, parse_rocm, judge),
)
