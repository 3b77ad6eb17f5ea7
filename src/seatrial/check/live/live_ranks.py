"""Groups of ranks on the agents: their members, their specs, and their combined measurements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool, Key, Reply
from seatrial.check.live.hosts import Host
from seatrial.check.live.messages import Flow

# Messages of a rank whose partner or network path failed. Any other message is about the rank's own host.
_OF_OTHERS = re.compile(
    r"time[d ]*-?out|connect|closed|reset|refused|peer|broken pipe|no route|unreachable|no data received|no result within"
    r"|cancelled|another rank|store|socket|remote|unhandled system error|ncclRemoteError|aborted",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RankGroup:
    """Ranks of some hosts together. `flows`: (sender, receiver, direction), as of `RunRanks`.

    `gpus` are the CUDA devices of each member, one rank each; on CPU one rank per host.
    """

    members: tuple[int, ...]  # positions of hosts
    gpus: tuple[tuple[int, ...], ...]
    flows: tuple[tuple[int, int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    hca: str | None = None

    @property
    def size(self) -> int:
        """How many ranks."""
        return sum(map(len, self.gpus))

    def ranks(self, place: int) -> list[int]:
        """The ranks of the member at `place`."""
        first = sum(len(g) for g in self.gpus[:place])
        return list(range(first, first + len(self.gpus[place])))


@dataclass(frozen=True)
class Sum:
    """All-reduces of one size. A repeat takes as long as its slowest rank; `seconds` is the median."""

    size_bytes: int
    seconds: float
    repeats: int
    wrong: int

    def busbw(self, ranks: int) -> float:
        """GB/s as nccl-tests counts it: algbw x 2 (n - 1) / n."""
        return self.size_bytes / self.seconds * 2 * (ranks - 1) / ranks / 1e9


@dataclass
class Outcome:
    """The result of a rank group. Agents of `silent` members did not reply; `own` failed for a reason of their own."""

    group: RankGroup
    flows: list[Flow] = field(default_factory=list)
    sums: list[Sum] = field(default_factory=list)
    silent: dict[int, str] = field(default_factory=dict)  # host -> why
    own: dict[int, str] = field(default_factory=dict)
    whole: bool = True
    nccl: list[tuple[int, str]] = field(default_factory=list)  # host, line of NCCL_DEBUG
    why: str = ""  # the reason if it is incomplete

    def direction(self, number: int) -> list[Flow]:
        """The measured flows of one direction."""
        wanted = {(a, b) for a, b, w in self.group.flows if w == number}
        return [f for f in self.flows if (f.sender, f.receiver) in wanted]


def batches(groups: Sequence[RankGroup], machines: Sequence[str]) -> list[list[int]]:
    """Which groups may run at once: no two of a batch have hosts on one machine, whose processors they would share."""
    found: list[tuple[list[int], set[str]]] = []
    for number, group in enumerate(groups):
        used = {machines[m] for m in group.members}
        for batch, taken in found:
            if not taken & used:
                batch.append(number)
                taken |= used
                break
        else:
            found.append(([number], used))
    return [batch for batch, _ in found]


class Ranks:
    """Runs rank groups on an agent pool."""

    def __init__(
        self,
        agent_pool: AgentPool,
        hosts: Sequence[Host],
        machines: Sequence[str],
        device: Literal["cpu", "cuda"],
    ) -> None:
        self.agent_pool, self.hosts, self.machines, self.device = agent_pool, hosts, machines, device

    def run(self, groups: Sequence[RankGroup], durations: msg.Durations, limit_s: float) -> list[Outcome]:
        """Run all groups, as many at once as possible; outcomes in the same order."""
        outcomes: dict[int, Outcome] = {}
        for batch in batches(groups, self.machines):
            orders = {(groups[k].members[0], k): self._order(groups[k], 0, None, durations) for k in batch}

            def others(key: Key, port: int) -> Mapping[Key, msg.RunRanks]:
                group = groups[key[1]]
                store = msg.Endpoint(self.hosts[key[0]].address, port)
                return {
                    (host, key[1]): self._order(group, place, store, durations)
                    for place, host in enumerate(group.members)
                    if place
                }

            replies = self.agent_pool.ask(orders, limit_s=limit_s, listening=others, failed=_failed)
            for k in batch:
                mine = {key[0]: reply for key, reply in replies.items() if key[1] == k}
                outcomes[k] = outcome(groups[k], mine)
        return [outcomes[k] for k in range(len(groups))]

    def _order(
        self, group: RankGroup, place: int, store: msg.Endpoint | None, durations: msg.Durations
    ) -> msg.RunRanks:
        host = self.hosts[group.members[place]]
        other = group.members[1 if place == 0 and len(group.members) > 1 else 0]
        return msg.RunRanks(
            ranks=group.ranks(place),
            gpus=list(group.gpus[place]),
            world_size=group.size,
            device=self.device,
            backend="nccl" if self.device == "cuda" else "gloo",
            store=store,
            listen=host.address,
            interface=host.interface,
            toward=self.hosts[other].address,
            flows=[list(f) for f in group.flows],
            sizes=list(group.sizes),
            durations=durations,
            hca=group.hca,
        )


def _failed(reply: Reply[msg.RanksEnded]) -> bool:
    return reply.value is None or any(r.failed for r in reply.value.ranks)


def outcome(group: RankGroup, replies: Mapping[int, Reply[msg.RanksEnded]]) -> Outcome:
    """Combine the members' replies. A member that was not asked, because the first one failed before, has no reply."""
    result = Outcome(group)
    times: dict[int, list[list[float]]] = {}
    wrong: dict[int, int] = {}
    rates: dict[tuple[int, int], Flow] = {}
    for host, reply in replies.items():
        if not reply.alive:
            result.silent[host] = reply.problem
        elif reply.value is None:
            result.own[host] = reply.problem
        for rank in [] if reply.value is None else reply.value.ranks:
            result.nccl += [(host, line) for line in rank.nccl]
            if rank.failed:
                result.why = result.why or rank.failed
                if not _OF_OTHERS.search(rank.failed):
                    result.own.setdefault(host, rank.failed)
            for flow in rank.measured.flows:
                rates[flow.sender, flow.receiver] = flow
            for one in rank.measured.all_reduce:
                times.setdefault(one.size_bytes, []).append(one.seconds)
                wrong[one.size_bytes] = wrong.get(one.size_bytes, 0) + one.wrong
    result.whole = not (result.silent or result.own or result.why) and len(replies) == len(group.members)
    result.why = result.why or "; ".join([*result.silent.values(), *result.own.values()])
    result.flows = [flow for _, flow in sorted(rates.items())]
    for size, by_rank in sorted(times.items()):
        # A repeat ends with its slowest rank; a rank that was cut short has fewer repeats.
        slowest = [max(repeat) for repeat in zip(*by_rank, strict=False)]
        if slowest and len(by_rank) == group.size:
            result.sums.append(Sum(size, median(slowest), len(slowest), wrong[size]))
    return result
