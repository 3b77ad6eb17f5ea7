"""Output of ncclscout (oracle-quickstart/oci-hpc): NCCL all-reduce between pairs of nodes, and its node accounting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.outputs.finding_collector import FindingCollector
from seatrial.check.outputs.network import BROKEN, damaged
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed

_NODE = r"[\w.-]+"
_PAIR = re.compile(
    rf"^\s*(?:Testing |Cross-test |Result: )?(?P<a>{_NODE}) <-> (?P<b>{_NODE})(?:\.\.\.|:)\s*(?:(?P<gb_s>\d+(?:\.\d+)?) GB/s|(?P<failed>FAILED))\s*$"
)
_WITH = re.compile(
    rf"^\s*(?:Testing unpaired node|Retesting) (?P<a>{_NODE}) with (?P<b>{_NODE})\.\.\.\s*(?:(?P<gb_s>\d+(?:\.\d+)?) GB/s|(?P<failed>FAILED))\s*$"
)
_FAILED_PAIR = re.compile(rf"^\s*Test failed between (?P<a>{_NODE}) and (?P<b>{_NODE})\s*$")
_UNREACHABLE = re.compile(rf"^\s*Host (?P<node>{_NODE}) is unreachable\.\s*$")
_COUNT = re.compile(
    r"[^\w]*(?P<what>Total nodes provided|Reachable nodes|Good nodes|Bad nodes|Unreachable nodes|Successfully categorized|Never tested|Skipped \(shape issues\))"
    r"(?: \([≥<] (?P<floor>\d+(?:\.\d+)?) GB/s[^)]*\))?: (?P<n>\d+)\s*$"
)
_LISTS = re.compile(
    r"^(?P<what>Good|Bad|Unreachable|\W*Nodes that failed ALL) (?:Nodes|tests) \((?P<n>\d+)\):\s*$"
)
_NAMES = re.compile(rf"\s*{_NODE}(?:, {_NODE})*\s*")
_STATISTIC = re.compile(r"^\s*(?P<what>Maximum|Minimum|Average): (?P<gb_s>\d+(?:\.\d+)?) GB/s\s*$")
_END = re.compile(r"^Test completed at: \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
# Other lines. Some of them report a failure that the results show as well.
_PLAIN = re.compile(
    rf"\s*(?:Running NCCL test (?:on \d+ (?:unique )?nodes from (?:sinfo|file)|between: {_NODE} and {_NODE})\.\.\."
    r"|Checking reachability of \d+ nodes\.\.\.|Warning: \d+ nodes are unreachable and will be excluded from testing\."
    r"|Note: Removed duplicates from sinfo output:|  \S+: appeared \d+ times|Total unique nodes: \d+"
    r"|Duplicate hosts found and removed, host file updated\.\.\.|Creating test pairs\.\.\.|Created \d+ test pairs(?: for parallel testing)?"
    rf"|Unpaired nodes(?: \(\d+\)| to test separately): {_NODE}(?:, {_NODE})*|Running NCCL Tests (?:sequentially|in parallel)\.\.\."
    r"|(?:Testing pairs|Retesting(?: \([\w ]+\))?) \|[█-]*(?:\| [\d.]+% Complete)?|Testing \d+ unpaired nodes\.\.\.|Initial Test Results:"
    r"|=== COMPREHENSIVE RETESTING PHASE ===|COMPREHENSIVE NODE ACCOUNTING SUMMARY|Retesting (?:all )?\d+ (?:problematic )?nodes(?: due to [\w ]+)?\.\.\."
    r"|Phase \d: [\w -]+\.\.\.|Note: \d+ good node\(s\) available to test \d+ bad nodes\.|(?:[^\w]*)Failed all tests \(timeout/error\): \d+"
    r"|Verification: \d+ nodes accounted for out of \d+ total|[^\w]*Nodes that failed ALL tests \(\d+\):|Bandwidth Statistics:|Failed tests: \d+"
    r"|Please perform health checks on problematic nodes\.)\s*"
)
_BESIDE = 1e-2 / 2 + 1e-9  # printed with two decimals


@dataclass(frozen=True)
class Pair:
    """One measurement between two nodes: bus bandwidth in GB/s, None if the test failed."""

    a: str
    b: str
    gb_s: float | None
    line: int
    listed: bool = False  # from the list of initial results, not from the measurement itself


@dataclass
class ScoutFacts:
    """All measurements, and the content of the summary."""

    file: str
    pairs: list[Pair] = field(default_factory=list)
    floor: float | None = None
    counts: dict[str, int] = field(default_factory=dict)
    lists: dict[str, list[str]] = field(default_factory=dict)
    unreachable: dict[str, int] = field(default_factory=dict)
    statistics: dict[str, float] = field(default_factory=dict)
    whole: bool = False
    damage: list[tuple[str, int | None]] = field(default_factory=list)


def matches(text: str) -> bool:
    """Whether the title of its summary is there, or its line of a pair."""
    return "COMPREHENSIVE NODE ACCOUNTING SUMMARY" in text or bool(
        re.search(
            rf"^\s*(?:Testing |Result: )?{_NODE} <-> {_NODE}(?:\.\.\.|:) ?(?:\d|FAILED)", text, re.MULTILINE
        )
    )


def parse(lines: Lines, file: str) -> ScoutFacts:
    """Parse pairs and summary. Raises ParseError if there is neither a pair nor a summary."""
    facts = ScoutFacts(file)
    pending: str | None = None
    # The progress bar overwrites its own line after a carriage return.
    for number, raw in lines:
        known = []
        for line in raw.split("\r"):
            if pending is not None and _NAMES.fullmatch(line):
                facts.lists[pending] = [n.strip() for n in line.split(",")]
                known.append(True)
            elif found := _LISTS.match(line):
                facts.counts.setdefault(f"{found['what']} list", int(found["n"]))
                known.append(True)
            else:
                known.append(not line.strip() or _line(facts, line, number))
            if line.strip():
                lists = _LISTS.match(line)
                pending = None if lists is None else lists["what"]
        if all(known):
            lines.claim(number)
    if not facts.pairs and not facts.counts:
        raise ParseError("neither a pair of nodes nor a summary in the output", file=file)
    _check(facts)
    return facts


def _line(facts: ScoutFacts, line: str, number: int) -> bool:
    """Parse one line; False if it is not the tool's or repeats an earlier one."""
    if (found := _PAIR.match(line)) or (found := _WITH.match(line)):
        gb_s = None if found["failed"] else float(found["gb_s"])
        listed = line.startswith("  ") and "..." not in line
        again = any(
            (p.a, p.b, p.gb_s, p.listed) == (found["a"], found["b"], gb_s, listed) for p in facts.pairs
        )
        facts.pairs.append(Pair(found["a"], found["b"], gb_s, number, listed))
        return not again
    elif found := _FAILED_PAIR.match(line):
        facts.pairs.append(Pair(found["a"], found["b"], None, number))
    elif found := _UNREACHABLE.match(line):
        facts.unreachable[found["node"]] = number
    elif found := _COUNT.match(line):
        if found["what"] in facts.counts:
            return False
        facts.counts[found["what"]] = int(found["n"])
        if found["floor"]:
            if facts.floor not in (None, float(found["floor"])):
                facts.damage.append(("two different thresholds", number))
            facts.floor = float(found["floor"])
    elif (found := _STATISTIC.match(line)) and found["what"] not in facts.statistics:
        facts.statistics[found["what"]] = float(found["gb_s"])
    elif _END.match(line):
        facts.whole = True
    else:
        return _PLAIN.fullmatch(line) is not None
    return True


def _check(facts: ScoutFacts) -> None:
    """Record as damage what is missing in the summary, and where it contradicts the measurements."""
    counts = facts.counts
    if not facts.whole:
        facts.damage.append(("the closing line `Test completed at` is missing: truncated", None))
    for what in ("Total nodes provided", "Good nodes", "Bad nodes", "Unreachable nodes"):
        if what not in counts:
            facts.damage.append((f"the count `{what}` is missing", None))
    if {"Total nodes provided", "Good nodes", "Bad nodes", "Unreachable nodes"} <= counts.keys():
        parts = counts["Good nodes"] + counts["Bad nodes"] + counts["Unreachable nodes"] + _untested(counts)
        if parts != counts["Total nodes provided"]:
            facts.damage.append((f"{counts['Total nodes provided']} nodes, {parts} accounted for", None))
        nodes = {n for p in facts.pairs for n in (p.a, p.b)}
        if len(nodes) != counts["Good nodes"] + counts["Bad nodes"]:
            facts.damage.append(
                (f"{counts['Good nodes'] + counts['Bad nodes']} nodes tested, {len(nodes)} shown", None)
            )
    for what in ("Good", "Bad", "Unreachable"):
        stated = counts.get(f"{what} nodes", 0)
        if counts.get(f"{what} list", 0) != stated or len(facts.lists.get(what, ())) != stated:
            facts.damage.append((f"the list of {what.lower()} nodes does not contain {stated}", None))
    measured = [p.gb_s for p in facts.pairs if p.gb_s is not None]
    for what, value in facts.statistics.items():
        # A retest replaces the first result of a pair, so any of the results may be the extreme.
        if what != "Average" and not any(abs(value - gb_s) < _BESIDE for gb_s in measured):
            facts.damage.append((f"`{what}` does not match any pair", None))
    if measured and facts.counts:
        for what in ("Maximum", "Minimum", "Average"):
            if what not in facts.statistics:
                facts.damage.append((f"the statistic `{what}` is missing", None))
    _check_results(facts)


def _check_results(facts: ScoutFacts) -> None:
    """Record differences as damage: each result is printed when measured and again in the list of initial results."""
    first = next((i for i, p in enumerate(facts.pairs) if p.listed), None)
    if first is None:
        if facts.counts and facts.pairs:
            facts.damage.append(("the list of initial results is missing", None))
        return
    listed = {(frozenset((p.a, p.b)), p.gb_s) for p in facts.pairs if p.listed}
    before = {(frozenset((p.a, p.b)), p.gb_s) for p in facts.pairs[:first]}
    for nodes, gb_s in sorted(listed ^ before, key=lambda pair: (sorted(pair[0]), pair[1] or 0.0)):
        text = "failed" if gb_s is None else f"{gb_s:.2f} GB/s"
        facts.damage.append((f"{' and '.join(sorted(nodes))}: {text} is listed once instead of twice", None))


def judge(facts: ScoutFacts, context: Context) -> list[Finding]:
    """One finding per node that is slow in its best pair or unreachable; PASS if all are good and accounted for."""
    # About pairs: the node that ran it is none of them.
    add = FindingCollector(facts.file, Context(), "NET009")
    add.found += damaged(facts.damage, facts.file, "ncclscout")
    measured = [p.gb_s for p in facts.pairs if p.gb_s is not None]
    usual = median(measured) if measured else None
    for node in dict.fromkeys([*facts.unreachable, *facts.lists.get("Unreachable", ())]):
        line = facts.unreachable.get(node)
        add("FAIL", "unreachable, not tested", line, code="NET010", target=Target(node=node))
    if untested := _untested(facts.counts):
        add("UNJUDGED", f"{untested} nodes were reachable and not tested")
    if facts.floor is None and facts.pairs:
        why = "the output does not state the threshold, and no other floor is known for these GPUs"
        middle = f"median {usual:.1f} GB/s" if usual is not None else ""
        text = f"{len(facts.pairs)} pairs, {middle}" if middle else "no pair measured"
        add("UNJUDGED", text, measured=usual, unit="GB/s", why=why)
    else:
        _nodes(facts, usual, add)
    if not add.found and measured and facts.floor is not None:
        nodes = len({n for p in facts.pairs for n in (p.a, p.b)})
        text = f"{nodes} nodes in pairs, the slowest {min(measured):.1f} GB/s"
        add("PASS", text, measured=min(measured), expected=_expected(facts.floor), median=usual)
    if not add.found:
        add("UNJUDGED", "no pair of nodes was measured")
    return add.found


def _untested(counts: Mapping[str, int]) -> int:
    """Number of nodes that were reachable but not tested."""
    return counts.get("Never tested", 0) + counts.get("Skipped (shape issues)", 0)


def _expected(floor: float) -> Expected:
    return Expected(
        floor, "GB/s", "at least; the threshold that ncclscout printed", "", "NCCL all-reduce, bus bandwidth"
    )


def _nodes(facts: ScoutFacts, usual: float | None, add: FindingCollector) -> None:
    """Judge each node by its best pair, as ncclscout does: a good node only shows as good when paired with another."""
    pairs: dict[str, list[Pair]] = {}
    for pair in facts.pairs:
        pairs.setdefault(pair.a, []).append(pair)
        pairs.setdefault(pair.b, []).append(pair)
    floor, bad = facts.floor or 0.0, set[str]()
    for node, mine in pairs.items():
        best = max(mine, key=lambda p: p.gb_s or 0.0)
        gb_s = best.gb_s or 0.0
        if gb_s and gb_s >= floor:
            continue
        partners = sorted({p.b if p.a == node else p.a for p in mine})
        good = [n for n in partners if any((p.gb_s or 0.0) >= floor for p in pairs[n])]
        if best.gb_s is None:
            text = f"every test failed, with {listed(partners)}"
        else:
            text = f"{gb_s:.1f} GB/s at best, with {listed(partners)}"
        broken = best.gb_s is None or good or gb_s < BROKEN * floor
        if not good:
            text += "; none of these is good with another node, so they may be at fault"
        lines, measured, expected = [p.line for p in mine], best.gb_s, _expected(floor)
        at = Target(node=node)
        verdict: Verdict = "FAIL" if broken else "WARN"
        add(verdict, text, *lines, target=at, measured=measured, expected=expected, median=usual)
        bad.add(node)
    for node in facts.lists.get("Bad", ()):
        if node not in bad:
            add("FAIL", "listed as bad", target=Target(node=node))


_BEGINS = re.compile(
    r"(?P<id>Checking reachability of|COMPREHENSIVE NODE ACCOUNTING)|Running NCCL test (?:on|between)"
)
TOOLS = (Tool("ncclscout", matches, parse, judge, first_line=_BEGINS),)
