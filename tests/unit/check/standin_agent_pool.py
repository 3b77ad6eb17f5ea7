"""A agent pool whose hosts are GPU nodes that a test describes: it replies to orders as agents on such nodes would.

`ask` has the meaning of agent pool.AgentPool.ask: notes are passed on, worlds of ranks bring a result once all members have their orders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from node_facts import gpu_node

from seatrial.check.blame.infer import nic_bound
from seatrial.check.live.agent_pool import Key, Order, Reply
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
    asked: list[str] = field(default_factory=list)

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

    def greet(self, timeout_s: float) -> dict[int, Reply]:
        return {
            n: Reply(
                {
                    "version": "1",
                    "python": "3.12",
                    "pid": 1,
                    "host": f"internal-{n}",
                    "machine": f"boot {n}",
                    "port": 5000 + n,
                    "gpus": GPUS,
                    "rdma": [f"mlx5_{r}" for r in range(GPUS)],
                }
            )
            for n in range(self.nodes.count)
        }

    def ask(
        self,
        orders: Mapping[Key, Order],
        *,
        limit_s: float,
        note: Callable[[Key, Mapping[str, Any]], Mapping[Key, Order]] | None = None,
        wait_s: float = 5.0,
        failed: Callable[[Reply], bool] | None = None,
    ) -> dict[Key, Reply]:
        replies: dict[Key, Reply] = {}
        worlds: dict[int, dict[Key, Order]] = {}
        serving: dict[int, Key] = {}  # port -> who listens
        waiting = list(orders.items())
        while waiting:
            key, order = waiting.pop(0)
            self.nodes.asked.append(order["do"])
            if order["do"] == "ranks":
                members = worlds.setdefault(key[1], {})
                members[key] = order
                if order["spec"]["store"] is None:
                    assert note is not None
                    waiting += list(note(key, {"port": 7000}).items())
                if sum(len(o["spec"]["ranks"]) for o in members.values()) == order["spec"]["world"]:
                    replies |= self._world(members)
            elif order["do"] == "run" and "listen" in order:
                assert note is not None
                serving[order["listen"]] = key
                waiting += list(note(key, {"listening": order["listen"]}).items())
            elif order["do"] == "run" and "-p" in order["argv"]:
                server = serving[int(order["argv"][order["argv"].index("-p") + 1])]
                replies |= self._perftest(server, key, order["argv"])
            else:
                replies[key] = Reply(self._simple(key[0], order))
        return replies

    def _simple(self, host: int, order: Order) -> dict[str, Any]:
        if order["do"] == "node":
            return {"rc": 0, "out": json.dumps(gpu_node(GPUS)), "err": ""}
        if order["do"] == "reach":
            found = {"reached": [True] * len(order["targets"]), "why": []}
            return {"rc": 0, "out": json.dumps(found), "err": ""}
        if order["do"] == "run":
            return (
                {"absent": True}
                if host not in self.nodes.perftest
                else {"rc": 0, "out": "Version: 6.06\n", "err": ""}
            )
        if order["do"] == "port":
            return {"ports": [20000 + host * 100 + n for n in range(order["count"])]}
        return {"clock": 0.0} if order["do"] == "ping" else {"torch": "2.13.0"}

    def _perftest(self, server: Key, client: Key, argv: list[str]) -> dict[Key, Reply]:
        rail = int(argv[argv.index("-d") + 1].removeprefix("mlx5_"))
        assert argv[-1] == self.hosts[server[0]].address
        down = [key for key in (server, client) if (key[0], rail) in self.nodes.ports_down]
        if down:
            said = {"rc": 1, "out": "", "err": " Port number 1 state is Down\n"}
            other = {"rc": 1, "out": "", "err": f"Couldn't connect to {argv[-1]}:18515\n"}
            return {key: Reply(said if key in down else other) for key in (server, client)}
        rate = min(self.nodes.rails[n][rail] for n in (server[0], client[0]))
        text = (
            "                    RDMA_Write BW Test\n"
            f" Device         : mlx5_{rail}\n Number of qps   : 4\n"
            f"{'-' * 80}\n #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
            f" 8388608    52345            0.00               {rate:.2f}             {rate / 8 / 8.388608 * 1e-3:.6f}\n{'-' * 80}\n"
        )
        return {key: Reply({"rc": 0, "out": text, "err": ""}) for key in (server, client)}

    def _world(self, members: Mapping[Key, Order]) -> dict[Key, Reply]:
        spec = next(iter(members.values()))["spec"]
        owner = {rank: key[0] for key, order in members.items() for rank in order["spec"]["ranks"]}
        gpu = {
            r: g for o in members.values() for r, g in zip(o["spec"]["ranks"], o["spec"]["gpus"], strict=True)
        }
        hosts = {key[0] for key in members}

        def flow(sender: int, receiver: int) -> dict[str, Any]:
            rail = (
                gpu[sender]
                if spec["hca"] is None
                else int(spec["hca"].partition(":")[0].removeprefix("mlx5_"))
            )
            value = min(self.nodes.rails[owner[r]][rail] for r in (sender, receiver))
            return {"sender": sender, "receiver": receiver, "gbit_s": value, "message_bytes": 1 << 28}

        inside = min(self.nodes.inside.get(h, INSIDE_GB_S) for h in hosts)
        slowest = min(min(self.nodes.rails[h]) for h in hosts)
        busbw = min(inside, float(nic_bound(slowest, GPUS, len(hosts)))) if len(hosts) > 1 else inside
        ranks = spec["world"]
        factor = 2 * (ranks - 1) / ranks
        replies = {}
        for key, order in members.items():
            told = []
            for rank in order["spec"]["ranks"]:
                flows = [flow(a, b) for a, b, _ in spec["flows"] if b == rank]
                sums = [
                    {
                        "bytes": size,
                        "seconds": [size * factor / busbw / 1e9] * 3,
                        "wrong": int(key[0] in self.nodes.wrong),
                    }
                    for size in spec["sizes"]
                ]
                nodes = self.nodes.nccl_nodes if self.nodes.nccl_nodes and len(hosts) > 1 else len(hosts)
                who = f"internal-{key[0]}:11:12 [{gpu[rank]}] NCCL INFO"
                lines = [
                    f"{who} Using network IB",
                    f"{who} comm 0x1 rank {rank} nRanks {ranks} nNodes {nodes} localRanks 8 localRank 0 MNNVL 0",
                    f"{who} 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels",
                ]
                measured = {"setup_s": 1.0, "flows": flows, "all_reduce": sums}
                told.append({"rank": rank, "nccl": lines, "measured": measured, "whole": True})
            replies[key] = Reply({"ranks": told})
        return replies
