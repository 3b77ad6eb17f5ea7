"""The JSON of perftest (--out_json): valid since mid-2023, before that with unquoted names and trailing commas.

It has no unit: whether a bandwidth is in Gb/s or MiB/s is derived from message rate x size. With `-a` it has only the
last size.
"""

from __future__ import annotations

import re
from typing import Any

from seatrial.check.outputs.perftest_run import Row, Run, Runs, consistent
from seatrial.check.outputs.tool import Lines, ParseError, read_json

_PAIR = re.compile(r'^\s*"?(?P<name>[A-Za-z][\w .*]*?)"?\s*:\s*(?P<value>"[^"]*"|[^\s,{}]+)\s*,\s*$')
_OPENS = re.compile(r'^\s*"?(?P<name>test_info|results)"?\s*:\s*\{\s*$')
_SETTINGS = {"Device": "device", "Number_of_qps": "number of qps", "Link_type": "link type"}
_TIMES = {"t_min": "min", "t_max": "max", "t_typical": "typical", "t_avg": "avg", "percentile_99": "99"}


def looks_like_json(text: str) -> bool:
    """Whether the text is perftest's JSON, complete or not."""
    start = text.lstrip()
    return start.startswith("{") and re.match(r'\{\s*"?test_info"?\s*:', start) is not None


def parse_json(lines: Lines, file: str) -> Runs:
    """Parse the single run. Raises ParseError if the test's description is missing; a missing result is damage."""
    document, damage = _document(lines, file)
    info, results = document.get("test_info"), document.get("results")
    if not isinstance(info, dict) or not info:
        raise ParseError("perftest's JSON without the test's description", file=file)
    test = str(info.get("test", ""))
    verb = test.replace("_Bidirectional", "").partition("_BW")[0].partition("_Latency")[0].strip("_")
    run = Run(
        kind="latency" if "Latency" in test else "bandwidth" if "BW" in test else "",
        line=1,
        verb=verb if ("Latency" in test or "BW" in test) else "",
        both_directions="Bidirectional" in test,
        settings={_SETTINGS.get(k, k.replace("_", " ").lower()): str(v) for k, v in info.items()},
        complete=not damage,
    )
    for problem in damage:
        run = run.with_damage(problem, None)
    if not run.kind:
        run = run.with_damage("the test's name is missing or unknown", 1)
    if run.device is None:
        run = run.with_damage("the device's name is missing", 1)
    row = _row(results, run.kind) if isinstance(results, dict) else None
    if row is None:
        return Runs(file, (run.with_damage("no result, or an incomplete one", None),))
    run = Run(**{**run.__dict__, "rows": (row,)})
    return Runs(file, (run if consistent(row) else run.with_damage("contradictory values", None),))


def _document(lines: Lines, file: str) -> tuple[dict[str, Any], list[str]]:
    """The two tables, and their damage other than missing quotation marks."""
    try:
        document = read_json(lines, file)
    except ParseError:
        return _unquoted(lines)
    return (document, []) if isinstance(document, dict) else ({}, ["not an object"])


def _unquoted(lines: Lines) -> tuple[dict[str, Any], list[str]]:
    document: dict[str, dict[str, Any]] = {}
    damage: list[str] = []
    depth, table = 0, None
    for number, line in lines:
        if opens := _OPENS.match(line):
            depth += 1
            table = document.setdefault(opens["name"], {})
        elif pair := _PAIR.match(line):
            if table is None:
                damage.append("a value outside of its table")
            elif pair["name"].strip() in table:
                damage.append("a duplicate name")
            else:
                table[pair["name"].strip()] = pair["value"].strip('"')
        elif line.strip() == "{":
            depth += 1
        elif line.strip().rstrip(",") == "}":
            depth -= 1
            table = None
        else:
            continue
        lines.claim(number)
    if depth:
        damage.append("brackets do not close: truncated")
    return document, damage


def _row(results: dict[str, Any], kind: str) -> Row | None:
    def number(name: str) -> float | None:
        try:
            value = float(str(results[name]))
        except (KeyError, ValueError):
            return None
        return value if 0 <= value < 1e15 else None

    size, iterations = number("MsgSize"), number("n_iterations")
    if size is None:
        return None
    if kind == "latency":
        times = {k: v for name, k in _TIMES.items() if (v := number(name)) is not None}
        if (last := number("percentile_99.9")) is not None:
            times["99.9"] = last
        return (
            Row(int(size), int(iterations or 0), None, None, 0.0, times, 1)
            if times.keys() & {"typical", "avg"}
            else None
        )
    average, rate = number("BW_average"), number("MsgRate")
    if average is None or rate is None:
        return None
    carried = rate * size * 8 / 1e3
    mib = 2**20 * 8 / 1e9
    # Gb/s with --report_gbits, else MiB/s: they differ by a factor of 119 and cannot be confused.
    factor = mib if abs(average * mib - carried) < abs(average - carried) else 1.0
    step = 0.5e-6 / rate + 0.005 / average if rate and average else 0.0
    return Row(int(size), int(iterations or 0), average * factor, rate, step, {}, 1)
