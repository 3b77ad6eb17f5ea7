"""Judge tool outputs that were collected elsewhere: `seatrial check --from`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from seatrial.check.intake.collect import Piece, Progress, collect
from seatrial.check.intake.split import split
from seatrial.check.judging.compare import Plan, against_plan, against_siblings, usual_counts
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.judging.report import Judged, Report
from seatrial.check.outputs import kernel_text, ports, smi_query_judge, sysfs
from seatrial.check.outputs.network import NetworkContext
from seatrial.check.outputs.registry import recognise, tools
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool, quoted, unclaimed_findings
from seatrial.check.outputs.unknown import recognise_unsupported

_TREE: Tool[ports.PortsFacts] = sysfs.TOOLS[0]
_KERNEL = kernel_text.TOOLS[0]
_GPUS = smi_query_judge.TOOLS[0]
# Strings that never describe a healthy GPU, in any output. Driver messages and links: kernel_text.is_relevant().
_FAULT = re.compile(
    r"\bERR!|GPU (?:is lost|requires reset)|fallen off the bus|Unable to determine the device handle",
    re.IGNORECASE,
)
# Exceptions that damaged text can cause when it is processed. Any other is a bug of ours and must surface as one.
_OF_DAMAGE = (ArithmeticError, LookupError, ValueError, RecursionError)


@dataclass(frozen=True)
class _Read:
    """The result of one reader on a piece. `problem` is a finding instead of facts."""

    piece: Piece
    tool: Tool[Any] | None
    facts: Any
    problem: Finding | None


def judge_paths(
    paths: Sequence[str],
    *,
    plan: Plan | None = None,
    port_gbit_s: float | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Report:
    """Judge every output in `paths` by itself, with what other outputs state about its node, and against its siblings.

    Raises InputError if a path does not exist or nothing is found. Content never raises: unknown, empty, cut-off and
    binary files are UNJUDGED findings. `progress`: see collect().
    """
    return judge_pieces(collect(paths, progress), plan=plan, port_gbit_s=port_gbit_s)


def judge_pieces(
    pieces: Iterable[Piece], *, plan: Plan | None = None, port_gbit_s: float | None = None
) -> Report:
    """judge_paths() for outputs that are in memory."""
    reads = [read for piece in pieces for read in _read(piece)]
    inventories = [_inventory(read) for read in reads]
    kinds: dict[str | None, set[str]] = {}
    for read, inventory in zip(reads, inventories, strict=True):
        if isinstance(kind := inventory.get("GPU"), str):
            kinds.setdefault(read.piece.node, set()).add(kind)
    rates = _rates(reads)
    usual = usual_counts([(r.piece.node, i) for r, i in zip(reads, inventories, strict=True)])
    judged = []
    for read, inventory in zip(reads, inventories, strict=True):
        node = read.piece.node
        kind_of = kinds.get(node, set())  # outputs that disagree come from several machines
        context = NetworkContext(
            node=node,
            gpu=min(kind_of) if len(kind_of) == 1 else None,
            gpus=plan.gpus_per_node if plan is not None else usual.get("GPUs"),
            rates_gbit_s=rates.get(node, {}),
            port_gbit_s=port_gbit_s,
            fabric_ports=usual.get("fabric ports"),
        )
        findings = _judge(read, context)
        name = "" if read.tool is None else read.tool.name
        judged.append(Judged(read.piece.file, node, name, tuple(findings), inventory))
    compared, judged = against_siblings(judged)
    if plan is not None:
        compared += against_plan(judged, plan)
    return Report(tuple(judged), tuple(compared))


def _read(piece: Piece) -> list[_Read]:
    if piece.problem:
        return [_Read(piece, None, None, _unjudged(piece, piece.problem, piece.why))]
    if piece.tree is not None:
        tree = piece.tree
        return [_parsed(piece, _TREE, lambda: sysfs.read_tree(tree, piece.file))]
    if piece.states is not None:
        return [_Read(piece, _GPUS, piece.states, None)]
    parts, again = split(piece.lines)
    piece = replace(piece, lines=Lines([]))  # free the text: only the parsed facts are needed
    reads: list[_Read] = []
    left: dict[int, str] = {}
    understood: set[int] = set()
    unparsed: list[tuple[int, str]] = []
    for part, by in parts:
        rest, whole = part, True
        for read, lines in _readers(piece, part, by):
            reads.append(read)
            rest, whole = lines, whole and read.problem is None
        # An output that cannot be parsed is one finding; do not report its lines as well.
        if not whole:
            unparsed += part.whole
            rest = Lines([])
        numbers = {number for number, _ in rest.whole}
        understood |= {number for number, _ in part.whole} - numbers
        left |= dict(rest.whole)
    unknown = [(n, line) for n, line in sorted(left.items()) if n not in understood]
    if again:
        why = "a device is listed twice: outputs of several nodes in one file?"
        piece = replace(piece, remarks=(*piece.remarks, ("FILE003", why, again[0])))
    remarks = [_Read(piece, None, None, _unjudged(piece, *remark)) for remark in piece.remarks]
    return reads + _faults(piece, [*unknown, *unparsed]) + _unclaimed(piece, unknown, reads) + remarks


def _readers(piece: Piece, part: Lines, by: re.Pattern[str] | None) -> Iterator[tuple[_Read, Lines]]:
    """Each reader that understands part of `part`, with the lines it left unclaimed, which go to the next reader.

    The tool whose `first_line` matched (`by`) comes first; for a log, a match of `log_line` is enough.
    """
    asked: set[str] = set()
    while part:
        known = [tool for tool in recognise(part.text) if tool.name not in asked]
        own = [tool for tool in tools() if by is not None and by is tool.log_line and tool.name not in asked]
        tool = next((t for t in (*own, *known) if by in (t.first_line, t.log_line)), next(iter(known), None))
        if tool is None:
            return
        read = _parsed(piece, tool, partial(tool.parse, part, piece.file))
        rest = part.unclaimed() if read.problem is None else part
        if read.problem is None or not asked:
            yield read, rest  # unclaimed lines may resemble another tool's output without being one
        if len(rest.whole) == len(part.whole) or read.problem is not None:
            asked.add(tool.name)
        part = rest


def _faults(piece: Piece, lines: Sequence[tuple[int, str]]) -> list[_Read]:
    """Report unmistakable faults in lines that no reader understood, in any surrounding text."""
    found = []
    for number, line in Lines(lines):
        if _FAULT.search(line):
            text = f"in an unrecognised line: {quoted(line)}"
            place = (f"{piece.file}:{number}",)
            fault = Finding("GPU002", "FAIL", Target(node=piece.node), text, evidence=place)
            found.append(_Read(piece, None, None, fault))
    if relevant := [(n, line) for n, line in Lines(lines) if kernel_text.is_relevant(line)]:
        found.append(_Read(piece, _KERNEL, _KERNEL.parse(Lines(relevant), piece.file), None))
    return found


def _unclaimed(piece: Piece, lines: Sequence[tuple[int, str]], reads: Sequence[_Read]) -> list[_Read]:
    """Report what prevents a PASS: lines of no known output, next to known ones or alone."""
    if not any(read.tool is not None for read in reads):
        why, action = "not the output of a known tool, or not in English", ""
        if (tool := recognise_unsupported(Lines(lines).text)) is not None:
            why, action = f"looks like {tool.name}, which is not supported", f"collect {tool.instead} instead"
        found = replace(_unjudged(piece, "FILE001", why), action=action)
        return [_Read(piece, None, None, found)]
    known = ", ".join(dict.fromkeys(read.tool.name for read in reads if read.tool is not None))
    leftover = unclaimed_findings(Lines(lines), piece.file, Context(node=piece.node), f"next to {known}")
    return [_Read(piece, None, None, finding) for finding in leftover]


def _parsed(piece: Piece, tool: Tool[Any], parse: Callable[[], Any]) -> _Read:
    try:
        return _Read(piece, tool, parse(), None)
    except ParseError as error:
        problem = error.diagnostics[0]
        found = _unjudged(piece, "FILE003", f"{tool.name}: {problem.message}", problem.line)
    except _OF_DAMAGE as error:
        found = _unjudged(piece, "FILE003", f"{tool.name}: cannot be read ({type(error).__name__})")
    return _Read(piece, tool, None, found)


def _unjudged(piece: Piece, code: str, why: str, line: int | None = None) -> Finding:
    place = piece.file if line is None else f"{piece.file}:{line}"
    return Finding(code, "UNJUDGED", Target(node=piece.node), why, evidence=(place,))


def _inventory(read: _Read) -> dict[str, str | int | float]:
    if read.tool is None or read.problem is not None:
        return {}
    try:
        return dict(read.tool.inventory(read.facts))
    except _OF_DAMAGE:
        return {}  # the judge sees the same facts and reports what is wrong with them


def _judge(read: _Read, context: NetworkContext) -> list[Finding]:
    piece = read.piece
    if read.problem is not None:
        return [read.problem]
    assert read.tool is not None
    try:
        found = read.tool.judge(read.facts, context)
    except _OF_DAMAGE as error:
        found = [_unjudged(piece, "FILE003", f"{read.tool.name}: cannot be judged ({type(error).__name__})")]
    found = [
        f if f.target.node is not None else replace(f, target=replace(f.target, node=piece.node))
        for f in found
    ]
    if not found:
        found = [_unjudged(piece, "FILE003", f"{read.tool.name}: none of its content could be judged")]
    return found


def _rates(reads: Sequence[_Read]) -> dict[str | None, dict[str, float]]:
    """Node -> device -> rate of its port; devices that outputs disagree on are left out."""
    values: dict[str | None, dict[str, set[float]]] = {}
    for read in reads:
        if isinstance(read.facts, ports.PortsFacts):
            for device, rate in ports.rates(read.facts).items():
                values.setdefault(read.piece.node, {}).setdefault(device, set()).add(rate)
    return {
        node: {device: min(rates) for device, rates in devices.items() if len(rates) == 1}
        for node, devices in values.items()
    }
