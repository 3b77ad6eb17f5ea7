"""JSON of `dcgmi diag -j`, DCGM 2 to 4: which tests failed, and which never ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.network import damaged
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, read_json
from seatrial.check.ranges import listed

_TOP = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
_CONFIG = 5  # DCGM_ERROR_CONFIG of dcgmErrorSeverity_enum, dcgm_errors.h
# DCGM before version 4 prints only the text, without a severity.
CONFIG_TEXT = re.compile(
    r"Persistence mode for GPU [0-9]+ is disabled|Found CUDA performance-limiting environment variable",
    re.IGNORECASE,
)
# Tests of drivers, libraries and settings: a pass says nothing about the hardware. Names of DCGM 4, then of 2 and 3.
_SOFT = frozenset(
    {
        "software", "denylist", "blacklist", "nvml library", "cuda main library", "cuda toolkit libraries", "permissions and os-related blocks", "permissions and os blocks",
        "persistence mode", "environmental variables", "environment variables", "page retirement/row remap", "graphics processes", "inforom", "fabric manager",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Result of one test on one GPU, or on all (`gpu` is None). `status` is in lower case without spaces."""

    test: str
    gpu: int | None
    status: str
    warnings: tuple[str, ...]
    config: bool  # whether all its warnings are about settings


@dataclass(frozen=True)
class Diagnostic:
    """The whole run."""

    file: str
    results: tuple[Result, ...]
    error: str | None  # why the whole run did not take place
    version: str | None
    damage: tuple[str, ...] = ()  # damaged parts


def matches(text: str) -> bool:
    """Whether the text is the JSON of dcgmi diag."""
    return any(f'"{top}"' in text[:5_000] for top in _TOP)


def parse(lines: Lines, file: str) -> Diagnostic:
    """Parse the JSON. Raises ParseError if it is incomplete or has another structure."""
    table = read_json(lines, file)
    top = next((table[k] for k in _TOP if isinstance(table, dict) and k in table), None)
    if not isinstance(top, dict):
        raise ParseError('there is no "DCGM Diagnostic" in the JSON', file=file)
    error_text = top.get("runtime_error") or top.get("error")
    results: list[Result] = []
    damage: list[str] = []
    for category in _list(top.get("test_categories") or [], "test_categories", file):
        # A damaged test does not invalidate the results of the others.
        try:
            tests = _list(_field(category, "tests", file) or [None], "tests", file)
        except ParseError as error:
            damage.append(error.diagnostics[0].message)
            continue
        for test in tests:
            try:
                results += _of_entry(test, str(category.get("category")), file)
            except ParseError as error:
                damage.append(error.diagnostics[0].message)
    version = next((v for v in (top.get("version"), table.get("metadata", {})) if v), None)
    if isinstance(version, dict):
        version = version.get("version")
    return Diagnostic(
        file,
        tuple(results),
        str(error_text) if error_text else None,
        str(version) if version else None,
        tuple(damage),
    )


def _of_entry(test: Any, category: str, file: str) -> list[Result]:
    """The results of one test. DCGM 3.1 writes null for a test, or a GPU, that was not run."""
    if test is None:
        # In the software category null is a test that DCGM itself abandoned (dcgmi/Diag.cpp, v3.1.8).
        absent = Result(f"a test of {category}", None, "notrun", ("no result",), False)
        return [] if category == "Deployment" else [absent]
    name = _field(test, "name", file)
    if not isinstance(name, str):
        raise ParseError("a test has no name", file=file)
    rows = _list(_field(test, "results", file) or [None], f"results of {name}", file)
    own = [result for row in rows for result in _results(name, row, file)]
    # DCGM 4 has a summary per test; a status found only there (an error of no single GPU) counts too.
    whole = test.get("test_summary")
    if isinstance(whole, dict) and "status" in whole:
        own += [r for r in _results(name, whole, file) if r.status not in {o.status for o in own}]
    return own


def _field(entry: Any, key: str, file: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise ParseError(f'"{key}" is missing in the JSON', file=file)
    return entry[key]


def _list(value: Any, what: str, file: str) -> list[Any]:
    if not isinstance(value, list):
        raise ParseError(f"{what} is not a list in the JSON", file=file)
    return value


def _results(name: str, row: Any, file: str) -> Iterator[Result]:
    if row is None:
        yield Result(name, None, "notrun", ("no result",), False)
        return
    status = _field(row, "status", file)
    if not isinstance(status, str):
        raise ParseError(f"the status of {name} is not text", file=file)
    texts, config = [], []
    entries = row.get("warnings") or []
    for entry in entries if isinstance(entries, list) else [entries]:
        text = str(entry.get("warning", entry) if isinstance(entry, dict) else entry)
        texts.append(" ".join("".join(c if c.isprintable() else " " for c in text[:300]).split()))
        severity = entry.get("error_severity") if isinstance(entry, dict) else None
        config.append(severity == _CONFIG if severity is not None else CONFIG_TEXT.search(text) is not None)
    status = re.sub(r"[\s_]", "", status.lower())
    status = "warn" if status == "pass" and texts else status
    for gpu in _gpus(row, texts):
        yield Result(name, gpu, status, tuple(texts), bool(config) and all(config))


def _gpus(row: dict[str, Any], texts: list[str]) -> list[int | None]:
    if row.get("entity_group") in ("GPU", None):
        found = row.get("entity_id", row.get("gpu_id", row.get("gpu_ids")))
        numbers = re.findall(r"[0-9]{1,3}", str(found)) if found is not None else []
        if numbers:
            return [int(n) for n in numbers]
    named = {int(n) for text in texts for n in re.findall(r"\bGPU ([0-9]{1,3})\b", text)}
    return list(named) if len(named) == 1 else [None]


def judge(run: Diagnostic, context: Context) -> list[Finding]:
    """One finding for each failed result, one for each test that did not run, one for each that passed everywhere."""
    add = FindingCollector(run.file, context, "DIA002")
    add.found += damaged([(text, None) for text in run.damage], run.file, "dcgmi diag")
    if run.error is not None:
        add("UNJUDGED", f"dcgmi diag did not run: {run.error[:200]}")
    for test in dict.fromkeys(r.test for r in run.results):
        _of_test(test, [r for r in run.results if r.test == test], add)
    hard = [r for r in run.results if r.test.lower() not in _SOFT and r.status not in ("skip", "notrun")]
    if not hard and run.error is None:
        add("UNJUDGED", "no hardware test was run, only tests of software and settings")
    return add.found


def _of_test(test: str, results: list[Result], add: FindingCollector) -> None:
    for status in dict.fromkeys(r.status for r in results):
        same = [r for r in results if r.status == status]
        gpus = sorted({r.gpu for r in same if r.gpu is not None})
        which = f" (GPU{'s' * (len(gpus) > 1)} {listed(gpus)})" if gpus else ""
        target = Target(gpu=gpus[0] if len(gpus) == 1 else None)
        if status in ("skip", "notrun"):
            add("UNJUDGED", f"{test}: {'skipped' if status == 'skip' else 'not run'}{which}", target=target)
        elif status == "fail":
            if settings := [r for r in same if r.config]:
                more = f" and {len(settings) - 1} like it" if len(settings) > 1 else ""
                add("WARN", f"{test}: {settings[0].warnings[0]}{more}", code="DIA003")
            for result in (r for r in same if not r.config):
                text = f"{test} failed: {'; '.join(result.warnings) or 'no reason given'}"
                add("FAIL", text, code="DIA001", target=Target(gpu=result.gpu))
        elif status == "warn":
            for result in same:
                text = f"{test}: {'; '.join(result.warnings) or 'warning without a reason'}"
                add("WARN", text, code="DIA001", target=Target(gpu=result.gpu))
        elif status != "pass":
            add("UNJUDGED", f"{test}: {status!r} is an unknown status{which}", target=target)
    if all(r.status == "pass" for r in results):
        add("PASS", f"{test} passed", code="DIA004")


def inventory(run: Diagnostic) -> dict[str, str | int | float]:
    """The version of DCGM and the tests of the suite."""
    found: dict[str, str | int | float] = {"diagnostics": listed(sorted({r.test for r in run.results}), 30)}
    if run.version is not None:
        found["DCGM"] = run.version
    return found


TOOLS: tuple[Tool[Diagnostic], ...] = (Tool("dcgmi diag -j", matches, parse, judge, inventory),)
