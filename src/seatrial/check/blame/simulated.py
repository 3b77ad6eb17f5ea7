"""A simulated cluster that is checked like a real one: rates, counters and kernel logs, with faults and noise.

The network: rail-optimised, two levels. Rail r of block b is on leaf (b, r); leaves have as many uplinks as ports. A
flow gets the minimum of what both ends, their leaves and the uplinks on its path provide. Uplinks are shared equally by
the flows that leave the leaf in that round: adaptive routing is assumed perfect, and nothing above the leaves is a
bottleneck. An all-reduce gets the minimum of what the nodes' NVLinks provide and the bound of the slowest rail, rate x
(n-1)/(k-1) (published measurements), less 1 % for each doubling of the nodes.

The noise (`Noise`): healthy parts differ slightly and permanently; each reading has normal noise; a few readings in a
thousand are far too low once, because of other activity; some are missing; occasionally a healthy node does not answer
in time. No reading is ever too high. Harmless events are added: applications' Xids, saturated counters, ports that have
waited to send, logs that cannot be read. Faults: `faults.py`.

Healthy rates are those of floors.toml where it knows the GPU's, else `_SHARES` of its peaks. They set the scale and are
not to be compared with a machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from seatrial.base.errors import InputError
from seatrial.check.blame.faults import Fault, Shape
from seatrial.check.blame.infer import Readings, nic_bound
from seatrial.check.blame.localise import GroupReadings
from seatrial.check.blame.nodes import Bools, Floats, Ints, NodeStage
from seatrial.check.blame.rounds import GroupRound, Round
from seatrial.check.judging.floors import What, find_sku
from seatrial.check.outputs.topology import Topology
from seatrial.hardware.catalogue import Gpu, find_gpu
from seatrial.hardware.counters import Links, Port

LOAD_S = 10.0
HEALTHY = 0.975  # of the nominal rate; real links read 95 to 99 % (published measurements)
# Shares of the catalogue's peaks, if floors.toml has no figure: GEMM 794 of 989, copies in memory 90 %, peer to peer
# 376 of 450, all-reduce 470 of 450 (NVLS adds in the switch), each of H100; host to device of H200, GB/s (published
# measurements).
_SHARES = {"gemm": 794 / 989, "hbm": 0.9, "p2p": 376 / 450, "busbw": 470 / 450}
_HOST_GB_S = 55.0
_OVER_GATE = 1.1  # a gate is exceeded by this factor
_DOUBLING = 0.99
_DEAD_LINKS = 0.1  # of the peer-to-peer rate, when a GPU has no NVLink: over PCIe


@dataclass(frozen=True)
class Noise:
    """How noisy readings are. Standard deviations are shares of a reading; the rest are probabilities per reading."""

    port_spread: float = 0.007  # between healthy ports
    gpu_spread: float = 0.012  # between healthy GPUs, in matrix products; a quarter of it elsewhere
    reading: float = 0.01  # of one reading of a pair or group
    own: float = 0.005  # of one reading of a node by itself
    outlier: float = 0.003  # one reading of a pair or group at 40 to 90 %
    own_outlier: float = 0.0005
    nothing: float = 0.001  # no reading
    silent: float = 0.0002  # a healthy node does not answer in a round
    # Nodes with an application's Xid, and as many with counters that look bad and are not.
    harmless: float = 0.02
    hidden_log: float = 0.005  # nodes whose kernel log cannot be read


@dataclass(frozen=True)
class NodeOverrides:
    """What a file specifies for one node instead of random values. Rates as in `NodeStage`, by slot or rail."""

    rates: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # "gemm", "hbm", "h2d"
    rail_gbit_s: tuple[float, ...] | None = None
    kernel_log: tuple[str, ...] = ()
    counters: Mapping[int, tuple[Mapping[str, int], Mapping[str, int]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """A cluster to simulate. The same seed gives the same cluster with the same readings."""

    shape: Shape
    faults: tuple[Fault, ...] = ()
    gpu: str = "H100 SXM"
    gbit_s: float = 400.0
    seed: int = 0
    noise: Noise = Noise()
    overrides: Mapping[int, NodeOverrides] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(self.shape.name(n) for n in range(self.shape.nodes))

    def topology(self) -> Topology:
        """The topology file of this cluster."""
        shape = self.shape
        return Topology(
            {
                (shape.name(n), f"mlx5_{r}"): shape.leaf_name((n // shape.nodes_per_leaf, r))
                for n in range(shape.nodes)
                for r in range(shape.rails)
            },
            source="simulated",
        )


def _healthy(gpu: Gpu) -> dict[str, float]:
    sku = find_sku(gpu.name)

    def known(what: What, otherwise: float, algorithm: str = "") -> float:
        floor = None if sku is None else sku.floor(what, algorithm=algorithm)
        if floor is None:
            return otherwise
        return floor.value * (_OVER_GATE if floor.kind == "gate" else 1.0)

    ring = known("all_reduce", gpu.link_gb_s * _SHARES["busbw"])
    return {
        "gemm": known("gemm_bf16", gpu.bf16_tflops * _SHARES["gemm"]),
        "hbm": gpu.hbm_tb_s * 1000 * _SHARES["hbm"],
        "h2d": known("host_to_device", _HOST_GB_S),
        "p2p": known("nvlink_copy", gpu.link_gb_s * _SHARES["p2p"]),
        "busbw": known("all_reduce", ring, "NVLS"),
    }


class SimulatedBench:
    """Measures a simulated cluster. A `Bench`: the check sees only what it returns."""

    def __init__(self, cluster: Cluster) -> None:
        """Raises InputError for a GPU that is not in the catalogue."""
        gpu = find_gpu(cluster.gpu)
        if gpu is None:
            raise InputError(
                f"unknown GPU {cluster.gpu!r}", hint="name one of hardware/gpus.toml, such as 'H100 SXM'"
            )
        self.cluster, shape = cluster, cluster.shape
        self._rng = np.random.default_rng([cluster.seed, 1])
        rng = np.random.default_rng([cluster.seed, 0])
        noise, size = cluster.noise, (shape.nodes, shape.gpus)

        def spread(sigma: float, size: tuple[int, ...]) -> Floats:
            return 1 - np.abs(np.clip(rng.normal(0, sigma, size), -3 * sigma, 3 * sigma))

        usual = _healthy(gpu)
        self._rate = {
            "gemm": usual["gemm"] * spread(noise.gpu_spread, size),
            "hbm": usual["hbm"] * spread(noise.gpu_spread / 4, size),
            "h2d": usual["h2d"] * spread(noise.gpu_spread / 4, size),
        }
        self._p2p = usual["p2p"] * spread(noise.gpu_spread / 4, (*size, shape.gpus))
        self._inside = usual["busbw"] * spread(noise.gpu_spread / 4, (shape.nodes,))
        self._port = HEALTHY * spread(noise.port_spread, (shape.nodes, shape.rails))
        self._present = np.ones(size, dtype=bool)
        self._up = np.ones((shape.nodes, shape.rails), dtype=bool)
        self._together = np.ones(shape.nodes)
        self._dies = np.full(shape.nodes, np.iinfo(np.int64).max)
        blocks = np.arange(shape.nodes) // shape.nodes_per_leaf
        self._leaf = blocks[:, None] * shape.rails + np.arange(shape.rails)
        self._uplinks = np.bincount(self._leaf.reshape(-1)).astype(float)
        self._links_down: dict[tuple[int, int], tuple[int, ...]] = {}
        self._uncorrectable: dict[tuple[int, int], int] = {}
        self._counters: dict[tuple[int, int], tuple[Port, Port]] = {}
        self._nvlink: dict[tuple[int, int], tuple[Links, Links]] = {}
        self._log: dict[int, tuple[str, ...] | None] = {}
        self.slots = tuple(f"0000:{0x0F + 0x1C * i:02x}:00" for i in range(shape.gpus))
        self.devices = tuple(f"mlx5_{r}/1" for r in range(shape.rails))
        self._add_harmless_events(rng)
        for node, overrides in cluster.overrides.items():
            self._apply_overrides(node, overrides)
        for fault in cluster.faults:
            self._apply(fault, gpu, rng)
        self._pair_rounds = 0

    # -- faults

    def _add_harmless_events(self, rng: np.random.Generator) -> None:
        """Add harmless events, which must not be taken for faults."""
        noise, nodes = self.cluster.noise, self.cluster.shape.nodes
        for node in np.flatnonzero(rng.random(nodes) < noise.harmless):
            code = int(rng.choice((13, 31, 43, 63)))
            slot = int(rng.integers(self.cluster.shape.gpus))
            self._log_line(
                int(node), f"NVRM: Xid (PCI:{self.slots[slot]}): {code}, pid=4711, name=python, no fault"
            )
        for node in np.flatnonzero(rng.random(nodes) < noise.harmless):
            rail = int(rng.integers(self.cluster.shape.rails))
            counters = {"symbol_error": 65535, "link_downed": 255, "port_xmit_wait": 10_000_000}
            later = counters | {"port_xmit_wait": 20_000_000, "np_cnp_sent": 40}
            self._count(int(node), rail, counters, later)
        for node in np.flatnonzero(rng.random(nodes) < noise.hidden_log):
            self._log[int(node)] = None

    def _log_line(self, node: int, line: str) -> None:
        lines = self._log.get(node, ())
        if lines is not None:
            self._log[node] = (*lines, f"[{4000 + len(lines)}.000000] {line}")

    def _count(self, node: int, rail: int, before: Mapping[str, int], after: Mapping[str, int]) -> None:
        device, _, number = self.devices[rail].partition("/")
        port = (device, int(number), "MT4129", "ACTIVE", "InfiniBand", self.cluster.gbit_s)
        self._counters[node, rail] = (Port(*port, counters=dict(before)), Port(*port, counters=dict(after)))

    def _apply_overrides(self, node: int, overrides: NodeOverrides) -> None:
        for name, values in overrides.rates.items():
            self._rate[name][node] = values
        if overrides.rail_gbit_s is not None:
            self._port[node] = np.array(overrides.rail_gbit_s) / self.cluster.gbit_s
        for line in overrides.kernel_log:
            self._log_line(node, line)
        for rail, (before, after) in overrides.counters.items():
            self._count(node, rail, before, after)

    def _apply(self, fault: Fault, gpu: Gpu, rng: np.random.Generator) -> None:
        if fault.leaf is not None:
            self._apply_to_leaf(fault)
            return
        assert fault.node is not None
        node = fault.node
        if fault.kind == "node_dead":
            self._dies[node] = fault.after
        elif fault.kind == "node_slow":
            self._port[node] *= fault.share
        elif fault.kind == "node_collective":
            self._together[node] *= fault.share
        elif fault.rail is not None:
            self._apply_to_port(fault, node, fault.rail)
        elif fault.gpu is not None:
            self._apply_to_gpu(fault, node, fault.gpu, rng)

    def _apply_to_leaf(self, fault: Fault) -> None:
        assert fault.leaf is not None
        leaf = fault.leaf[0] * self.cluster.shape.rails + fault.leaf[1]
        below = self._leaf == leaf
        if fault.kind == "leaf_slow":
            self._port[below] = np.minimum(self._port[below], HEALTHY * fault.share)
        elif fault.kind == "leaf_down":
            self._up[below] = False
        else:
            self._uplinks[leaf] *= fault.share

    def _apply_to_port(self, fault: Fault, node: int, rail: int) -> None:
        if fault.kind == "nic_down":
            self._up[node, rail] = False
            return
        self._port[node, rail] *= fault.share
        if fault.kind == "cable_errors":
            before = {"symbol_error": 40, "port_rcv_errors": 2, "link_error_recovery": 1}
            after = {"symbol_error": 4900, "port_rcv_errors": 700, "link_error_recovery": 2}
            self._count(node, rail, before, after)

    def _apply_to_gpu(self, fault: Fault, node: int, slot: int, rng: np.random.Generator) -> None:
        pci, xid = self.slots[slot], f"NVRM: Xid (PCI:{self.slots[slot]}):"
        if fault.kind == "gpu_missing":
            self._present[node, slot] = False
            if rng.random() < 0.7:
                self._log_line(
                    node, f"{xid} 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
                )
        elif fault.kind == "gpu_slow":
            self._rate["gemm"][node, slot] *= fault.share
        elif fault.kind == "gpu_pcie":
            self._rate["h2d"][node, slot] *= fault.share
        elif fault.kind == "gpu_memory":
            self._uncorrectable[node, slot] = int(rng.integers(1, 9))
            if rng.random() < 0.5:
                self._log_line(
                    node, f"{xid} 48, pid='<unknown>', name=<unknown>, An uncorrectable double bit error"
                )
        else:
            assert fault.link is not None
            share = fault.share
            if fault.kind == "nvlink_errors":
                before = {"replay errors": 3, "recovery errors": 0, "crc errors": 10}
                after = {"replay errors": 900, "recovery errors": 4, "crc errors": 5000}
                self._nvlink[node, slot] = ({(pci, fault.link): before}, {(pci, fault.link): after})
            elif share < 0.5:
                links = tuple(range(self.cluster.shape.links))
                self._links_down[node, slot], share = links, _DEAD_LINKS
                self._log_line(
                    node,
                    f"{xid} 74, pid='<unknown>', name=<unknown>, NVLink: fatal error detected on link {fault.link}(0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
                )
            else:
                self._links_down[node, slot], share = (fault.link,), 1 - 1 / self.cluster.shape.links
            self._p2p[node, slot] *= share
            self._p2p[node, :, slot] *= share
            self._inside[node] *= share

    # -- measurements

    def _alive(self, rounds: int) -> Bools:
        glitch = self._rng.random(self.cluster.shape.nodes) < self.cluster.noise.silent
        return (self._dies > rounds) & ~glitch

    def _noisy(self, values: Floats, sigma: float, outlier: float) -> Floats:
        rng, size = self._rng, values.shape
        values = values * (1 - np.abs(rng.normal(0, sigma, size)))
        low = rng.random(size) < outlier
        return np.where(low, values * rng.uniform(0.4, 0.9, size), values)

    def nodes(self, which: Ints) -> NodeStage:
        """The node stage; `doubtful` nodes may be asked again."""
        noise, shape = self.cluster.noise, self.cluster.shape
        answered = self._alive(0)[which]
        there = self._present[which] & answered[:, None]
        rates = {
            name: np.where(there, self._noisy(values[which], noise.own, noise.own_outlier), np.nan)
            for name, values in self._rate.items()
        }
        both = there[:, :, None] & there[:, None, :]
        rates["p2p"] = np.where(both, self._noisy(self._p2p[which], noise.own, noise.own_outlier), np.nan)
        heard = {int(n): i for i, n in enumerate(which) if answered[i]}

        def part(table: Mapping[tuple[int, int], object]) -> dict[tuple[int, int], object]:
            return {(heard[n], k): v for (n, k), v in table.items() if n in heard}

        return NodeStage(
            tuple(shape.name(int(n)) for n in which),
            answered,
            self.slots,
            self._present[which].copy(),
            rates,
            part(self._links_down),  # type: ignore[arg-type]
            shape.links,
            part(self._uncorrectable),  # type: ignore[arg-type]
            self.devices,
            self._up[which].copy(),
            part(self._counters),  # type: ignore[arg-type]
            part(self._nvlink),  # type: ignore[arg-type]
            {heard[n]: log for n, log in self._log.items() if n in heard},
            LOAD_S,
            self.cluster.gpu,
        )

    def pairs(self, round_: Round) -> Readings:
        """One round of pairs, all at once."""
        self._pair_rounds += 1
        alive, noise = self._alive(self._pair_rounds), self.cluster.noise
        a, b = round_.pairs[:, 0], round_.pairs[:, 1]
        both = (alive[a] & alive[b])[:, None]
        flows = round_.rails & both & self._up[a] & self._up[b]
        ends = self._leaf[a], self._leaf[b]
        leave = flows & (ends[0] != ends[1])
        count = sum(np.bincount(end[leave], minlength=len(self._uplinks)) for end in ends)
        part = np.minimum(1.0, self._uplinks / np.maximum(count, 1))
        share = np.minimum(self._port[a], self._port[b])
        share = np.where(leave, np.minimum(share, HEALTHY * np.minimum(part[ends[0]], part[ends[1]])), share)
        gbit_s = self._noisy(share * self.cluster.gbit_s, noise.reading, noise.outlier)
        nothing = self._rng.random(gbit_s.shape) < noise.nothing
        gbit_s = np.where(flows & ~nothing, gbit_s, np.nan)
        slowest = np.where(flows, share, 1.0).min(axis=1, initial=1.0) * self.cluster.gbit_s
        busbw = self._all_reduce(round_.pairs, slowest, flows.sum(axis=1), 2)
        busbw = np.where(round_.collective & both[:, 0] & flows.any(axis=1), busbw, np.nan)
        return Readings(gbit_s, busbw, alive[round_.pairs])

    def _all_reduce(self, members: Ints, slowest: Floats, rails: Ints, size: int) -> Floats:
        """busbw, (K,), from (K, size) members, the slowest rail's Gb/s and the number of rails in use."""
        gpus = self.cluster.shape.gpus
        inside = (self._inside * self._together)[members].min(axis=1)
        bound = nic_bound(slowest * rails / gpus, gpus, size)
        # A node with slow collectives is slow whichever of the two bounds applies.
        value = np.minimum(inside, bound * self._together[members].min(axis=1)) * _DOUBLING ** np.log2(
            size / 2
        )
        return self._noisy(value, self.cluster.noise.reading, self.cluster.noise.outlier)

    def groups(self, round_: GroupRound) -> GroupReadings:
        """One round of all-reduces; uplinks do not limit it, since a ring leaves a leaf only twice."""
        alive = self._alive(self._pair_rounds + round_.number)
        busbw = np.full(len(round_.groups), np.nan)
        for k, group in enumerate(round_.groups):
            if len(group) < 2 or not alive[group].all():
                continue
            up = self._up[group].all(axis=0)
            slowest = self._port[group][:, up].min(initial=1.0) * self.cluster.gbit_s
            values = self._all_reduce(
                group[None, :], np.array([slowest]), np.array([int(up.sum())]), len(group)
            )
            busbw[k] = values[0] if up.any() else np.nan
        answered = np.ones(len(alive), dtype=bool)
        for group in round_.groups:
            answered[group] = alive[group]
        return GroupReadings(busbw, answered)

    def answer(self, which: Ints) -> Bools:
        """The nodes that answer at the end."""
        return self._alive(np.iinfo(np.int64).max - 1)[which]
