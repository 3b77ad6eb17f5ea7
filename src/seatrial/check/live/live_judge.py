"""Findings about hosts apart from their measurements, and about the rates of pairs and groups. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from seatrial.check.blame.blame import Case
from seatrial.check.judging.compare import against_siblings
from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.report import Judged
from seatrial.check.live.live_bench import LiveBench
from seatrial.check.live.live_ranks import Outcome, Sum
from seatrial.check.outputs import nccl_judge, nccl_log
from seatrial.check.outputs.nccl_log import NcclLog, Rank, Row
from seatrial.check.outputs.tool import Context, Lines, ParseError
from seatrial.check.ranges import listed

_SHOWN = 8  # findings about measurements that were cut short
_PEERS = 3  # nodes needed for a usual value, their median


def hosts(bench: LiveBench, gone: set[str]) -> Iterator[Finding]:
    """Faults of hosts that showed while they were measured. `gone` no longer answer."""
    problems, names = bench.problems, [h.name for h in bench.hosts]
    for n, why in sorted(bench.presence.silent.items()):
        if n not in bench.hello:
            yield Finding("LIV001", "FAIL", Target(node=names[n]), f"{names[n]} is unreachable: {why}")
        else:
            verdict: Verdict = "FAIL" if names[n] in gone else "WARN"
            yield Finding("LIV002", verdict, Target(node=names[n]), f"{names[n]}: {why}")
    for n, why in sorted(problems.stage.items()):
        yield Finding("LIV007", "FAIL", Target(node=names[n]), f"{names[n]}: the node stage {why}")
    for n, times in sorted(bench.presence.cut_off.items()):
        verdict = "FAIL" if names[n] in gone else "WARN"
        text = f"{names[n]} responds to the check, but has no connection to the others ({times} times)"
        yield Finding("LIV003", verdict, Target(node=names[n]), text)
    for n, why in sorted(problems.unable.items()):
        yield Finding("LIV004", "FAIL", Target(node=names[n]), f"{names[n]} cannot run ranks: {why}")
    often = bench.fails_often()
    for n, whys in sorted(problems.failed.items()):
        text = f"ranks failed on {names[n]} ({len(whys)} times): {whys[-1]}"
        yield Finding("LIV005", "FAIL" if n in often else "WARN", Target(node=names[n]), text)
    versions = {
        n: f"seatrial {h.version}, Python {h.python}, torch {problems.versions.get(n, '-')}"
        for n, h in bench.hello.items()
    }
    yield from _versions(
        {names[n]: v for n, v in versions.items() if n in problems.versions or not problems.versions}
    )
    yield from _wrong(bench.outcomes, names)
    yield from _failed(bench.outcomes, names)


def _versions(versions: Mapping[str, str]) -> Iterator[Finding]:
    ranked = Counter(versions.values()).most_common()
    for version, _ in ranked[1:]:
        who = [n for n, v in versions.items() if v == version]
        text = f"{listed(who)}: {version}; most have {ranked[0][0]}"
        target = Target(node=who[0]) if len(who) == 1 else Target()
        yield Finding("LIV008", "WARN", target, text, version, "", Expected(ranked[0][0], "", "most nodes"))


def _failed(outcomes: Iterable[Outcome], names: Sequence[str]) -> Iterator[Finding]:
    """Pairs and groups that were cut short for a reason that is no single host's; the first few of them."""
    cut = [o for o in outcomes if not o.whole and not o.silent and not o.own]
    for result in cut[:_SHOWN]:
        who = listed(names[n] for n in result.group.members)
        text = f"{who}: the measurement was interrupted: {result.why}"
        yield Finding("LIV009", "UNJUDGED", Target(), text, why_unjudged=result.why)
    if len(cut) > _SHOWN:
        text = f"{len(cut) - _SHOWN} more measurements of pairs and groups were interrupted"
        yield Finding("LIV009", "UNJUDGED", Target(), text)


def _wrong(outcomes: Iterable[Outcome], names: Sequence[str]) -> Iterator[Finding]:
    for result in outcomes:
        if bad := [s for s in result.sums if s.wrong]:
            who = [names[n] for n in result.group.members]
            target = Target(node=who[0]) if len(who) == 1 else Target()
            text = f"{bad[0].wrong} wrong elements in an all-reduce of {bad[0].size_bytes} bytes over {listed(who)}"
            zero = Expected(0, "values", "arithmetic")
            yield Finding("LIV006", "FAIL", target, text, bad[0].wrong, "values", zero)


# -- healthy pairs and groups


def pairs(case: Case, outcomes: Sequence[Outcome], algorithm: str) -> Iterator[Finding]:
    """The rate of each cleared node with its best partner, on its slowest rail; nothing about the others."""
    state, layout = case.state, case.layout
    cleared = case.alive & layout.usable.any(axis=1) & (state.good | ~layout.usable).all(axis=1)
    reached = np.where(layout.usable, state.share * state.rate, np.inf).min(axis=1)
    values = reached[cleared]
    usual = float(np.median(values)) if len(values) >= _PEERS else None
    rate, thresholds = layout.rate_gbit_s, layout.thresholds
    source = "the ports' nominal rate" if rate is not None else "median of the nodes"
    expected = None
    if rate is not None or usual is not None:
        value = thresholds.suspect * (rate if rate is not None else usual or 0.0)
        expected = Expected(
            value, "Gb/s", f"{thresholds.suspect:.0%} of {source}", "one direction", algorithm
        )
    for node in np.flatnonzero(cleared):
        target, value = Target(node=case.stage.names[node]), round(float(reached[node]), 3)
        text = f"{value:.4g} Gb/s in one direction with its best partner, slower direction ({algorithm})"
        if expected is not None:
            yield Finding("PAI001", "PASS", target, text, value, "Gb/s", expected, usual)
        else:
            why = f"fewer than {_PEERS} nodes to compare with, and the rate of the ports is unknown"
            yield Finding("PAI001", "UNJUDGED", target, text, value, "Gb/s", why_unjudged=why)
    yield from _together(case, outcomes)


def _together(case: Case, outcomes: Sequence[Outcome]) -> Iterator[Finding]:
    for code, some in (
        ("PAI002", _of(outcomes, lambda n: n == 2)),
        ("GRP001", _of(outcomes, lambda n: n > 2)),
    ):
        for members, found in sorted(some.items()):
            size = max(s.size_bytes for s, _ in found)
            values = [s.busbw(ranks) for s, ranks in found if s.size_bytes == size]
            middle = float(np.median(values))
            text = f"all-reduce of {size} bytes over {members} nodes: {middle:.4g} GB/s busbw, median of {len(values)}"
            if case.layout.thresholds.shared:
                why = "the hosts share CPUs: the rate is limited by the machine, not the network"
                yield Finding(code, "UNJUDGED", Target(), text, middle, "GB/s", why_unjudged=why)
            else:
                yield Finding(code, "PASS", Target(), text, middle, "GB/s")


def _of(outcomes: Sequence[Outcome], wanted: Any) -> dict[int, list[tuple[Sum, int]]]:
    found: dict[int, list[tuple[Sum, int]]] = {}
    for result in outcomes:
        if wanted(len(result.group.members)):
            for one in result.sums:
                found.setdefault(len(result.group.members), []).append((one, result.group.size))
    return found


# -- NCCL


def nccl(bench: LiveBench) -> list[Finding]:
    """What NCCL reported about its topology in pairs and groups, each message once."""
    found: dict[tuple[str, str, Target], Finding] = {}
    for result in bench.outcomes:
        if result in bench.inside.values() or not (log := _log(bench, result, "NCCL_DEBUG")):
            continue
        for one in nccl_judge.judge(log, Context(nodes=len(result.group.members))):
            found.setdefault((one.code, one.verdict, one.target), one)
    return list(found.values())


def inside(bench: LiveBench) -> tuple[list[Finding], list[Judged]]:
    """The all-reduce over each node's own GPUs, judged by the catalogue, NCCL's lines and the other nodes."""
    judged = []
    for n, result in bench.inside.items():
        name = bench.hosts[n].name
        what = f"all-reduce inside {name}"
        log = _log(bench, result, what) or NcclLog(what)
        log.table, log.test = True, "all_reduce_perf"
        log.average, log.out_of_bounds = (0, "", False), (0, 0, True)
        gpu = "" if bench.stage is None else bench.stage.gpu or ""
        log.ranks = [Rank(r, name, r, gpu) for r in range(result.group.size)]
        log.rows = [
            Row(0, s.size_bytes, s.size_bytes / s.seconds / 1e9, s.busbw(result.group.size), float(s.wrong))
            for s in result.sums
        ]
        gpus = None if bench.stage is None else len(bench.stage.slots)
        findings = nccl_judge.judge(log, Context(node=name, gpu=gpu or None, gpus=gpus, nodes=1))
        judged.append(Judged(what, name, "all-reduce", tuple(findings)))
    return against_siblings(judged)


def _log(bench: LiveBench, result: Outcome, file: str) -> NcclLog | None:
    """NCCL's lines of one rank group, with the hosts' own names replaced by ours."""
    lines = []
    for n, line in result.nccl:
        own = re.escape(bench.hello[n].host)
        lines.append(re.sub(rf"^(\[[^\]]*\] )?{own}:", rf"\g<1>{bench.hosts[n].name}:", line))
    try:
        return nccl_log.parse(Lines.of("\n".join(lines)), file) if lines else None
    except ParseError:
        return None
