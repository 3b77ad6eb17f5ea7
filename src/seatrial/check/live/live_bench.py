"""Measures real hosts: a `localise.Bench` on a pool of agents.

On a cluster all pairs of a round measure at once. Hosts that share one machine (virtual hosts, network namespaces,
containers) take turns: otherwise their processors would be the limit, and one host would affect another's reading.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import numpy as np

from seatrial.check.blame.infer import Readings
from seatrial.check.blame.localise import GroupReadings
from seatrial.check.blame.nodes import Bools, Floats, Ints, NodeStage
from seatrial.check.blame.rounds import GroupRound, Round
from seatrial.check.judging.findings import Finding
from seatrial.check.live import ib_pair
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool, Key, Reply
from seatrial.check.live.hosts import Host
from seatrial.check.live.live_ranks import Outcome, RankGroup, Ranks
from seatrial.check.live.presence import PresenceCheck
from seatrial.check.node.columns import columns
from seatrial.check.node.node_stage import NodeOptions

MIB = 1 << 20
# From the smallest, bound by latency, to one that fills a link.
SIZES = {"cpu": (64 << 10, MIB, 8 * MIB), "cuda": (MIB, 64 * MIB, 1024 * MIB)}
# Duration of a flow, and time limit for the repeats of one all-reduce size. On a GPU a flow of 0.5 s is 25 GB.
_FLOW_S, _SUM_S = {"cpu": 0.8, "cuda": 0.5}, {"cpu": 0.3, "cuda": 0.5}
# Without a message from a rank group: nothing gets through. Ten times what a healthy flow takes.
_STALL_S = 15.0
_NODE_MARGIN_S = 15.0  # beyond the node stage's own time: to start Python, to end what hangs
_TIMES = 2  # that a host's ranks must fail for their own reasons before the host is at fault


@dataclass
class HostProblems:
    """What hosts could not do, by position, for the report."""

    unable: dict[int, str] = field(default_factory=dict)
    failed: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    # No result of the node stage although the agent replies.
    stage: dict[int, str] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)


class LiveBench:
    """The agent pool's hosts by position. `report` is called with a line for each step."""

    def __init__(
        self,
        agent_pool: AgentPool,
        hosts: Sequence[Host],
        greetings: Mapping[int, Reply[msg.Hello]],
        options: NodeOptions,
        *,
        device: Literal["cpu", "cuda", "auto"] = "auto",
        sizes: tuple[int, ...] = (),
        timeout_s: float = 60.0,
        ranks_wanted: bool = True,
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.agent_pool, self.hosts, self.options, self.report = agent_pool, list(hosts), options, report
        self.hello = {n: r.value for n, r in greetings.items() if r.value is not None}
        self.machines = [self.hello[n].machine if n in self.hello else f"host {n}" for n in range(len(hosts))]
        self.wanted_device, self.wanted_sizes, self.timeout_s = device, sizes, timeout_s
        self.ranks_wanted = ranks_wanted
        self.problems = HostProblems()
        self.presence = PresenceCheck(agent_pool, hosts, self.hello)
        self.presence.add_silent({n: r.problem for n, r in greetings.items() if r.value is None})
        self.facts: dict[str, msg.NodeFacts | None] = {}
        self.stage: NodeStage | None = None
        self.seconds: dict[str, float] = defaultdict(float)
        self.outcomes: list[Outcome] = []
        self.inside: dict[int, Outcome] = {}
        self.findings: list[Finding] = []
        self.device: Literal["cpu", "cuda"] = "cpu"
        self.perftest = False

    @property
    def shared(self) -> bool:
        """Whether any two hosts share one machine."""
        return len(set(self.machines)) < len(self.machines)

    @property
    def backend(self) -> str:
        """The backend of torch's collectives."""
        return "NCCL" if self.device == "cuda" else "gloo"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Message sizes of the all-reduce, bytes."""
        return self.wanted_sizes or SIZES[self.device]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time that the block takes to the stage."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] += time.monotonic() - begin

    # -- nodes

    def nodes(self, which: Ints) -> NodeStage:
        """Run the node stage on these hosts."""
        with self.timed("node"):
            facts: dict[int, msg.NodeFacts | None] = {}
            for batch in self._batches([int(n) for n in which]):
                facts |= self._measure(batch)
            named = {self.hosts[int(n)].name: facts[int(n)] for n in which}
            first = self.stage is None
            stage = columns(named, self.stage)
            for name, value in named.items():
                if value is not None or name not in self.facts:
                    self.facts[name] = value
        if first:
            self.stage = stage
            self._begin_ranks(stage)
            stage.able = np.array([n not in self.problems.unable for n in range(len(self.hosts))])
        return stage

    def _batches(self, which: list[int]) -> list[list[tuple[int, bool]]]:
        """Which hosts measure at once, and whether each loads its machine.

        Of hosts without GPUs on one machine only the first loads it: the others would measure the same processors.
        """
        by_machine: dict[str, list[int]] = defaultdict(list)
        for n in which:
            by_machine[self.machines[n]].append(n)
        if any(n in self.hello and self.hello[n].gpus for n in which) and self.shared:
            count = max(map(len, by_machine.values()))
            return [[(m[t], True) for m in by_machine.values() if t < len(m)] for t in range(count)]
        first = [[(m[0], True) for m in by_machine.values()]]
        rest = [(n, False) for m in by_machine.values() for n in m[1:]]
        return [*first, rest] if rest else first

    def _measure(self, batch: Sequence[tuple[int, bool]]) -> dict[int, msg.NodeFacts | None]:
        with_load = sum(load for _, load in batch)
        alone = "" if with_load == len(batch) else ", without load: they share a machine"
        self.report(f"node stage: {_hosts(len(batch))}{alone}")
        orders: dict[Key, msg.MeasureNode] = {}
        for n, load in batch:
            options = replace(
                self.options,
                rates=self.options.rates and load,
                storage=self.options.storage if load else None,
                interface=self.hosts[n].interface or self.options.interface,
            )
            other = next((h.address for m, h in enumerate(self.hosts) if m != n), None)
            orders[n, 0] = msg.MeasureNode(asdict(options), other)
        replies = self.agent_pool.ask(orders, limit_s=self.options.seconds + _NODE_MARGIN_S)
        found: dict[int, msg.NodeFacts | None] = {}
        for (n, _), reply in replies.items():
            found[n] = None if reply.value is None else reply.value.facts
            if not reply.alive:
                self.presence.add_silent({n: reply.problem})
            elif reply.value is None:
                self.problems.stage[n] = reply.problem
            else:
                self.problems.stage.pop(n, None)
        return found

    def _begin_ranks(self, stage: NodeStage) -> None:
        """Choose the device that ranks run on, import torch on the hosts, and measure what each host can do alone."""
        slots = stage.present.sum(axis=1)
        alive = [n for n in range(len(self.hosts)) if stage.answered[n]]
        can = bool(alive) and not self.shared and all(slots[n] > 0 for n in alive)
        has = can and stage.gpu is not None
        self.device = (
            "cuda" if self.wanted_device == "cuda" or (self.wanted_device == "auto" and has) else "cpu"
        )
        if not self.ranks_wanted or (len(alive) < 2 and self.device == "cpu"):
            return  # no partner to measure with
        with self.timed("pair"):
            self.report(f"importing torch on {_hosts(len(alive))}")
            prepare = {(n, 0): msg.Prepare() for n in alive}
            replies = self.agent_pool.ask(prepare, limit_s=max(self.timeout_s, 120.0))
            for (n, _), reply in replies.items():
                if not reply.alive:
                    self.presence.add_silent({n: reply.problem})
                elif reply.value is None:
                    self.problems.unable[n] = reply.problem
                else:
                    self.problems.versions[n] = reply.value.torch
            self._begin_perftest(alive)
            self._inside([n for n in alive if n not in self.problems.unable])

    def _begin_perftest(self, alive: Sequence[int]) -> None:
        """Find out why hosts without RDMA devices have none, and whether the others have perftest."""
        bare = [n for n in alive if not self.hello[n].rdma]
        rest = [n for n in alive if self.hello[n].rdma]
        orders = {(n, 0): msg.RunTool([ib_pair.TOOL]) for n in bare}
        orders |= {(n, 0): msg.RunTool([ib_pair.TOOL, "--version"]) for n in rest}
        replies = self.agent_pool.ask(orders, limit_s=10.0)
        for n in bare:
            if (value := replies[n, 0].value) is not None:
                self.findings += ib_pair.without_devices(value, self.hosts[n].name)
        have = [n for n in rest if (v := replies[n, 0].value) is not None and not v.absent]
        self.perftest = bool(rest) and len(have) == len(rest)
        for n in rest:
            if n not in have:
                value = replies[n, 0].value or msg.ToolResult(None)
                self.findings += ib_pair.end_result(value, self.hosts[n].name).findings

    def _inside(self, which: Sequence[int]) -> None:
        """All-reduces over the GPUs of each single host."""
        assert self.stage is not None
        many = [n for n in which if self.device == "cuda" and self.stage.present[n].sum() > 1]
        if many:
            self.report(f"all-reduce inside {_hosts(len(many))}")
            groups = [RankGroup((n,), self._gpus([n]), sizes=self.sizes) for n in many]
            self.inside = dict(zip(many, self._run_groups(groups), strict=True))

    # -- pairs

    def pairs(self, round_: Round) -> Readings:
        """One round of pairs: send and receive in both directions, an all-reduce, and with RDMA each rail alone."""
        with self.timed("pair"):
            self.report(f"pairs, round {round_.number} ({round_.purpose}): {len(round_.pairs)}")
            outcomes, absent = self._present(self._pair_groups(round_))
            rails = round_.rails.shape[1]
            gbit_s = np.full((len(round_.pairs), rails), np.nan)
            busbw = np.full(len(round_.pairs), np.nan)
            for k, result in enumerate(outcomes):
                if result.sums:
                    busbw[k] = result.sums[-1].busbw(result.group.size)
                if not self.rdma and rails:
                    gbit_s[k, 0] = self._reading(result, absent)
            if self.rdma:
                self._rails(round_, gbit_s, outcomes, absent)
            answered = np.ones((len(round_.pairs), 2), dtype=bool)
            for k, pair in enumerate(round_.pairs):
                silent = {*outcomes[k].silent, *absent}
                answered[k] = [int(n) not in silent for n in pair]
            busbw[~round_.collective] = np.nan
            both: Bools = np.logical_and(answered[:, 0], answered[:, 1])
            gbit_s[np.logical_or(~round_.rails, ~both[:, None])] = np.nan
            return Readings(gbit_s, busbw, answered)

    @property
    def rdma(self) -> bool:
        """Whether the rails are RDMA ports; else there is one rail, the network device that TCP uses."""
        if self.stage is None:
            return False
        names = {d.partition("/")[0] for d in self.stage.devices}
        return any(names & set(h.rdma) for h in self.hello.values())

    def _gpus(self, hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """One rank per GPU, the same number on each host (the smallest); on CPU one rank per host."""
        assert self.stage is not None
        if self.device == "cpu":
            return ((0,),) * len(hosts)
        count = min(max(1, int(self.stage.present[h].sum())) for h in hosts)
        return (tuple(range(count)),) * len(hosts)

    def _pair_groups(self, round_: Round) -> list[RankGroup]:
        groups = []
        for k, (a, b) in enumerate(round_.pairs):
            gpus = self._gpus([int(a), int(b)])
            count = len(gpus[0])
            there = [(i, i + count, 0) for i in range(count)]
            back = [(i + count, i, 1) for i in range(count)]
            sizes = self.sizes if round_.collective[k] else ()
            groups.append(RankGroup((int(a), int(b)), gpus, (*there, *back), sizes))
        return groups

    def _present(self, groups: Sequence[RankGroup]) -> tuple[list[Outcome], set[int]]:
        """Run the groups whose members are all present; returns all groups' outcomes, and the hosts absent by now."""
        absent = self.presence.absent()
        able = [k for k, w in enumerate(groups) if len(w.members) > 1 and not absent & set(w.members)]
        outcomes = [Outcome(w, whole=False, why="some members are absent") for w in groups]
        for k, result in zip(able, self._run_groups([groups[k] for k in able]), strict=True):
            outcomes[k] = result
        if not all(outcomes[k].whole for k in able):
            absent |= self.presence.absent()
        return outcomes, absent

    def _run_groups(self, groups: Sequence[RankGroup]) -> list[Outcome]:
        ranks = Ranks(self.agent_pool, self.hosts, self.machines, self.device)
        durations = msg.Durations(_FLOW_S[self.device], _SUM_S[self.device], _STALL_S)
        outcomes = ranks.run(groups, durations, self.timeout_s)
        self.outcomes += outcomes
        for result in outcomes:
            self.presence.add_silent(result.silent)
            for n, why in result.own.items():
                self.problems.failed[n].append(why)
        return outcomes

    def _reading(self, result: Outcome, absent: set[int]) -> float:
        """Gb/s of the slower direction. NaN: nothing known of the link; 0: nothing got through, though both are present."""
        if result.silent or result.own or absent & set(result.group.members):
            return np.nan
        rates = []
        for direction in (0, 1):
            flows = result.direction(direction)
            if len(flows) < len(result.group.gpus[0]):
                # Hosts that share a machine may only have waited for its processors.
                return np.nan if self.shared else 0.0
            rates.append(sum(f.gbit_s for f in flows))
        return min(rates)

    def _rails(self, round_: Round, gbit_s: Floats, outcomes: Sequence[Outcome], absent: set[int]) -> None:
        """Fill in each rail: by ib_write_bw, or without it by NCCL restricted to that rail's port."""
        assert self.stage is not None
        if self.perftest:
            # Where TCP does not get through, perftest's two ends cannot connect either.
            met = [k for k, o in enumerate(outcomes) if not o.silent and not absent & set(o.group.members)]
            for k, rail, value, found in ib_pair.rates(
                self.agent_pool, self.hosts, self.stage.devices, round_, met
            ):
                gbit_s[k, rail] = value
                self.findings += [f for f in found if f not in self.findings]
        elif self.device == "cuda":
            for rail, device in enumerate(self.stage.devices):
                used = [k for k in range(len(round_.pairs)) if round_.rails[k, rail]]
                groups = []
                for k in used:
                    count = len(outcomes[k].group.gpus[0])
                    gpu = ((rail % count,),) * 2
                    hca = device.replace("/", ":")
                    groups.append(RankGroup(outcomes[k].group.members, gpu, ((0, 1, 0), (1, 0, 1)), hca=hca))
                for k, result in zip(used, self._run_groups(groups), strict=True):
                    gbit_s[k, rail] = self._reading(result, absent)

    # -- groups

    def groups(self, round_: GroupRound) -> GroupReadings:
        """One round of all-reduces."""
        with self.timed("all"):
            count = len(round_.groups)
            self.report(
                f"groups of {round_.size}, round {round_.number}: {count} all-reduce{'s' * (count > 1)}"
            )
            groups = []
            for group in round_.groups:
                members = tuple(int(n) for n in group)
                groups.append(RankGroup(members, self._gpus(members), sizes=self.sizes))
            outcomes, absent = self._present(groups)
            busbw = np.full(len(groups), np.nan)
            answered = np.ones(len(self.hosts), dtype=bool)
            for k, result in enumerate(outcomes):
                gone = absent & set(result.group.members)
                if result.sums and not gone:
                    busbw[k] = result.sums[-1].busbw(result.group.size)
                answered[[*result.silent, *gone]] = False
            return GroupReadings(busbw, answered)

    # -- presence

    def answer(self, which: Ints) -> Bools:
        """Whether each of these hosts answers now, to the conductor and to the other hosts."""
        absent = self.presence.absent(network=self.ranks_wanted)
        return np.array([int(n) not in absent for n in which], dtype=bool)

    def fails_often(self) -> dict[int, str]:
        """Hosts whose ranks failed for a reason of their own more than once, with the last reason."""
        return {n: whys[-1] for n, whys in self.problems.failed.items() if len(whys) >= _TIMES}


def _hosts(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"
