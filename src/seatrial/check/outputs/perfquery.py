"""perfquery (infiniband-diags): the counters of one port, or the totals over all ports of a switch.

Format: rdma-core, infiniband-diags/perfquery.c, libibmad/fields.c: "SymbolErrorCounter:..............0".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from seatrial.check.judging.findings import Finding, Target
from seatrial.check.outputs.finding_collector import FindingCollector, having
from seatrial.check.outputs.tool import Context, Lines, ParseError, Tool
from seatrial.check.ranges import listed
from seatrial.hardware.counters import LIMIT_OF, saturated

_TITLE = re.compile(
    r"# Port (?P<kind>extended )?counters: (?P<where>.{0,80}?) ?port (?P<port>\d{1,3})(?: \(CapMask: 0x[0-9A-F]+(?: CapMask2: 0x[0-9A-F]+)?\))?\s*"
)
_COUNTER = re.compile(r"(?P<name>[A-Z][A-Za-z0-9]{3,40}):\.{2,}(?P<value>0x[0-9a-f]+|0|[1-9]\d{0,19})\s*")
_ALL_PORTS = 255
# Name -> kernel name (drivers/infiniband/core/sysfs.c), for which the limits are defined.
_NAMES = {
    "SymbolErrorCounter": "symbol_error", "LinkErrorRecoveryCounter": "link_error_recovery", "LinkDownedCounter": "link_downed",
    "PortRcvErrors": "port_rcv_errors", "PortRcvRemotePhysicalErrors": "port_rcv_remote_physical_errors",
    "PortXmitDiscards": "port_xmit_discards", "LocalLinkIntegrityErrors": "local_link_integrity_errors",
    "ExcessiveBufferOverrunErrors": "excessive_buffer_overrun_errors",
}  # fmt: skip


@dataclass
class Counters:
    """The result of one query: counter -> value and line."""

    title: str
    port: int
    line: int
    extended: bool
    values: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class PerfFacts:
    """All queries of one output."""

    file: str
    queries: tuple[Counters, ...]


def parse(lines: Lines, file: str) -> PerfFacts:
    """Parse all queries. Raises ParseError if there is no query with counters."""
    queries: list[Counters] = []
    for number, line in lines:
        if title := _TITLE.fullmatch(line):
            queries.append(Counters(title["where"], int(title["port"]), number, bool(title["kind"])))
        elif queries and (match := _COUNTER.fullmatch(line)) and match["name"] not in queries[-1].values:
            queries[-1].values[match["name"]] = (int(match["value"], 0), number)
        else:
            continue
        lines.claim(number)
    if not any(q.values for q in queries):
        raise ParseError("no port counters in the output", file=file)
    return PerfFacts(file, tuple(queries))


def judge(facts: PerfFacts, context: Context) -> list[Finding]:
    """PASS for zero counters, UNJUDGED for others: a single reading does not say when they grew; a second one does."""
    add = FindingCollector(facts.file, context, "NET011")
    for query in facts.queries:
        where = "all ports" if query.port == _ALL_PORTS else f"port {query.port}"
        target = Target(port=f"{query.title} {where}")
        # Extended counters cover data and packets; on newer adapters errors too.
        lacking = [n for n in _NAMES if n not in query.values] if not query.extended else []
        if lacking or "PortRcvPkts" not in query.values:
            add("UNJUDGED", f"no {(lacking or ['PortRcvPkts'])[0]}: truncated", query.line, target=target)
        for name, counter in _NAMES.items():
            value, line = query.values.get(name, (0, query.line))
            if value >= LIMIT_OF[counter].least:
                full = "its maximum, so the true count is unknown"
                more = full if saturated(counter, value) else LIMIT_OF[counter].reason
                text = f"{name} {value}, and one reading does not show whether it increases: {more}"
                add("UNJUDGED", text, line, target=target, measured=value)
    if not any(n in q.values for q in facts.queries for n in _NAMES):
        add("UNJUDGED", "only data and packets are counted here: perfquery without -x shows errors")
    return add.with_pass(f"no errors counted in {listed(q.title + f' port {q.port}' for q in facts.queries)}")


_BEGINS = r"# Port (?:extended )?counters: "
TOOLS = (Tool("perfquery", having(f"^{_BEGINS}"), parse, judge, first_line=re.compile(_BEGINS)),)
