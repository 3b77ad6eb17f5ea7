"""Measurements of a cluster that replace the catalogue's numbers: rates of `seatrial check`, the pace of real runs.

A check writes reports/check.json to the run folder (docs/check.md). Each rate replaces the catalogue's number for the
same quantity, divided by the share of it that the model assumes, so that the model reaches the measured rate:

    bf16 GEMMs                      -> best GEMM                   if it differs by more than the error of three shapes
    copy within a GPU's memory      -> memory bandwidth
    all_reduce inside a node        -> NVLink                      unless switches reduced (NVLS), which does not apply to all-gathers
    all_reduce between nodes, rails -> NICs
    writing to the checkpoint folder-> storage

Old or simulated rates, or those of another GPU, are not used; `unused` says so.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from seatrial.base.files import read_json
from seatrial.hardware.catalogue import Gpu, find_gpu
from seatrial.hardware.networks import Network, find_network, latencies
from seatrial.job.job import Job
from seatrial.job.schema import joined_gpus
from seatrial.plan.cost.calibration import Calibration, Entry
from seatrial.plan.cost.collectives import LARGE_BYTES, LOCAL_SHARE
from seatrial.plan.cost.kernels import MEMORY_SHARE
from seatrial.plan.measured.runs import paces
from seatrial.plan.model.cluster import Cluster
from seatrial.plan.model.hardware import Hardware
from seatrial.record.folder import RunFolder

# Drivers, firmware and cables change, and a check takes a minute; an assumption.
MOST_DAYS = 30.0
# The check measures three GEMM shapes, the catalogue has the best of many: below this share the check suspects a GPU.
THREE_SHAPES = 0.92
# Rings reach 0.76 to 0.81 of the data sheet's NVLink, reductions in the switch (NVLS) 0.93 to 1.05 (see the floors of
# `seatrial check`).
MOST_OF_A_RING = 0.88
# The slowest GPU of a cluster is reported below this share of the median.
_ALIKE = 0.92
_DAY_S = 86400.0
_MOST = 1e15  # in any unit; above it the file is damaged


@dataclass(frozen=True)
class Measured:
    """Measured rates, decimal, in one direction; None where there is no usable measurement.

    `provenance` and `network_provenance` are of the rates that are used; `unused` are others that were found, with reasons.
    """

    gpu: Gpu | None = None  # the kind that was checked, if the catalogue has it
    products_tflops: float | None = None
    memory_gb_s: float | None = None  # of a copy, reads plus writes
    ring_gb_s: float | None = None  # bus bandwidth inside a node
    node_gb_s: float | None = None  # sent by a node to others
    cards: int | None = None  # network ports of a node
    storage_gb_s: float | None = None  # all checked nodes together
    paces: tuple[Entry, ...] = ()
    provenance: tuple[str, ...] = ()
    network_provenance: tuple[str, ...] = ()  # the same of `node_gb_s`
    unused: tuple[str, ...] = ()

    def apply(self, cluster: Cluster) -> Cluster:
        """`cluster` with the rates measured on it; unchanged if there are none."""
        return replace(cluster, gpu=self._gpu(cluster.gpu), network=self._network(cluster))

    def at(self, place: Hardware, *, keep_network: bool = False) -> Hardware:
        """`place` with the measured rates; a GPU or network that the job does not name may now be known.

        `keep_network`: the network was given explicitly and stays.
        """
        gpu = place.gpu or self.gpu
        if gpu is None:
            return place
        found = self.apply(replace(place, gpu=gpu).shape)
        network, provenance = found.network, self.network_provenance
        if keep_network or not provenance:  # otherwise a measured network replaces the assumed one
            network, provenance = place.network, place.provenance
        return replace(
            place,
            gpu=found.gpu,
            network=network,
            why_no_gpu="",
            why_no_network="" if network else place.why_no_network,
            provenance=(*provenance, *self.provenance),
        )

    def calibration(self, shipped: Calibration) -> Calibration:
        """`shipped`, with the paces of real runs instead of those of the same stack and GPU."""
        if not self.paces:
            return shipped
        mine = {(e.stack, e.gpu) for e in self.paces}
        kept = tuple(e for e in shipped.entries if (e.stack, e.gpu) not in mine)
        return replace(shipped, entries=(*kept, *self.paces))

    def _gpu(self, gpu: Gpu) -> Gpu:
        return replace(
            gpu,
            best_bf16_tflops=self.products_tflops or gpu.best_bf16_tflops,
            hbm_tb_s=gpu.hbm_tb_s if self.memory_gb_s is None else self.memory_gb_s / 1e3 / MEMORY_SHARE,
            link_gb_s=gpu.link_gb_s if self.ring_gb_s is None else self.ring_gb_s / LOCAL_SHARE,
        )

    def _network(self, cluster: Cluster) -> Network | None:
        known = cluster.network
        if self.node_gb_s is None:
            return known
        assumed = latencies()
        base = known or Network(
            "measured", self.cards or 1, 0.0, cluster.gpus_per_node, assumed.hop_us, "", assumed.hop_source
        )
        cards = self.cards or base.nics_per_node
        rate = self.node_gb_s / base.reached / cards * 8
        return replace(base, nics_per_node=cards, gbps_per_nic=rate, source="measured by `seatrial check`")


def measured_rates(folder: Path, job: Job, *, without: Path | None = None) -> Measured:
    """Measurements of `job`'s cluster from the run folder `folder` (runs/NAME) and its siblings. Bad files never raise.

    Rates are of the last check of this job; paces of all runs of the same model on the same kind of GPU, also those of
    `scale`. Runs in or below `without` are left out: they would be predicted from their own measurement.
    """
    at = job.cluster
    wanted = None if at.gpu is None else find_gpu(at.gpu)
    if at.device == "cpu":
        return Measured()
    found = _checked(RunFolder(folder).reports / "check.json", job, wanted)
    gpu = wanted or found.gpu
    if gpu is None:
        return found
    entries, provenance, unused = paces(folder, job, gpu, found.apply, without=without)
    return replace(
        found, paces=entries, provenance=(*found.provenance, *provenance), unused=(*found.unused, *unused)
    )


def _checked(file: Path, job: Job, wanted: Gpu | None) -> Measured:
    try:
        document = read_json(file)
        stated = document.get("time") if isinstance(document, dict) else None
        written = _number(stated) or file.stat().st_mtime
    except FileNotFoundError:
        return Measured()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return Measured(unused=(f"{file} cannot be used: {reason}",))
    why = _unusable(document, time.time() - written)
    if why is not None:
        return Measured(unused=(f"{file} is not used: {why}",))
    when = time.strftime("%Y-%m-%d", time.gmtime(written))
    return _Reader(document, job, wanted, f"{file}, {when}").read()


def _unusable(document: object, age_s: float) -> str | None:
    if not isinstance(document, dict) or document.get("schema_version") != 1:
        return "not a check report of a supported version"
    if document.get("simulated"):
        return "its cluster was simulated"
    if age_s > MOST_DAYS * _DAY_S:
        return f"it is {age_s / _DAY_S:.0f} days old, and {MOST_DAYS:.0f} is the most; run `seatrial check` again"
    if not isinstance(document.get("measured"), dict) or not document["measured"]:
        return "it measured no rate"
    return None


class _Reader:
    """Reader of one report."""

    def __init__(self, document: Mapping[str, Any], job: Job, wanted: Gpu | None, source: str) -> None:
        self._rates: Mapping[str, Any] = document["measured"]
        nodes = document.get("measured_nodes")
        self._nodes = len(nodes) if isinstance(nodes, list) else 0
        self._job, self._wanted, self._source = job, wanted, source
        self._provenance: list[str] = []
        self._network_provenance: list[str] = []
        self._unused: list[str] = []

    def read(self) -> Measured:
        storage = self._storage()
        checked = self._rates.get("gpu")
        kind = checked.get("kind") if isinstance(checked, dict) else None
        gpu = find_gpu(kind) if isinstance(kind, str) else None
        if isinstance(checked, dict):
            if gpu is None:
                self._unused.append(f"rates of {kind or 'a GPU of unknown kind'}: it is not in the catalogue")
            elif self._wanted is not None and gpu != self._wanted:
                self._unused.append(f"rates of {gpu.name}: the job is planned for {self._wanted.name}")
        if gpu is None or (self._wanted is not None and gpu != self._wanted):
            return self._done(storage_gb_s=storage)
        assert isinstance(checked, dict)
        cards, node = self._network(gpu)
        return self._done(
            gpu=gpu,
            products_tflops=self._products(checked, gpu),
            memory_gb_s=self._memory(checked, gpu),
            ring_gb_s=self._ring(checked, gpu),
            cards=cards,
            node_gb_s=node,
            storage_gb_s=storage,
        )

    def _done(self, **values: Any) -> Measured:
        provenance, network = tuple(self._provenance), tuple(self._network_provenance)
        return Measured(
            **values, provenance=provenance, network_provenance=network, unused=tuple(self._unused)
        )

    def _use(self, what: str, instead: str = "", *, network: bool = False) -> None:
        provenance = self._network_provenance if network else self._provenance
        provenance.append(f"{what}{instead}: measured, {self._source}")

    def _skip(self, what: str, why: str) -> None:
        self._unused.append(f"{what} ({self._source}): {why}")

    def _products(self, checked: Mapping[str, Any], gpu: Gpu) -> float | None:
        rate = _rate(checked.get("gemm"), "TFLOP/s")
        if rate is None:
            return None
        what = f"bf16 GEMMs {rate:.4g} TFLOP/s"
        least = _number(checked["gemm"].get("min"))
        if least is not None and least < _ALIKE * rate:
            self._provenance.append(
                f"the slowest GPU reaches {least:.4g} of {rate:.4g} TFLOP/s; a step waits for it, but the prediction ignores that"
            )
        known = gpu.best_bf16_tflops
        if known is not None and THREE_SHAPES * known <= rate <= known:
            self._skip(
                what,
                f"the check tries three shapes; this agrees with {known:g}, the best of many, which is kept",
            )
            return None
        self._use(what, "" if known is None else f" instead of {known:g}")
        return rate

    def _memory(self, checked: Mapping[str, Any], gpu: Gpu) -> float | None:
        rate = _rate(checked.get("hbm"), "GB/s")
        if rate is not None:
            usual = gpu.hbm_tb_s * 1e3 * MEMORY_SHARE
            self._use(f"copies in a GPU's memory {rate:.4g} GB/s", f" instead of {usual:.4g}")
        return rate

    def _ring(self, checked: Mapping[str, Any], gpu: Gpu) -> float | None:
        usual = gpu.link_gb_s * LOCAL_SHARE
        found = self._sums(lambda nodes: nodes == 1)
        if found is not None:
            rate, what = found
            if rate <= MOST_OF_A_RING * gpu.link_gb_s:
                self._use(what, f" instead of {usual:.4g}")
                return rate
            self._skip(
                what,
                "more than a ring reaches: the switches reduced (NVLS), which does not apply to all-gathers",
            )
        copy = _rate(checked.get("p2p"), "GB/s")
        if copy is not None and copy < usual:
            self._use(
                f"copies between GPUs {copy:.4g} GB/s, and no ring is faster", f" instead of {usual:.4g}"
            )
            return copy
        return None

    def _network(self, gpu: Gpu) -> tuple[int | None, float | None]:
        """(NICs of a node, GB/s that it sends): from the all_reduce over most nodes, else the rails, else send/receive.

        all_reduce rates are interpreted as rings, because the model uses them for rings.
        """
        cards, node, what = self._rails()
        found = self._sums(self._between)
        if found is not None:
            rate, text = found
            most = self._cards_carry() if node is None else node
            if rate >= gpu.link_gb_s * LOCAL_SHARE:
                self._skip(text, "as fast as inside a node, so it only shows that the network is not slower")
            elif most is not None and rate > most:
                # A tree, or a reduction inside each node first, sends less between nodes than all-gathers in rings.
                self._skip(text, f"more than the NICs carry in rings, {most:.4g} GB/s a node")
            else:
                self._use(text, network=True)
                return cards, rate
        if node is not None:
            self._use(what, network=True)
            return cards, node
        rate_or_none = _rate(self._rates.get("send_recv"), "Gb/s")
        if rate_or_none is None:
            return None, None
        how = str(self._rates["send_recv"].get("algorithm", ""))
        text = f"{how} {rate_or_none:.4g} Gb/s a node"
        if not how.startswith("nccl"):
            self._skip(text, "not the backend that GPUs use")
            return None, None
        self._use(text, network=True)
        return None, rate_or_none / 8

    def _between(self, nodes: int) -> bool:
        """Whether this many nodes communicate over NICs; those of a rack use NVLink."""
        at = self._job.cluster
        return nodes > 1 and nodes * at.gpus_per_node > joined_gpus(at)

    def _cards_carry(self) -> float | None:
        """GB/s of a node's NICs in the network that the job names; None if it names none."""
        name = self._job.cluster.network
        network = None if name is None else find_network(name)
        return None if network is None else network.nics_per_node * network.gbps_per_nic / 8

    def _rails(self) -> tuple[int | None, float | None, str]:
        rail = self._rates.get("rail")
        rate = _rate(rail, "Gb/s")
        if rate is None or not isinstance(rail, dict):
            return None, None, ""
        ports = rail.get("n")
        what = f"network ports {rate:.4g} Gb/s"
        if type(ports) is not int or not 0 < ports < _MOST or not self._nodes or ports % self._nodes:
            self._skip(what, f"{ports} ports on {self._nodes} nodes: the number per node is unknown")
            return None, None, ""
        cards = ports // self._nodes
        return cards, cards * rate / 8, f"{what}, {cards} a node"

    def _sums(self, of: Any) -> tuple[float, str] | None:
        """(rate, text) of the largest all_reduce over the most nodes that `of` accepts, with all their GPUs."""
        sums = self._rates.get("all_reduce")
        best: tuple[tuple[int, int], float] | None = None
        for one in sums if isinstance(sums, list) else ():
            rate = _rate(one, "GB/s")
            if rate is None or not str(one.get("algorithm", "")).startswith("nccl"):
                continue
            nodes, ranks, size = (one.get(key) for key in ("nodes", "ranks", "size_bytes"))
            if not (type(nodes) is int and type(ranks) is int and type(size) is int and of(nodes)):
                continue
            if size < LARGE_BYTES or ranks != nodes * self._job.cluster.gpus_per_node:
                continue
            if best is None or (nodes, size) > best[0]:
                best = (nodes, size), rate
        if best is None:
            return None
        (nodes, size), rate = best
        where = "inside a node" if nodes == 1 else f"over {nodes} nodes"
        return rate, f"all_reduce {where} {rate:.4g} GB/s (busbw, {size >> 20} MiB)"

    def _storage(self) -> float | None:
        """GB/s of all checked nodes together, each writing one file at the same time: a lower bound."""
        alone: Sequence[Any] = self._rates.get("node") or ()
        for one in alone if isinstance(alone, list) else ():
            rate = _rate(one, "GB/s")
            if rate is not None and str(one.get("what", "")).startswith("writing to the checkpoint folder"):
                n = one.get("n")
                n = n if type(n) is int and 0 < n < _MOST else 1
                files = f"{n} files of {rate:.4g} at once" if n > 1 else "one file"
                self._use(f"storage at least {n * rate:.4g} GB/s ({files})")
                return n * rate
        return None


def _rate(value: Any, unit: str) -> float | None:
    """The median of a rate in this unit; None for anything else."""
    if not isinstance(value, dict) or value.get("unit") != unit:
        return None
    return _number(value.get("median"))


def _number(value: Any) -> float | None:
    usable = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < _MOST
    return float(value) if usable else None
