"""The hardware that a job is planned for: GPU and network by name, and why they are unknown."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass

from seatrial.base.errors import InputError
from seatrial.hardware.catalogue import Gpu, find_gpu, gpus
from seatrial.hardware.networks import Network, find_network, networks, reference_node
from seatrial.job.job import Job
from seatrial.job.schema import NetworkSection, joined_gpus
from seatrial.plan.model.cluster import Cluster

_ASSUMED = "network: assumed"


@dataclass(frozen=True)
class Hardware:
    """Nodes, GPU and network; `gpu` and `network` are None if unknown, `why_no_gpu`, `why_no_network` say why."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu | None
    network: Network | None
    why_no_gpu: str = ""
    why_no_network: str = ""
    domain: int | None = None  # GPUs of an NVLink domain, if more than a node's
    provenance: tuple[str, ...] = ()  # assumptions and measurements

    @property
    def network_is_assumed(self) -> bool:
        return any(text.startswith(_ASSUMED) for text in self.provenance)

    @property
    def enclosure(self) -> str:
        """The name of what NVLink connects."""
        return "node" if self.domain is None else "NVLink domain"

    @property
    def cluster(self) -> Cluster | None:
        """The cluster; None if the GPU, and so its speed, is unknown."""
        if self.gpu is None:
            return None
        return Cluster(self.gpu, self.nodes, self.gpus_per_node, self.network, self.domain)

    @property
    def shape(self) -> Cluster:
        """The cluster for predictions that need only node and GPU counts, such as traffic; an unknown GPU has NaN speeds."""
        nan = math.nan
        return self.cluster or Cluster(
            Gpu("unknown", (), nan, nan, nan, nan, ""),
            self.nodes,
            self.gpus_per_node,
            self.network,
            self.domain,
        )


def hardware_of(job: Job, network: str | None = None) -> Hardware:
    """The job's [cluster]; its network is `network`, else [network], else cluster.network, else that of the vendor's node.

    InputError for an unknown name.
    """
    at = job.cluster
    gpu, why_gpu = _gpu(job)
    chosen, text, why_network, joined = None, "", "", joined_gpus(at)
    if network is not None:
        chosen = known_network(network)
    elif job.file.network is not None:
        chosen = _stated(job.file.network, at.gpus_per_node)
    elif at.network is not None:
        with job.about("cluster.network"):
            chosen = known_network(at.network)
    elif (
        gpu is not None
        and (node := reference_node(gpu.name, at.gpus_per_node)) is not None
        and (chosen := find_network(node.network)) is not None
    ):
        text = (
            f"{_ASSUMED}, that of a {node.name} ({node.source}); set cluster.network or --network for another"
        )
    if chosen is None:
        why_network = "not given; set cluster.network or --network NAME, or state it as [network]"
    elif at.nodes * at.gpus_per_node <= joined:
        text = ""
    provenance = [text] if text else []
    domain = joined if joined > at.gpus_per_node else None
    if domain is not None and at.nvlink_domain is None:
        provenance.append(f"NVLink joins {domain} GPUs, as sold; set cluster.nvlink_domain for another size")
    return Hardware(at.nodes, at.gpus_per_node, gpu, chosen, why_gpu, why_network, domain, tuple(provenance))


def _stated(at: NetworkSection, gpus_per_node: int) -> Network:
    """The network of [network]. Oversubscription counts as slower NICs."""
    source = "as [network] states"
    less = f" / {at.oversubscription:g}" if at.oversubscription > 1 else ""
    return Network(
        f"{at.nics_per_node} x {at.gbps_per_nic:g}{less} Gb/s a node, as stated",
        at.nics_per_node,
        at.gbps_per_nic / at.oversubscription,
        gpus_per_node,
        at.latency_us,
        source,
        source,
        at.reached,
        source,
    )


def known_network(name: str) -> Network:
    """The network with this name. Raises InputError, with similar names."""
    found = find_network(name)
    if found is None:
        raise _unknown("network", name, [n.name for n in networks()])
    return found


def known_gpu(name: str) -> Gpu:
    """The GPU with this name. Raises InputError, with similar names."""
    found = find_gpu(name)
    if found is None:
        rest = "; omit it for other GPUs: memory and speed are then unknown"
        raise _unknown("GPU", name, [gpu.name for gpu in gpus()], rest)
    return found


def _unknown(kind: str, name: str, known: list[str], rest: str = "") -> InputError:
    names = {n.casefold(): n for n in known}
    close = difflib.get_close_matches(name.casefold(), names, n=1, cutoff=0.4)
    like = f'did you mean "{names[close[0]]}"? ' if close else ""
    return InputError(f'unknown {kind} "{name}"', hint=f"{like}known: {', '.join(known)}{rest}")


def _gpu(job: Job) -> tuple[Gpu | None, str]:
    at, stated = job.cluster, job.file.gpu
    if at.device == "cpu":
        return None, 'ranks are CPU processes (device = "cpu"), for which speed is not predicted'
    if stated is not None:
        architecture = stated.architecture or "an unknown architecture"
        values = {**stated.model_dump(), "architecture": architecture}
        return Gpu("GPU as stated", (), source="as [gpu] states", **values), ""
    if at.gpu is None:
        return (
            None,
            'the job names no GPU, and CPU ranks are not predicted; set one with --set cluster.gpu="H100 SXM", or state it as [gpu]',
        )
    found = find_gpu(at.gpu)
    if found is not None:
        return found, ""
    close = difflib.get_close_matches(at.gpu, [g.name for g in gpus()], n=1)
    like = f'; similar name: "{close[0]}"' if close else ""
    return None, f'"{at.gpu}" is not in the catalogue{like}'
