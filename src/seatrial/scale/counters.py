"""Counters of the nodes during one run, compared with those of the first size. Pure except for reading run folders.

RDMA ports are read by each node's agent; TCP figures are the kernel's, from the ranks' connections. Some CNPs,
transmit wait and retransmissions are normal: they are a fault beyond fixed limits, and if there are more per byte than
at the first size, the baseline. What a node does not have is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seatrial.check.outputs.topology import Topology
from seatrial.hardware.counters import CONGESTION_SIGNALS, LIMITS, PortFault, Ports, changes, findings
from seatrial.hardware.tcp import Connection
from seatrial.record.folder import RunFolder
from seatrial.record.node_counters import GpuCounters, GpuUse, PortCounters, read_counters
from seatrial.record.stages import RankStages

_GROWN = 2.0  # factor per byte over the first size
_SIGNALS = {limit.counter: limit.signal for limit in LIMITS} | {"port_xmit_wait": "congestion"}
# TCP: minimum number of segments, and minimum share of all, assuming 1,448 bytes per segment. Our choice.
_LEAST_SEGMENTS, _SEGMENT_BYTES, _TCP_SHARE = 10, 1448, 0.001


@dataclass(frozen=True)
class Tcp:
    """Totals over the connections of a node's ranks to other nodes."""

    sent_bytes: int
    retransmitted: int  # segments

    @property
    def share(self) -> float:
        """Approximate share of retransmitted segments; segments may be larger than assumed."""
        return self.retransmitted * _SEGMENT_BYTES / self.sent_bytes


@dataclass(frozen=True)
class NodeCounters:
    """Counters of one node in one run."""

    node: int
    ports: Mapping[str, Mapping[str, Any]] | None  # port -> changes as in hardware.counters
    tcp: Tcp | None
    faults: tuple[PortFault, ...] = ()  # beyond the fixed limits
    host: str | None = None
    gpus: Mapping[str, GpuUse] | None = None  # by PCI address

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "node": self.node,
            "host": self.host,
            "ports": "not available" if self.ports is None else self.ports,
            "gpus": "not available" if self.gpus is None else {p: vars(g) for p, g in self.gpus.items()},
            "tcp": "not available" if self.tcp is None else {**vars(self.tcp), "share": self.tcp.share},
        }


def counters_of(
    folder: RunFolder,
    connections: Mapping[int, Sequence[Connection]],
    nodes: int,
    ranks_per_node: int,
    hosts: Sequence[str],
) -> tuple[NodeCounters, ...]:
    """The counters of each node of the run in `folder`. `connections`: by rank; `hosts`: by agent number."""
    found, agents = [], _agents(folder, nodes, ranks_per_node)
    for node in range(nodes):
        agent = agents.get(node, nodes)
        host = hosts[agent] if agent < len(hosts) else None
        read = read_counters(PortCounters, folder.port_counters(agent))  # none if the agent is unknown
        gpus = read_counters(GpuCounters, folder.gpu_counters(agent))
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        tcp = tcp_of(each for rank in ranks for each in connections.get(rank, ()))
        first, last, seconds = (None, None, 0.0) if read is None else (read.first, read.last, read.seconds)
        found.append(
            replace(
                of_node(node, first, last, seconds, tcp), host=host, gpus=None if gpus is None else gpus.gpus
            )
        )
    return tuple(found)


def _agents(folder: RunFolder, nodes: int, ranks_per_node: int) -> dict[int, int]:
    """Node by rank order -> agent number. They differ because agents are sorted by topology before ranks are numbered."""
    found = {}
    for agent in range(nodes):
        logs = folder.rank_log(1, agent, 0).parent.glob("rank*.log")
        ranks = [int(n) for log in logs if (n := log.stem.removeprefix("rank")).isdecimal()]
        if ranks:
            found[min(ranks) // ranks_per_node] = agent
    return found


def tcp_of(connections: Iterable[Connection]) -> Tcp | None:
    """Totals over connections; None if nothing was sent."""
    every = list(connections)
    sent = sum(each.sent_bytes for each in every)
    return Tcp(sent, sum(each.retransmitted for each in every)) if sent else None


def of_node(
    node: int, first: Ports | None, last: Ports | None, seconds: float, tcp: Tcp | None
) -> NodeCounters:
    """The node's counters from two readings of its ports, `seconds` apart, and its connections."""
    ports, faults = None, []
    if first is not None and last is not None:
        ports, faults = changes(first, last, seconds), findings(first, last, seconds)
    if tcp is not None and tcp.retransmitted >= _LEAST_SEGMENTS and tcp.share >= _TCP_SHARE:
        text = f"TCP retransmitted {tcp.retransmitted:,} segments, about {tcp.share:.2%} of its bytes"
        # Not a fault of its own link: losses may be at the other end, or between.
        faults.append(PortFault("congestion", None, text, vars(tcp)))
    return NodeCounters(node, ports, tcp, tuple(faults))


def new_faults(
    base: Sequence[NodeCounters], here: Sequence[NodeCounters]
) -> dict[int, list[PortFault]] | None:
    """Node -> faults that are new at this size, or more frequent per byte; None if no counters could be read."""
    if all(each.ports is None and each.tcp is None for each in here):
        return None
    quiet = _per_byte(each.ports for each in base)
    quiet_tcp = max((each.tcp.share for each in base if each.tcp is not None), default=None)
    old = {(each.node, f.signal, f.where) for each in base for f in each.faults}
    found: dict[int, list[PortFault]] = {}
    for each in here:
        kept = found[each.node] = []
        for fault in each.faults:
            times = None
            if fault.signal not in CONGESTION_SIGNALS:
                new = (each.node, fault.signal, fault.where) not in old
            elif fault.where is None:
                assert each.tcp is not None
                times = None if not quiet_tcp else each.tcp.share / quiet_tcp
                new = times is None or times >= _GROWN
            else:
                mine = _per_byte([{fault.where: (each.ports or {}).get(fault.where, {})}])
                both = [c for c in mine if quiet.get(c) and _SIGNALS[c] == fault.signal and mine[c]]
                times = max((mine[c] / quiet[c] for c in both), default=None)
                new = times is None or times >= _GROWN
            if new:
                more = "" if times is None else f"; {times:.1f} times as much per byte as at the first size"
                kept.append(replace(fault, message=fault.message + more))
    return found


def clocks_mhz(
    counters: Sequence[NodeCounters], stages: Mapping[int, RankStages], ranks_per_node: int
) -> NDArray[np.float64] | None:
    """Clock of each rank's GPU while busy, in MHz; None unless all are known."""
    found = []
    for rank in range(len(stages)):
        gpu, gpus = stages[rank].gpu, counters[rank // ranks_per_node].gpus or {}
        use = gpus.get(gpu) if gpu is not None else None
        if use is None or use.sm_mhz is None:
            return None
        found.append(use.sm_mhz)
    return np.array(found)


def tensor_active(folder: RunFolder, nodes: int, gpus: int) -> float | None:
    """Mean tensor core activity of the run's `gpus` GPUs, 0..1; None unless all are known."""
    read = [read_counters(GpuCounters, folder.gpu_counters(agent)) for agent in range(nodes)]
    used = [use for each in read if each is not None for use in each.gpus.values() if use.samples]
    known = [use.tensor_active for use in used if use.tensor_active is not None]
    return sum(known) / gpus if len(used) == len(known) == gpus else None


def leaf_switches(
    topology: Topology, here: Sequence[NodeCounters], faults: Mapping[int, Sequence[PortFault]]
) -> str:
    """Leaf switches of congested ports, most frequent first; "" if the ports are unknown."""
    hosts = {each.node: each.host for each in here}
    ports = {
        (host, fault.where.partition("/")[0])
        for node, every in faults.items()
        for fault in every
        if fault.signal in CONGESTION_SIGNALS
        and fault.where is not None
        and (host := hosts[node]) is not None
    }
    leaves = Counter(topology.leaf(*port) or "unknown" for port in sorted(ports))
    return ", ".join(f"{leaf} ({count})" for leaf, count in leaves.most_common())


def _per_byte(every: Iterable[Mapping[str, Mapping[str, Any]] | None]) -> dict[str, float]:
    """Counter -> maximum over ports, per 10^9 bytes sent."""
    most: dict[str, float] = {}
    for ports in every:
        for port in (ports or {}).values():
            for counter, value in (port.get("per_gbyte") or {}).items():
                most[counter] = max(value, most.get(counter, 0.0))
    return most
