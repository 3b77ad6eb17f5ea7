"""The known networks between nodes: rates with their sources, and the latency of one hop."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# Share of the cards' rate that large collectives reach, if a network has no figure of its own.
REACHED = 0.95
REACHED_SOURCE = (
    "381 GB/s over 4 nodes of 8 x 50 GB/s (stas00/ml-engineering@744d01e network/README.md, nccl 2.27.7)"
)


@dataclass(frozen=True)
class Network:
    """A network between nodes. Rates are decimal and in one direction."""

    name: str
    nics_per_node: int
    gbps_per_nic: float
    gpus_per_node: int
    hop_us: float  # latency of an empty message between nodes
    source: str
    hop_source: str
    reached: float = REACHED
    reached_source: str = REACHED_SOURCE

    @property
    def gb_s_per_gpu(self) -> float:
        """A GPU's share of its node's cards, GB/s in one direction."""
        return self.nics_per_node * self.gbps_per_nic / 8 / self.gpus_per_node


@dataclass(frozen=True)
class ReferenceNode:
    """The vendor's own node for a GPU, by catalogue name, and the network it is sold with; "" if it is sold without."""

    gpu: str
    name: str
    gpus_per_node: int
    source: str
    network: str = ""


@dataclass(frozen=True)
class Latencies:
    """Latencies assumed where a network's own is not known; microseconds."""

    hop_us: float
    hop_source: str
    local_hop_us: float
    local_source: str
    start_us: float
    start_source: str


@cache
def _table() -> tuple[tuple[Network, ...], Latencies]:
    text = files("seatrial.hardware").joinpath("networks.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    assumed = Latencies(**table["assumed"])
    default = {"hop_us": assumed.hop_us, "hop_source": assumed.hop_source}
    return tuple(Network(**(default | entry)) for entry in table["network"]), assumed


def networks() -> tuple[Network, ...]:
    """Every network of networks.toml, in its order."""
    return _table()[0]


def latencies() -> Latencies:
    """The assumed latencies, each with its reason."""
    return _table()[1]


def find_network(name: str) -> Network | None:
    """The network with this name, ignoring case; None if unknown."""
    wanted = " ".join(name.split()).casefold()
    return next((n for n in networks() if n.name.casefold() == wanted), None)


@cache
def reference_nodes() -> tuple[ReferenceNode, ...]:
    """Every node of reference_nodes.toml, in its order."""
    text = files("seatrial.hardware").joinpath("reference_nodes.toml").read_text(encoding="utf-8")
    return tuple(ReferenceNode(**entry) for entry in tomllib.loads(text)["node"])


def reference_node(gpu: str, gpus_per_node: int | None = None) -> ReferenceNode | None:
    """The reference node of the GPU with this catalogue name; None if there is none (with as many GPUs)."""
    ours = (n for n in reference_nodes() if n.gpu == gpu)
    return next((n for n in ours if gpus_per_node in (None, n.gpus_per_node)), None)
