"""Verdicts on runs of perftest: bandwidth of one direction against the port's rate, latency, errors."""

from __future__ import annotations

from collections.abc import Mapping

from seatrial.check.judging.findings import Expected, Finding, Target, Verdict
from seatrial.check.judging.floors import judge_share
from seatrial.check.outputs.network import (
    BROKEN,
    FABRIC_RATES_GBIT_S,
    TARGET_SOURCE,
    at,
    damaged,
    gbit,
    port_rate,
)
from seatrial.check.outputs.perftest_run import Row, Run, Runs, classify
from seatrial.check.outputs.tool import Context

# Smaller messages do not fill a link with one queue pair. Two ConnectX-7 reach 98 % of NDR at 64 KiB.
_FILLS_BYTES = 65536
# One queue pair has 16 outstanding reads; with it two healthy ConnectX-7 read at 82 % of NDR, and write at 98 %.
_READ_QUEUE_PAIRS = 4
# Two ConnectX-7 servers: 1.27 µs for 2 bytes. Limit chosen here: a few more switches and 100 m of fibre stay below.
_LATENCY_US = 5.0
_LATENCY_BYTES = 256  # fits into one packet and is sent inline
_MEASURED_AT = 1.01  # a measurement may slightly exceed the rate of its port: clocks, and rounding


def judge(facts: Runs, context: Context) -> list[Finding]:
    """One or more findings for each run, and one for each cause among the error texts."""
    found: list[Finding] = []
    for run in facts.runs:
        found += damaged(run.damage, facts.file, run.name)
        if run.rows and run.kind == "bandwidth":
            found.append(_bandwidth(run, facts.file, context))
        elif run.rows:
            found.append(_latency(run, facts.file))
    return found + _errors(facts, context)


def inventory(facts: Runs) -> Mapping[str, str | int | float]:
    """Empty: measurements of perftest are compared as findings."""
    return {}


def _largest(run: Run) -> Row:
    """The row of the largest message. Among several: the slowest, and a single direction before the sum of both."""
    return max(run.rows, key=lambda row: (row.size_bytes, bool(row.direction), -(row.gbit_s or 0.0)))


def _one_direction(run: Run, row: Row) -> tuple[float, str]:
    """Bandwidth of one port in one direction in Gb/s, and how it was derived."""
    assert row.gbit_s is not None
    each, how = row.gbit_s, ""
    if row.ports_gbit_s:
        each, how = min(row.ports_gbit_s), "; the slower of two ports"
    elif run.two_ports:
        each, how = each / 2, f"; {gbit(each)} Gb/s is the sum of both ports"
    if row.direction:
        how += f"; the slower direction ({row.direction})"
    elif run.both_directions:
        each, how = each / 2, f"{how}; {gbit(each)} Gb/s is the sum of both directions"
    return each, how


def _bandwidth(run: Run, file: str, context: Context) -> Finding:
    row = _largest(run)
    each, made = _one_direction(run, row)
    rate = port_rate(context, run.device)
    lowest = next((r for r in FABRIC_RATES_GBIT_S if each <= r * _MEASURED_AT), None)
    how = (
        f"{run.name}, {row.size_bytes} bytes, {run.queue_pairs} queue pair{'s' * (run.queue_pairs > 1)}{made}"
    )
    if run.loopback:
        how += "; both ends are the same adapter, so cable and switch were not tested"

    def finding(
        verdict: Verdict, message: str, expected: Expected | None, why: str = "", action: str = ""
    ) -> Finding:
        text, target = (
            f"{gbit(each)} Gb/s in one direction: {message} ({how})",
            Target(node=context.node, port=run.device),
        )
        measured = ("NET004", verdict, target, text, round(each, 2), "Gb/s", expected, None, why, action)
        return Finding(*measured, evidence=(at(file, row.line),))

    def expect(value: float, source: str) -> Expected:
        return Expected(value, "Gb/s", source, "one direction", run.name, row.size_bytes)

    if not each and not row.messages_m_s:
        return finding("FAIL", "no data received", expect(*rate) if rate is not None else None)
    if row.size_bytes < _FILLS_BYTES:
        text = f"messages of {row.size_bytes} bytes do not fill a link"
        return finding("UNJUDGED", text, None, f"{text}; measure with -s 8388608")
    reads = run.verb == "RDMA_Read" and run.queue_pairs < _READ_QUEUE_PAIRS
    if rate is not None:
        value, source = rate
        if each > value * _MEASURED_AT:
            text = f"more than the port's {gbit(value)} Gb/s"
            why = "the output and the port's rate do not match"
            return finding("UNJUDGED", text, expect(value, source), why)
        verdict = _banded(each / value, reads)
        return finding(
            verdict, f"{each / value:.0%} of {gbit(value)}", expect(value, f"{source}; {TARGET_SOURCE}")
        )
    if lowest is None:
        text = "more than any port in the catalogue carries"
        return finding("UNJUDGED", text, None, f"{text}; set the port's rate with --port-gbit-s")
    # The rate of the port is unknown. It is at least the lowest rate that carries what was measured, so a bandwidth
    # that is too low for that rate is too low for any higher one.
    share = each / lowest
    message = f"{share:.0%} of {gbit(lowest)}, the lowest rate of a fabric port that can carry it; the port's own rate is not in this output"
    source = f"the port's rate is unknown: lowest of {', '.join(gbit(r) for r in FABRIC_RATES_GBIT_S)} that can carry it; {TARGET_SOURCE}"
    verdict = _banded(share, reads)
    if verdict == "FAIL" and lowest == FABRIC_RATES_GBIT_S[0]:
        verdict = "WARN"  # a port of 10 to 56 Gb/s may be healthy at this bandwidth
        message += "; broken, unless the port is slower by design"
    hint = (
        ""
        if verdict == "PASS"
        else "provide ibstat of the same node, or set the rate with --port-gbit-s; then as `seatrial explain NET004` says"
    )
    return finding(verdict, message, expect(lowest, source), action=hint)


def _banded(share: float, reads: bool) -> Verdict:
    """The verdict on a share. `reads`: RDMA reads on few queue pairs, limited by outstanding requests, not the link."""
    if not reads:
        return judge_share(share)
    return "PASS" if share >= BROKEN else "WARN"


def _latency(run: Run, file: str) -> Finding:
    row = min(run.rows, key=lambda row: row.size_bytes)
    time = row.times_us.get("typical", row.times_us.get("avg"))
    target, place = Target(port=run.device), (at(file, row.line),)
    text, why = f"{run.name}, {row.size_bytes} bytes: not comparable", ""
    if time is None or row.size_bytes > _LATENCY_BYTES:
        why = f"no floor is known for messages of {row.size_bytes} bytes; measure with -s 2"
    else:
        text = f"{time:.2f} µs for {row.size_bytes} bytes ({run.name})"
        if run.settings.get("link type", "").lower() not in ("ib", "infiniband"):
            why = "no floor is known for RDMA over Ethernet: it depends on the switches and on whether the device is a real adapter"
    if time is None or why:
        return Finding("NET005", "UNJUDGED", target, text, time, "µs", why_unjudged=why, evidence=place)
    source = "at most; chosen here, four times the latency of two ConnectX-7 servers (1.27 µs)"
    expected = Expected(_LATENCY_US, "µs", source, "one direction", run.name, row.size_bytes)
    verdict: Verdict = "PASS" if 0 < time <= _LATENCY_US else "WARN"
    return Finding("NET005", verdict, target, text, time, "µs", expected, evidence=place)


def _errors(facts: Runs, context: Context) -> list[Finding]:
    """One finding per cause; error lines that are only symptoms of another are added to its evidence."""
    device = facts.runs[0].device if facts.runs else None
    entries = [(classify(text)[0], text, line) for text, line in facts.errors]
    first = [t for t in entries if not t[0].symptom] or entries
    causes: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for error, text, line in first:
        causes.setdefault((error.code, error.message), []).append((text, line))
    after = [line for error, _, line in entries if error.symptom] if len(first) < len(entries) else []
    found = []
    for (code, message), lines in causes.items():
        text, _ = lines[0]
        error, match = classify(text)
        groups = match.groupdict()
        port = groups.get("device") or device
        if port is not None and (number := groups.get("number")):
            port = f"{port}/{number}"
        target, text = (
            Target(node=context.node, port=port, peer=groups.get("peer")),
            f"{message}: {text[:200]}",
        )
        why = message if error.verdict == "UNJUDGED" else ""
        places = tuple(at(facts.file, n) for n in [*(line for _, line in lines), *after][:4])
        found.append(Finding(code, error.verdict, target, text, why_unjudged=why, evidence=places))
    return found
