"""Judging what tools have said elsewhere: `seatrial check --from`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from seatrial.check.collect import Piece, collect
from seatrial.check.compare import Plan, against_plan, against_siblings, usual_counts
from seatrial.check.findings import Finding, Target
from seatrial.check.outputs import ports, sysfs
from seatrial.check.outputs.network import NetworkContext
from seatrial.check.registry import recognise
from seatrial.check.report import Judged, Report
from seatrial.check.tool import ParseError, Tool

_TREE: Tool[ports.PortsFacts] = sysfs.TOOLS[0]
# What damaged text can make of arithmetic on it. Anything else is a bug of ours and must be seen as one.
_OF_DAMAGE = (ArithmeticError, LookupError, ValueError, RecursionError)


@dataclass(frozen=True)
class _Read:
    """A piece that has been read by one tool. `problem` is a finding instead of facts."""

    piece: Piece
    tool: Tool[Any] | None
    facts: Any
    problem: Finding | None
    mixed: bool = False


def judge_paths(
    paths: Sequence[str], *, plan: Plan | None = None, port_gbit_s: float | None = None
) -> Report:
    """Every output in `paths` judged by itself, with what the others say of its node, and against its siblings.

    Raises InputError where a path does not exist or nothing is there. What stands in a file is never an error: unknown,
    empty, cut off and binary files are UNJUDGED findings.
    """
    return judge_pieces(collect(paths), plan=plan, port_gbit_s=port_gbit_s)


def judge_pieces(
    pieces: Sequence[Piece], *, plan: Plan | None = None, port_gbit_s: float | None = None
) -> Report:
    """As judge_paths(), of outputs that are in memory."""
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
        kind_of = kinds.get(node, set())  # outputs that disagree are of several machines
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
    known = recognise(piece.text)
    if not known:
        why = "not the output of a tool that is known, or not in English"
        return [_Read(piece, None, None, _unjudged(piece, "FILE001", why))]
    return [
        _parsed(piece, tool, partial(tool.parse, piece.text, piece.file), mixed=len(known) > 1)
        for tool in known
    ]


def _parsed(piece: Piece, tool: Tool[Any], parse: Callable[[], Any], *, mixed: bool = False) -> _Read:
    try:
        return _Read(piece, tool, parse(), None, mixed)
    except ParseError as error:
        problem = error.diagnostics[0]
        found = _unjudged(piece, "FILE003", f"{tool.name}: {problem.message}", problem.line)
    except _OF_DAMAGE as error:
        found = _unjudged(piece, "FILE003", f"{tool.name}: cannot be read ({type(error).__name__})")
    return _Read(piece, tool, None, found, mixed)


def _unjudged(piece: Piece, code: str, why: str, line: int | None = None) -> Finding:
    place = piece.file if line is None else f"{piece.file}:{line}"
    return Finding(code, "UNJUDGED", Target(node=piece.node), why, why_unjudged=why, evidence=(place,))


def _inventory(read: _Read) -> dict[str, str | int | float]:
    if read.tool is None or read.problem is not None:
        return {}
    try:
        return dict(read.tool.inventory(read.facts))
    except _OF_DAMAGE:
        return {}  # the judge meets the same facts and says what is wrong with them


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
        found = [_unjudged(piece, "FILE003", f"{read.tool.name}: nothing in it could be judged")]
    if read.mixed:
        # Where one output ends cannot be told, so nothing in it is known to be whole.
        found = [f for f in found if f.verdict != "PASS"]
        found.append(_unjudged(piece, "FILE006", f"beside {read.tool.name} another tool's output"))
    if piece.foreign_line is not None:
        why = f"{read.tool.name}: characters that no tool writes"
        found.append(_unjudged(piece, "FILE003", why, piece.foreign_line))
    return found


def _rates(reads: Sequence[_Read]) -> dict[str | None, dict[str, float]]:
    """Node -> device -> rate of its port; devices that outputs disagree on are left out."""
    said: dict[str | None, dict[str, set[float]]] = {}
    for read in reads:
        if isinstance(read.facts, ports.PortsFacts):
            for device, rate in ports.rates(read.facts).items():
                said.setdefault(read.piece.node, {}).setdefault(device, set()).add(rate)
    return {
        node: {device: min(rates) for device, rates in devices.items() if len(rates) == 1}
        for node, devices in said.items()
    }
