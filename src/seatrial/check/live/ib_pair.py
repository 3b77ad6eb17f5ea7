"""`ib_write_bw` between two hosts, all rails at once, one direction after the other: commands and results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from seatrial.check.blame.rounds import Round
from seatrial.check.judging.findings import Finding, Target
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool, Key
from seatrial.check.live.hosts import Host
from seatrial.check.outputs import perftest
from seatrial.check.outputs.perftest_judge import judge
from seatrial.check.outputs.tool import Context, Lines, ParseError

TOOL = "ib_write_bw"
# Large messages over four queue pairs fill a link; -F: a varying CPU frequency is no error (published measurements).
_OPTIONS = ("-s", "8388608", "-q", "4", "--report_gbits", "-F")
MESSAGE_BYTES = 8388608
SECONDS = 3
_LIMIT_S = 4.0 * SECONDS + 10  # of one end: both ends need time to set up first
_OWN = ("NET001", "NET007")  # the port is not active, there is no such device


def command(device: str, port: int, server: str | None) -> list[str]:
    """One end on `device` ("mlx5_0/1"); `server` is the address to connect to, None for the server itself."""
    name, _, number = device.partition("/")
    end = [TOOL, "-d", name, "-i", number or "1", *_OPTIONS, "-D", str(SECONDS), "-p", str(port)]
    return end if server is None else [*end, server]


@dataclass(frozen=True)
class EndResult:
    """The result of one end: a rate, or findings about what it could not do. `blocked` is set if it could not run."""

    gbit_s: float | None
    findings: tuple[Finding, ...] = ()
    blocked: bool = False


def end_result(tool: msg.ToolResult, node: str) -> EndResult:
    """What the tool's result on `node` means."""
    if tool.absent:
        why = f"{TOOL} (perftest) is not installed"
        return EndResult(None, (_unjudged(node, why, "install perftest on every node"),), blocked=True)
    text, file = f"{tool.out}\n{tool.err}", f"{TOOL} on {node}"
    try:
        runs = perftest.parse(Lines.of(text), file)
    except ParseError:
        why = f"{TOOL} printed no known output (exit code {tool.rc})"
        return EndResult(None, (_unjudged(node, why, ""),), blocked=True)
    rates = [
        max(run.rows, key=lambda row: row.size_bytes).gbit_s
        for run in runs.runs
        if run.rows and run.complete and run.kind == "bandwidth"
    ]
    if rates and rates[-1] is not None:
        return EndResult(rates[-1])
    entries = judge(runs, Context(node=node)) if runs.errors else []
    # Only what this host alone can cause. A failed connection between two hosts does not show which one is at fault.
    own = tuple(f for f in entries if f.code in _OWN or (f.verdict == "UNJUDGED" and f.code != "FILE003"))
    return EndResult(None, own, blocked=bool(own))


def without_devices(tool: msg.ToolResult, node: str) -> list[Finding]:
    """Findings for a host without RDMA devices, from calling the tool there: why its RDMA is not judged."""
    if tool.absent:
        why = "this host shows no RDMA device, and perftest, which would confirm it, is not installed"
        return [Finding("NET007", "UNJUDGED", Target(node=node), why)]
    return list(end_result(tool, node).findings)


def rates(
    agent_pool: AgentPool, hosts: Sequence[Host], devices: Sequence[str], round_: Round, which: Sequence[int]
) -> Iterator[tuple[int, int, float, tuple[Finding, ...]]]:
    """(pair, rail, Gb/s of the slower direction, findings) of ib_write_bw over all rails of all pairs in `which` at once.

    NaN if it could not run, 0 if the two ends did not connect although both could run.
    """
    slower: dict[tuple[int, int], float] = {}
    values: dict[tuple[int, int], tuple[Finding, ...]] = defaultdict(tuple)
    rails = len(devices)
    for server, client in ((0, 1), (1, 0)):
        ends = {k: (int(round_.pairs[k][server]), int(round_.pairs[k][client])) for k in which}
        wanted = {(e[0], k): e for k, e in ends.items()}
        ports = agent_pool.ask({key: msg.FindPorts(rails) for key in wanted}, limit_s=10.0)
        serve: dict[Key, msg.RunTool] = {}
        of: dict[Key, tuple[int, int]] = {}
        for k, (a, _) in ends.items():
            offered = ports[a, k].value
            for rail, port in enumerate(offered.ports if offered is not None else ()):
                if not round_.rails[k, rail]:
                    continue
                part = k * rails + rail
                of[a, part] = (k, rail)
                serve[a, part] = msg.RunTool(command(devices[rail], port, None), port)

        def connect(
            key: Key,
            port: int,
            of: Mapping[Key, tuple[int, int]] = of,
            ends: Mapping[int, tuple[int, int]] = ends,
        ) -> Mapping[Key, msg.RunTool]:
            k, rail = of[key]
            a, b = ends[k]
            return {(b, key[1]): msg.RunTool(command(devices[rail], port, hosts[a].address))}

        replies = agent_pool.ask(serve, limit_s=_LIMIT_S, listening=connect)
        for (a, part), (k, rail) in of.items():
            b = ends[k][1]
            entries = [
                end_result(reply.value, hosts[n].name)
                for n in (b, a)
                if (reply := replies.get((n, part))) is not None and reply.value is not None
            ]
            values[k, rail] += tuple(f for h in entries for f in h.findings)
            rate = next((h.gbit_s for h in entries if h.gbit_s is not None), None)
            blocked = not entries or any(h.blocked for h in entries)
            value = np.nan if blocked else 0.0 if rate is None else rate
            before = slower.get((k, rail), np.nan)
            slower[k, rail] = float(np.fmin(before, value))  # the number, where one of them is NaN
    for (k, rail), value in slower.items():
        yield k, rail, value, values[k, rail]


def _unjudged(node: str, why: str, action: str) -> Finding:
    return Finding("NET004", "UNJUDGED", Target(node=node), why, action=action)
