"""gpu_burn: whether each GPU computed correctly under full load, and as fast as the others.

Format: wilicc/gpu-burn, gpu_burn-drv.cpp. The progress line is overwritten with carriage returns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from statistics import median

from seatrial.check.judging.findings import Expected, Finding, Target
from seatrial.check.judging.floors import find_sku, judge_share
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.gpu_count import count_findings
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed

_GPU = re.compile(r"GPU (?P<index>\d{1,3}): (?P<name>.{1,120}?) \(UUID: [^)]{1,80}\)\s*")
_PROGRESS = re.compile(
    r"(?P<share>\d{1,3}\.\d)% +proc'd: (?P<done>[^a-z]*(?:Gflop/s[^a-z]*)+) +errors: (?P<errors>[\d\s()!A-Z-]+?) +temps: (?P<temps>[\d\sC-]+)"
)
_RESULT = re.compile(r"\s*GPU (?P<index>\d{1,3}): (?P<word>OK|FAULTY)\s*")
_TESTED = re.compile(r"Tested (?P<count>\d{1,3}) GPUs:\s*")
_FATAL = re.compile(
    r"No clients are alive!  Aborting|No CUDA devices|Couldn't init (?:CUDA|a GPU test): .*|Failure during compute: .*"
)
_BESIDE = re.compile(
    r"\s*(?:Using compare file: .*|Burning for \d+ seconds\.?|Summary at: .*|Killing processes.*|Freed memory for dev \d+|Uninitted cublas|done"
    r"|Run length not specified in the command line\. .*|Initialized device \d+ with \d+ MB of memory .*|Results are \d+ bytes each.*)\s*"
)
_WHOLE = 99.0  # percent from which a run counts as complete: the last progress line is not always printed


@dataclass
class Burn:
    """The whole run. `rates` are the Gflop/s of each progress line, by GPU."""

    file: str
    names: dict[int, str] = field(default_factory=dict)
    rates: list[list[float]] = field(default_factory=list)
    share: float = 0.0
    errors: dict[int, int] = field(default_factory=dict)  # GPU -> line that reports errors or its death
    results: dict[int, tuple[bool, int]] = field(default_factory=dict)  # GPU -> (OK, line)
    tested: int | None = None
    fatal: list[tuple[int, str]] = field(default_factory=list)


def parse(lines: Lines, file: str) -> Burn:
    """Parse the run. Raises ParseError if there is no progress, no result and no fatal error."""
    run, place = Burn(file), 0
    for number, line in lines.whole:
        if all(_read_part(run, part, number) for part in line.split("\r") if part.strip()):
            lines.claim_text(place, place + len(line))  # the progress line exceeds the usual line limit
        place += len(line) + 1
    if not run.rates and not run.results and not run.fatal:
        raise ParseError("no progress and no result of gpu_burn in it", file=file)
    return run


def _read_part(run: Burn, part: str, number: int) -> bool:
    if gpu := _GPU.fullmatch(part):
        run.names[int(gpu["index"])] = gpu["name"]
    elif progress := _PROGRESS.fullmatch(part.strip()):
        errors = progress["errors"].split(" - ")
        run.rates.append([float(r) for r in re.findall(r"\((\d{1,9}) Gflop/s\)", progress["done"])])
        run.share = float(progress["share"])
        if len(errors) != len(run.rates[-1]):
            return False
        for index, word in enumerate(errors):
            if word.strip() != "0":
                run.errors.setdefault(index, number)
    elif result := _RESULT.fullmatch(part):
        run.results[int(result["index"])] = (result["word"] == "OK", number)
    elif tested := _TESTED.fullmatch(part):
        run.tested = int(tested["count"])
    elif _FATAL.search(part):
        run.fatal.append((number, part.strip()))
    else:
        return _BESIDE.fullmatch(part) is not None
    return True


def judge(run: Burn, context: Context) -> list[Finding]:
    """FAIL for wrong results and dead GPUs; the rates compared with each other; UNJUDGED for an unfinished run."""
    add = FindingCollector(run.file, context, "DIA001")
    for number, text in run.fatal:
        add("FAIL", text[:200], number, code="NOD022")
    for index in sorted({*run.errors, *(i for i, (right, _) in run.results.items() if not right)}):
        line = run.results.get(index, (False, None))[1] or run.errors.get(index)
        add("FAIL", "wrong results under load, or the GPU died", line, target=Target(gpu=index))
    whole = len(run.results) == run.tested and (not run.rates or run.share >= _WHOLE)
    if not run.fatal and not whole:
        text = f"the run is incomplete: {run.share:g} % of it, results of GPU {listed(sorted(run.results)) or 'none'}"
        add("UNJUDGED", text, code="DIA002")
    names = {*run.names.values()}
    sku = find_sku(names.pop()) if len(names) == 1 else None
    add.found += count_findings(sorted(run.results), sku, context, (run.file,))
    steady = [r for r in run.rates if len(r) == len(run.results) and all(r)]
    usual = [median(r[i] for r in steady) for i in range(len(run.results))] if steady else []
    for index, rate in enumerate(usual if len(usual) > 2 else ()):
        middle = median([*usual[:index], *usual[index + 1 :]])
        if (verdict := judge_share(rate / middle)) != "PASS":
            expected = Expected(middle, "Gflop/s", "median of the node's other GPUs")
            text = f"{rate:.0f} Gflop/s under load, median of the others {middle:.0f}"
            at = Target(gpu=index)
            add(verdict, text, code="NOD024", target=at, measured=rate, expected=expected, median=middle)
    return add.with_pass(f"gpu_burn: GPU {listed(sorted(run.results))} computed correctly", code="DIA004")


_MATCHES = having(r"proc'd: .*Gflop/s\)|^Tested \d+ GPUs:\s*$")
TOOLS: tuple[Tool[Burn], ...] = (Tool("gpu_burn", _MATCHES, parse, judge),)
