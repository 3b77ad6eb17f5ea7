"""Saved measurements: write a baseline, and compare later measurements with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from seatrial.base.atomic import json_text, write_output
from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import parse_json, read_named
from seatrial.check.judging.compare import HIGHER_IS_BETTER, LOWER_IS_BETTER, meaning
from seatrial.check.judging.findings import Direction, Expected, Finding, Target
from seatrial.check.judging.floors import judge_share
from seatrial.check.judging.report import Report

SCHEMA_VERSION = 1
_TARGET = ("node", "gpu", "pci", "link", "port", "peer")
_MEANING = ("code", "unit", "direction", "algorithm", "size_bytes")

_DIRECTIONS: tuple[Direction, ...] = ("one direction", "both directions")

Key = tuple[object, ...]


def save_baseline(report: Report, path: Path) -> int:
    """Write every measurement that did not fail and return how many. InputError if there is none to save."""
    entries = [
        {**dict(zip(_MEANING, key[:5], strict=True)), **asdict(finding.target), "value": value}
        for key, (finding, value) in _values(report).items()
        if finding.verdict != "FAIL"
    ]
    if not entries:
        raise InputError(
            "no measurement that could be saved as a baseline",
            hint="provide outputs that contain a bandwidth or a latency",
        )
    write_output(path, json_text({"schema_version": SCHEMA_VERSION, "values": entries}))
    return len(entries)


def compare_baseline(report: Report, path: Path) -> list[Finding]:
    """One finding per measurement of the baseline: as good, worse, or not measured now. InputError for a bad file."""
    kept = _load(path)
    now = _values(report)
    found = []
    for key, (target, value) in kept.items():
        unit, direction, algorithm = str(key[1]), key[2], str(key[3])
        size = key[4] if isinstance(key[4], int) else None
        sense: Direction = next((d for d in _DIRECTIONS if d == direction), "")
        expected = Expected(value, unit, f"baseline {path}", sense, algorithm, size)
        if key not in now:
            why = f"{key[0]} was {value:.4g} {unit} in the baseline and was not measured this time"
            found.append(Finding("CMP004", "UNJUDGED", target, why, expected=expected, why_unjudged=why))
            continue
        finding, measured = now[key]
        ratio = measured / value if unit in HIGHER_IS_BETTER else value / measured
        text = f"{measured:.4g} {unit}, {value:.4g} in the baseline ({key[0]})"
        verdict, places = judge_share(ratio), finding.evidence
        found.append(Finding("CMP004", verdict, target, text, measured, unit, expected, evidence=places))
    return found


def _values(report: Report) -> dict[Key, tuple[Finding, float]]:
    """Measurements by meaning and target; of several with the same key, the last."""
    return {key: (finding, value) for key, finding, value in _measured(report)}


def _measured(report: Report) -> Iterator[tuple[Key, Finding, float]]:
    for finding in report.findings:
        value = finding.measured
        if isinstance(value, str | bool) or value is None or finding.code.startswith("CMP") or not value > 0:
            continue
        if finding.unit in HIGHER_IS_BETTER + LOWER_IS_BETTER:
            yield (*meaning(finding), *asdict(finding.target).values()), finding, float(value)


def _load(path: Path) -> dict[Key, tuple[Target, float]]:
    hint = "a baseline is a file written by `seatrial check --save-baseline`"

    def bad(message: str) -> InputError:
        return InputError(Diagnostic(message, file=str(path), hint=hint))

    try:
        document: Any = parse_json(read_named(path))
    except OSError as error:
        raise bad(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise bad(f"not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema_version") != SCHEMA_VERSION:
        raise bad(f"not a baseline of version {SCHEMA_VERSION}")
    entries = document.get("values")
    if not isinstance(entries, list):
        raise bad("no list of values")
    kept: dict[Key, tuple[Target, float]] = {}
    for number, entry in enumerate(entries, 1):
        value = entry.get("value") if isinstance(entry, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise bad(f"value {number} is not a positive number")
        if (
            any(name not in entry for name in (*_MEANING, *_TARGET))
            or entry["unit"] not in HIGHER_IS_BETTER + LOWER_IS_BETTER
        ):
            raise bad(f"value {number} has no valid meaning")
        target = {name: entry[name] for name in _TARGET}
        if not all(
            v is None or isinstance(v, int if n in ("gpu", "link") else str) for n, v in target.items()
        ):
            raise bad(f"value {number} has no valid target")
        size = entry["size_bytes"]
        if not all(isinstance(entry[n], str) for n in _MEANING[:4]) or not (
            size is None or isinstance(size, int)
        ):
            raise bad(f"value {number} has no valid meaning")
        kept[(*(entry[n] for n in _MEANING), *target.values())] = (Target(**target), float(value))
    return kept
