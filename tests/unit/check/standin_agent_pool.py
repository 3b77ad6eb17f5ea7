"""A agent pool whose hosts are GPU nodes that a test describes: it replies to orders as agents on such nodes would.

`ask` has the meaning of agent pool.AgentPool.ask: notes are passed on, worlds of ranks bring a result once all members have their orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from node_facts import gpu_node

from seatrial.check.blame.infer import nic_bound
from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import Key, Reply
from seatrial.check.live.hosts import Host

GPUS = 8
INSIDE_GB_S = 478.0  # busbw of a healthy H200 node (published measurements)
NO_DEVICE = " Did not detect devices \n If device exists, check if driver is up\n Unable to find the Infiniband/RoCE device\n"


@dataclass
class Nodes:
    """What there is to measure: Gb/s by host and rail, and what is odd about some of them."""

    count: int
    rails: list[list[float]] = field(default_factory=list)
    perftest: set[int] = field(default_factory=set)  # hosts that have it
    ports_down: set[tuple[int, int]] = field(default_factory=set)  # by ib_write_bw's word
    wrong: set[int] = field(default_factory=set)  # hosts that sum wrongly
    nccl_nodes: int | None = None  # what NCCL counts, if not the hosts
    inside: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rails = self.rails or [[392.0] * GPUS for _ in range(self.count)]
        self.perftest = self.perftest or set(range(self.count))


class StandinAgentPool:
    """As agent pool.AgentPool, of the nodes in `nodes`, which a test sets."""

    nodes: Nodes

    def __init__(self, hosts: Sequence[Host], python: str | None = None) -> None:
        self.hosts = list(hosts)

    def __enter__(self) -> StandinAgentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def greet(self, timeout_s: float) -> dict[int, Reply[msg.Hello]]:
        return {
            n: Reply(
                msg.Hello(
                    version="1",
                    python="3.12",
                    pid=1,
                    host=f"internal-{n}",
                    machine=f"boot {n}",
                    port=5000 + n,
                    gpus=GPUS,
                    rdma=[f"mlx5_{r}" for r in range(GPUS)],
                )
            )
            for n in range(self.nodes.count)
        }

    def ask(
        self,
        orders: Mapping[Key, msg.Order[Any]],
        *,
        limit_s: float,
        listening: Callable[[Key, int], Mapping[Key, msg.Order[Any]]] | None = None,
        wait_s: float = 5.0,
        failed: Callable[[Reply[Any]], bool] | None = None,
    ) -> dict[Key, Reply[Any]]:
        replies: dict[Key, Reply[Any]] = {}
        worlds: dict[int, dict[Key, msg.RunRanks]] = {}
        serving: dict[int, Key] = {}  # port -> who listens
        waiting = list(orders.items())
        while waiting:
            key, order = waiting.pop(0)
            match order:
                case msg.RunRanks():
                    members = worlds.setdefault(key[1], {})
                    members[key] = order
                    if order.store is None:
                        assert listening is not None
                        waiting += list(listening(key, 7000).items())
                    if sum(len(o.ranks) for o in members.values()) == order.world_size:
                        replies |= self._world(members)
                case msg.RunTool(listen=int(port)):
                    assert listening is not None
                    serving[port] = key
                    waiting += list(listening(key, port).items())
                case msg.RunTool(argv) if "-p" in argv:
                    server = serving[int(argv[argv.index("-p") + 1])]
                    replies |= self._perftest(server, key, argv)
                case _:
                    replies[key] = Reply(self._simple(key[0], order))
        return replies

    def _simple(self, host: int, order: msg.Order[Any]) -> msg.Message:
        match order:
            case msg.MeasureNode():
                return msg.NodeMeasured(gpu_node(GPUS))
            case msg.Reach(targets):
                return msg.Reached([True] * len(targets), [""] * len(targets))
            case msg.RunTool():
                there = host in self.nodes.perftest
                return msg.ToolResult(0, "Version: 6.06\n") if there else msg.ToolResult(None)
            case msg.FindPorts(count):
                return msg.Ports([20000 + host * 100 + n for n in range(count)])
            case msg.Ping():
                return msg.Clock(0.0)
        assert isinstance(order, msg.Prepare)
        return msg.Prepared("2.13.0")

    def _perftest(self, server: Key, client: Key, argv: list[str]) -> dict[Key, Reply[Any]]:
        rail = int(argv[argv.index("-d") + 1].removeprefix("mlx5_"))
        assert argv[-1] == self.hosts[server[0]].address
        down = [key for key in (server, client) if (key[0], rail) in self.nodes.ports_down]
        if down:
            said = msg.ToolResult(1, err=" Port number 1 state is Down\n")
            other = msg.ToolResult(1, err=f"Couldn't connect to {argv[-1]}:18515\n")
            return {key: Reply(said if key in down else other) for key in (server, client)}
        rate = min(self.nodes.rails[n][rail] for n in (server[0], client[0]))
        text = (
            "                    RDMA_Write BW Test\n"
            f" Device         : mlx5_{rail}\n Number of qps   : 4\n"
            f"{'-' * 80}\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
            f" 8388608    52345            0.00               {rate:.2f}             {rate / 8 / 8.388608 * 1e-3:.6f}\n{'-' * 80}\n"
        )
        return {key: Reply(msg.ToolResult(0, text)) for key in (server, client)}

    def _world(self, members: Mapping[Key, msg.RunRanks]) -> dict[Key, Reply[Any]]:
        spec = next(iter(members.values()))
        owner = {rank: key[0] for key, order in members.items() for rank in order.ranks}
        gpu = {r: g for o in members.values() for r, g in zip(o.ranks, o.gpus, strict=True)}
        hosts = {key[0] for key in members}

        def flow(sender: int, receiver: int) -> msg.Flow:
            rail = gpu[sender] if spec.hca is None else int(spec.hca.partition(":")[0].removeprefix("mlx5_"))
            value = min(self.nodes.rails[owner[r]][rail] for r in (sender, receiver))
            return msg.Flow(sender, receiver, value, 1 << 28)

        inside = min(self.nodes.inside.get(h, INSIDE_GB_S) for h in hosts)
        slowest = min(min(self.nodes.rails[h]) for h in hosts)
        busbw = min(inside, float(nic_bound(slowest, GPUS, len(hosts)))) if len(hosts) > 1 else inside
        ranks = spec.world_size
        factor = 2 * (ranks - 1) / ranks
        replies = {}
        for key, order in members.items():
            told = []
            for rank in order.ranks:
                flows = [flow(a, b) for a, b, _ in spec.flows if b == rank]
                wrong = int(key[0] in self.nodes.wrong)
                sums = [msg.AllReduces(size, [size * factor / busbw / 1e9] * 3, wrong) for size in spec.sizes]
                nodes = self.nodes.nccl_nodes if self.nodes.nccl_nodes and len(hosts) > 1 else len(hosts)
                who = f"internal-{key[0]}:11:12 [{gpu[rank]}] NCCL INFO"
                lines = [
                    f"{who} Using network IB",
                    f"{who} comm 0x1 rank {rank} nRanks {ranks} nNodes {nodes} localRanks 8 localRank 0 MNNVL 0",
                    f"{who} 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels",
                ]
                told.append(msg.RankResult(rank, msg.Measured(flows, sums, whole=True), "", lines))
            replies[key] = Reply(msg.RanksEnded(told))
        return replies
