"""Time of collectives: rings over NVLink inside a domain, over NICs between domains.

    time = start + hops + factor x bytes / bandwidth
    factor = 2 (n-1)/n for all_reduce, (n-1)/n for all_gather and reduce_scatter     (nccl-tests, doc/PERFORMANCE.md)

A ring enters an NVLink domain (a node, or a rack of them) through one NIC and leaves through another, and NCCL builds as
many rings as a group has NICs: so a group with g ranks in each domain has the bandwidth of g NICs, capped by NVLink's.
All groups of a domain communicate at the same time, each with the NICs of its own ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from seatrial.hardware.networks import latencies
from seatrial.plan.model.cluster import Cluster, Group, placed
from seatrial.plan.model.recipe import Recipe

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]

# Large all_reduces over the 8 GPUs of a node reach 230 of 300 GB/s on A100, 366 of 450 on H100 and H200, 682 of 900 on
# B200 with rings (public nccl-tests, the floors of `seatrial check`): 0.76 to 0.81.
LOCAL_SHARE = 0.78
# Share of the largest messages' bandwidth that a size reaches, latency excluded: 16 to 64 MiB 0.68, from 256 MiB on 1
# (all_reduce over 8 B200, nccl 2.27.7, stas00/ml-engineering@744d01e network/README.md, 50 us subtracted). Saturation
# depends on time, not size: at 160 GB/s 64 MiB reach 0.9 (NVIDIA/nccl issue 1411), so sizes scale with link speed.
SMALL_SHARE, SMALL_BYTES, LARGE_BYTES, FILLED_GB_S = 0.68, 64 * 2**20, 256 * 2**20, 900.0


def size_share(n_bytes: float, link_gb_s: float = FILLED_GB_S) -> float:
    """Bandwidth share of a size (see SMALL_SHARE), logarithmic in between. A larger message is never faster."""
    size = n_bytes * FILLED_GB_S / link_gb_s
    if size <= SMALL_BYTES:
        return SMALL_SHARE
    if size >= LARGE_BYTES:
        return 1.0
    return SMALL_SHARE + (1 - SMALL_SHARE) * math.log(size / SMALL_BYTES) / math.log(
        LARGE_BYTES / SMALL_BYTES
    )


class UnknownNetworkError(ValueError):
    """Ranks in several NVLink domains communicate, and the network between them is unknown."""


@dataclass(frozen=True)
class Fabric:
    """A cluster's links as collectives see them."""

    cluster: Cluster

    @classmethod
    def of(cls, cluster: Cluster, recipe: Recipe) -> Fabric:
        """The links as this layout uses them."""
        return cls(placed(cluster, recipe))

    def bandwidth(self, at: Group, share: float = 1.0) -> float:
        """Bytes/s in one direction of a ring over `at`; messages of this size reach `share` of it over NVLink."""
        local = self.cluster.gpu.link_gb_s * 1e9 * LOCAL_SHARE * share
        if at.domains == 1:
            return local
        # A single rank per domain has its own NIC, and NVLink is not involved.
        between = at.per_domain * self._card()
        return between if at.per_domain == 1 else min(local, between)

    def _card(self) -> float:
        network = self.cluster.network
        if network is None:
            raise UnknownNetworkError(f"{self.cluster.nodes} nodes, and no network between them is given")
        return network.gb_s_per_gpu * 1e9 * network.reached

    def seconds(self, kind: Kind, n_bytes: float, at: Group) -> float:
        """Seconds of one collective; `n_bytes` is the whole tensor: all_gather's output, reduce_scatter's input."""
        n = at.size
        if n <= 1 or n_bytes <= 0:
            return 0.0
        rounds = 2 if kind == "all_reduce" else 1
        assumed = latencies()
        hop_us = (n - at.domains) * assumed.local_hop_us
        if at.domains > 1:
            self._card()
            assert self.cluster.network is not None
            hop_us += at.domains * self.cluster.network.hop_us
        bandwidth = self.bandwidth(at, size_share(n_bytes, self.cluster.gpu.link_gb_s))
        wire = rounds * (n - 1) / n * n_bytes / bandwidth
        return (assumed.start_us + rounds * hop_us) * 1e-6 + wire

    def send(self, n_bytes: float, *, across: bool) -> float:
        """Seconds of one message between two GPUs, between domains if `across`; all GPUs send at once."""
        assumed = latencies()
        if not across:
            return assumed.start_us * 1e-6 + n_bytes / (self.cluster.gpu.link_gb_s * 1e9 * LOCAL_SHARE)
        card = self._card()
        assert self.cluster.network is not None
        return (assumed.start_us + self.cluster.network.hop_us) * 1e-6 + n_bytes / card
