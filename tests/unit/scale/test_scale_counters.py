"""Counters of nodes at two sizes: what grew for each byte is a fault, what was so before is none, nothing is no zero."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from seatrial.check.outputs.topology import Topology
from seatrial.hardware.counters import Port
from seatrial.hardware.tcp import Connection
from seatrial.record.folder import RunFolder
from seatrial.record.node_counters import GpuCounters, GpuUse, PortCounters, write_counters
from seatrial.record.stages import RankStages
from seatrial.scale.counters import (
    NodeCounters,
    Tcp,
    clocks_mhz,
    counters_of,
    leaf_switches,
    new_faults,
    of_node,
    tcp_of,
    tensor_active,
)

# Ten seconds at half of 400 Gb/s. A tick of port_xmit_wait is 8 bytes, a count of port_xmit_data 4.
SECONDS, SENT, TICKS = 10.0, 250_000_000_000 // 4, 500_000_000_000 // 8


def node(number: int = 0, *, sent: float = 1.0, tcp: Tcp | None = None, **grown: int) -> NodeCounters:
    """Its port sent `sent` times half of its rate, and its counters grew by `grown`."""
    first = Port(
        "mlx5_0", 1, None, "ACTIVE", "InfiniBand", 400.0, dict.fromkeys((*grown, "port_xmit_data"), 7)
    )
    added = {"port_xmit_data": int(SENT * sent), **grown}
    last = replace(first, counters={c: v + added[c] for c, v in first.counters.items()})
    return of_node(number, {first.name: first}, {last.name: last}, SECONDS, tcp)


def signals(base: NodeCounters, here: NodeCounters) -> list[str]:
    found = new_faults([base], [here])
    assert found is not None
    return [f.signal for f in found[here.node]]


@pytest.mark.parametrize(
    ("base", "here", "expected"),
    [
        ({"port_xmit_wait": TICKS // 100}, {"port_xmit_wait": TICKS // 5}, ["congestion"]),
        ({"port_xmit_wait": TICKS // 100}, {"port_xmit_wait": TICKS // 20}, []),  # 5 % of the time
        # As much for each byte as before, and half as much again.
        ({"port_xmit_wait": TICKS // 8}, {"port_xmit_wait": TICKS // 8}, []),
        ({"port_xmit_wait": TICKS // 8}, {"port_xmit_wait": TICKS * 3 // 16}, []),
        ({"sent": 0.5, "np_cnp_sent": 15_000}, {"sent": 1.0, "np_cnp_sent": 30_000}, []),
        ({"np_cnp_sent": 15_000}, {"np_cnp_sent": 90_000}, ["congestion"]),
        # A first size of one node sends nothing: there is no baseline but the limits.
        ({"sent": 0.0, "np_cnp_sent": 0}, {"np_cnp_sent": 90_000}, ["congestion"]),
        ({}, {"packet_seq_err": 200}, ["retransmissions"]),
        # Of links: any that were not there.
        ({"symbol_error": 0}, {"symbol_error": 900}, ["link_errors"]),
        ({"symbol_error": 900}, {"symbol_error": 900}, []),
    ],
)
def test_a_fault_is_growth_over_the_first_size(
    base: dict[str, Any], here: dict[str, Any], expected: list[str]
) -> None:
    assert signals(node(**base), node(**here)) == expected


def test_the_growth_is_in_the_message() -> None:
    found = new_faults([node(np_cnp_sent=15_000)], [node(np_cnp_sent=90_000)])
    assert found is not None
    assert found[0][0].message.endswith("; 6.0 times as much per byte as at the first size")


def test_tcp_counts_by_its_bytes() -> None:
    def tcp(retransmitted: int, sent: int = 10**9) -> NodeCounters:
        return of_node(0, None, None, 0.0, Tcp(sent, retransmitted))

    assert signals(tcp(20), tcp(6000)) == ["congestion"]
    assert signals(tcp(20), tcp(300)) == []  # 0.04 %
    assert signals(tcp(2000), tcp(3000)) == []
    assert signals(tcp(2000), tcp(6000)) == ["congestion"]
    assert signals(of_node(0, None, None, 0.0, None), tcp(6000)) == ["congestion"]
    assert signals(tcp(0), tcp(9, sent=1000)) == []  # few segments


def test_an_agent_counts_for_the_node_of_its_ranks(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    port = Port("mlx5_0", 1, None, "ACTIVE", "InfiniBand", 400.0, {"np_cnp_sent": 5})
    for agent, rank in ((0, 2), (1, 0)):  # in another order, as a topology gives it
        for log in (folder.rank_log(1, agent, rank), folder.rank_log(1, agent, rank + 1)):
            log.parent.mkdir(parents=True, exist_ok=True)
            log.touch()
    last = replace(port, counters={"np_cnp_sent": 95_005})
    write_counters(folder.port_counters(0), PortCounters(1.0, 10.0, {port.name: port}, {port.name: last}))
    sent = Connection("10.0.0.1", "10.0.0.2", 10**9, 9.0, 0.1, 6000)
    first, second = counters_of(folder, {1: [sent]}, 2, 2, ["a", "b"])
    assert (first.host, second.host) == ("b", "a")
    assert (first.ports, first.tcp) == (None, Tcp(10**9, 6000))
    assert second.ports is not None
    assert second.ports["mlx5_0/1"]["deltas"] == {"np_cnp_sent": 95_000}
    assert [f.signal for f in (*first.faults, *second.faults)] == ["congestion", "congestion"]


def test_the_switches_of_congested_ports_are_named() -> None:
    topology = Topology({("a", "mlx5_0"): "leaf-3", ("b", "mlx5_0"): "leaf-3", ("c", "mlx5_0"): "leaf-4"})
    here = [replace(node(n, np_cnp_sent=90_000), host=host) for n, host in enumerate("abcd")]
    faults = new_faults([node(sent=0.0)], here) or {}
    assert leaf_switches(topology, here, faults) == "leaf-3 (2), leaf-4 (1), unknown (1)"
    assert leaf_switches(topology, here, {0: [], 1: faults[1]}) == "leaf-3 (1)"
    assert leaf_switches(topology, [replace(each, host=None) for each in here], faults) == ""


def test_clocks_belong_to_the_ranks_of_their_gpus() -> None:
    def stages(rank: int, gpu: str | None) -> RankStages:
        none = np.zeros(0)
        return RankStages(1, rank, 4, "cuda", 1, {}, none.astype(np.int64), none.reshape(0, 11), gpu)

    def with_gpus(number: int, **mhz: float | None) -> NodeCounters:
        return replace(node(number), gpus={pci: GpuUse(value, 9, 0, {}) for pci, value in mhz.items()})

    nodes = [with_gpus(0, a=1980.0, b=1410.0), with_gpus(1, a=1975.0, b=1970.0, c=300.0)]
    ranks = {rank: stages(rank, gpu) for rank, gpu in enumerate("abba")}
    found = clocks_mhz(nodes, ranks, 2)
    assert found is not None
    assert found.tolist() == [1980.0, 1410.0, 1970.0, 1975.0]
    assert clocks_mhz(nodes, ranks | {3: stages(3, None)}, 2) is None
    assert clocks_mhz([nodes[0], with_gpus(1, a=None, b=1970.0)], ranks, 2) is None
    assert clocks_mhz([nodes[0], node(1)], ranks, 2) is None


def test_missing_counters_are_not_available() -> None:
    nothing = of_node(3, None, None, 0.0, None)
    assert nothing.as_dict() == {
        "node": 3,
        "host": None,
        "ports": "not available",
        "gpus": "not available",
        "tcp": "not available",
    }
    assert new_faults([nothing], [nothing]) is None
    assert tcp_of([]) is None
    assert tcp_of([Connection("a", "b", 10**6, 1.0, 0.1, 3)] * 2) == Tcp(2 * 10**6, 6)
    lacking = node().as_dict()["ports"]["mlx5_0/1"]
    assert "np_cnp_sent" in lacking["unsupported"]
    assert lacking["xmit_wait_share"] is None
    assert "np_cnp_sent" not in lacking["per_gbyte"]


def test_tensor_cores_are_those_of_all_gpus_of_a_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)

    def write(number: int, **shares: float | None) -> None:
        idle = {"z": GpuUse(None, 0, None, None)}
        used = {pci: GpuUse(1980.0, 9, 0, {}, share) for pci, share in shares.items()}
        write_counters(folder.gpu_counters(number), GpuCounters(0.0, 60.0, used | idle))

    write(0, a=0.8, b=0.6)
    assert tensor_active(folder, 1, 2) == pytest.approx(0.7)
    assert tensor_active(folder, 2, 4) is None
    write(1, a=0.4, b=0.2)
    assert tensor_active(folder, 2, 4) == pytest.approx(0.5)
    write(1, a=0.4, b=None)
    assert tensor_active(folder, 2, 4) is None
