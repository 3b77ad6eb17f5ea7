"""A check that measures: an agent on every host, the stages in sequence, and one report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from seatrial.base.errors import Diagnostic, InputError
from seatrial.check.blame.blame import Blame
from seatrial.check.blame.infer import Thresholds
from seatrial.check.blame.localise import Report as Localised
from seatrial.check.blame.localise import Rounds, localise
from seatrial.check.judging.check_run import CheckRun
from seatrial.check.judging.compare import Plan
from seatrial.check.judging.findings import Finding
from seatrial.check.judging.measured import of_nodes
from seatrial.check.judging.report import Report
from seatrial.check.live import ib_pair, live_judge
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool, Reply
from seatrial.check.live.hosts import Host
from seatrial.check.live.live_bench import LiveBench
from seatrial.check.live.live_rates import measured
from seatrial.check.node.judge_node import judge_stage
from seatrial.check.node.node_clock import Offset, judge_offsets, offset_of
from seatrial.check.node.node_stage import NodeOptions
from seatrial.check.outputs.topology import Topology

Stage = Literal["node", "pair", "all"]
Device = Literal["cpu", "cuda", "auto"]
STAGES: tuple[Stage, ...] = ("node", "pair", "all")
# Hosts that share processors take turns, and now and then one still reads half as much as another. A link that is far
# too slow reads far less.
_SHARED = Thresholds(suspect=0.5, broken=0.4, shared=True)
_BY_NODES = ("MSR005", "MSR006", "MSR007", "MSR008", "MSR010")  # links, memory, messages, counters
_TRIPS = 5
_PING_S = 2.0


@dataclass(frozen=True)
class LiveOptions:
    """What to measure, and how long it may take.

    `sizes` are the bytes of an all-reduce's message. `timeout_s` bounds one order to one host (a node stage, a round of
    pairs or groups), not the whole check.
    """

    node: NodeOptions
    stages: tuple[Stage, ...] = STAGES
    sizes: tuple[int, ...] = ()  # () selects what suits the device
    device: Device = "auto"
    topology: Topology | None = None
    port_gbit_s: float | None = None  # nominal rate of the fabric's ports, one direction
    timeout_s: float = 60.0
    plan: Plan | None = None
    python: str | None = None  # interpreter on the hosts; None is the path of this one


@dataclass(frozen=True)
class LiveResult:
    """The result of a live check. `measured` is JSON: the rates for the planner. `seconds` is by stage and "total"."""

    report: Report
    measured: Mapping[str, Any]
    rounds: Rounds
    blames: tuple[Blame, ...]
    seconds: Mapping[str, float]
    unsettled: tuple[str, ...] = ()

    def recorded(self, nodes: Sequence[str]) -> Report:
        """The report of a check of `nodes`, with how it was measured."""
        alone = of_nodes(self.report.findings)
        check_run = CheckRun(
            tuple(nodes),
            asdict(self.rounds),
            self.seconds,
            tuple(blame.record() for blame in self.blames),
            self.unsettled,
            {**self.measured, **({"node": alone} if alone else {})},
        )
        return replace(self.report, check_run=check_run)


def check_live(hosts: list[Host], options: LiveOptions, progress: Callable[[str], None]) -> LiveResult:
    """Measure and judge `hosts`. `progress` gets a line at the beginning and the end of each stage.

    A host that is unreachable, dies or hangs is a finding about it, never an error. Raises InputError if there is no
    host or two have the same name. However it ends (including KeyboardInterrupt), no process keeps running anywhere.
    """
    hosts = _checked(hosts)
    begin = time.monotonic()
    names = [host.name for host in hosts]
    with AgentPool(hosts, options.python) as agent_pool:
        progress(f"starting agents on {len(hosts)} node{'s' * (len(hosts) > 1)}")
        greetings = agent_pool.greet(options.timeout_s)
        clocks = _clocks(agent_pool, greetings, options.timeout_s)
        bench = LiveBench(
            agent_pool,
            hosts,
            greetings,
            _node_options(options),
            device=options.device,
            sizes=options.sizes,
            timeout_s=options.timeout_s,
            ranks_wanted=bool({"pair", "all"} & set(options.stages)),
            report=progress,
        )
        thresholds = _SHARED if bench.shared else Thresholds()
        # TCP flows do not measure what a fabric's port can carry.
        rate = options.port_gbit_s if any(hello.rdma for hello in bench.hello.values()) else None
        found = localise(bench, names, options.topology, rate, thresholds=thresholds, stages=options.stages)
    report = _report(bench, found, options)
    if "node" in options.stages:
        report = report.also(judge_offsets({names[n]: offset for n, offset in clocks.items()}))
    seconds = {stage: round(value, 3) for stage, value in bench.seconds.items()}
    seconds["total"] = round(time.monotonic() - begin, 3)
    progress(f"measured in {seconds['total']:.1f} s")
    rates = measured(bench.stage, found, bench.outcomes, bench.backend, bench.rdma)
    return LiveResult(report, rates, found.rounds, found.blames, seconds, found.unsettled)


def _checked(hosts: list[Host]) -> list[Host]:
    twice = [name for name, times in Counter(h.name for h in hosts).items() if times > 1]
    problems = [Diagnostic(f"{name} is listed twice", hint="list every host once") for name in twice]
    if problems or not hosts:
        raise InputError(problems or "no hosts to check")
    return hosts


def _node_options(options: LiveOptions) -> NodeOptions:
    """Without the node stage, nodes report what they have, not how fast it is."""
    if "node" in options.stages:
        return options.node
    return replace(options.node, rates=False, storage=None)


def _clocks(
    agent_pool: AgentPool, greetings: Mapping[int, Reply[msg.Hello]], timeout_s: float
) -> dict[int, Offset | None]:
    """Offset of each host's clock from ours, by the shortest of several round trips."""
    trips: dict[int, list[tuple[float, float, float]]] = {n: [] for n in greetings}
    for turn in range(_TRIPS):
        for n in [
            n for n in trips if greetings[n].alive and (len(trips[n]) == turn)
        ]:  # skip hosts that missed a reply
            # One at a time: with many at once, we would be what delays them.
            sent = time.time()
            reply = agent_pool.ask({(n, 0): msg.Ping()}, limit_s=min(timeout_s, _PING_S), wait_s=0.0)[n, 0]
            if reply.value is not None:
                trips[n].append((sent, reply.value.clock, time.time()))
    return {n: offset_of(found) for n, found in trips.items()}


def _report(bench: LiveBench, found: Localised, options: LiveOptions) -> Report:
    """All findings together. A finding that only states that a host is unreachable is accompanied by the reason."""
    facts = {host.name: bench.facts.get(host.name) for host in bench.hosts}
    report = Report(())
    if "node" in options.stages:
        report = judge_stage(facts, plan=options.plan, port_gbit_s=options.port_gbit_s)
    gone = {f.target.node for f in found.findings if f.code == "MSR011" and f.target.node is not None}
    entries = [*live_judge.hosts(bench, gone), *bench.findings]
    if found.case is not None:
        algorithm = ib_pair.TOOL if bench.rdma and bench.perftest else f"{bench.backend} send and receive"
        entries += live_judge.pairs(found.case, bench.outcomes, algorithm)
    entries += live_judge.nccl(bench)
    compared, judged = live_judge.inside(bench)
    report = replace(report, judged=(*report.judged, *judged))
    return report.also([*entries, *compared, *(f for f in found.findings if not _said_by_nodes(f))])


def _said_by_nodes(finding: Finding) -> bool:
    """A PASS for all nodes at once that each node's own outputs give or omit: without them a node did not pass."""
    return finding.verdict == "PASS" and finding.code in _BY_NODES
