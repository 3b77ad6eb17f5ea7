"""Collective times: against published measurements, across domains, and monotony."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.hardware.catalogue import find_gpu
from seatrial.hardware.networks import find_network, networks
from seatrial.plan.cost.collectives import Fabric, UnknownNetworkError, size_share
from seatrial.plan.model.cluster import Cluster, Group, group

B200 = find_gpu("B200 SXM")
EFA = find_network("AWS P6-B200 EFAv4")
assert B200 is not None
assert EFA is not None
FABRIC = Fabric(Cluster(B200, 4, 8, EFA))
MIB = 2**20
# all_reduce busbw in GB/s over 8 GPUs of one node and over 4 nodes: stas00/ml-engineering@744d01e network/README.md.
PUBLISHED = {
    1: (36.06, 5.37),
    16: (254.96, 64.43),
    256: (646.11, 229.09),
    1024: (723.34, 361.99),
    8192: (839.07, 380.39),
}


def busbw(fabric: Fabric, n_bytes: int, at: Group) -> float:
    return 2 * (at.size - 1) / at.size * n_bytes / fabric.seconds("all_reduce", n_bytes, at) / 1e9


@pytest.mark.parametrize("mib", PUBLISHED)
def test_all_reduce_is_near_published_times(mib: int) -> None:
    inside, across = PUBLISHED[mib]
    # Rings; the published run changes to NVLink's own sums (NVLS) at 8 GiB. Across nodes middle sizes are not ramped.
    assert busbw(FABRIC, mib * MIB, Group(8, 8)) == pytest.approx(inside, rel=0.25)
    assert busbw(FABRIC, mib * MIB, Group(32, 8)) == pytest.approx(across, rel=0.65)


def test_a_group_uses_the_nics_of_its_own_ranks() -> None:
    one, all_ = FABRIC.bandwidth(Group(4, 1)), FABRIC.bandwidth(Group(32, 8))
    assert one == pytest.approx(EFA.gb_s_per_gpu * 1e9 * 0.95)
    assert all_ == pytest.approx(8 * one)
    assert FABRIC.bandwidth(Group(8, 8)) > all_


def test_groups_by_stride() -> None:
    cluster = FABRIC.cluster
    assert group(cluster, stride=1, size=8) == Group(8, 8)
    assert group(cluster, stride=8, size=4) == Group(4, 1)
    assert group(cluster, stride=2, size=16) == Group(16, 4)
    assert group(cluster, stride=2, size=16).domains == 4


def test_an_unknown_network_raises() -> None:
    alone = Fabric(Cluster(B200, 2, 8, None))
    assert alone.seconds("all_gather", 1e9, Group(8, 8)) > 0
    with pytest.raises(UnknownNetworkError, match="2 nodes"):
        alone.seconds("all_gather", 1e9, Group(16, 8))


@given(
    size=st.integers(1, 2**34),
    more=st.integers(1, 2**30),
    ranks=st.sampled_from([2, 4, 8, 16, 64]),
    faster=st.floats(1.0, 4.0),
)
def test_more_bytes_are_never_faster_more_bandwidth_never_slower(
    size: int, more: int, ranks: int, faster: float
) -> None:
    at = group(FABRIC.cluster, stride=1, size=ranks)
    fast = Fabric(replace(FABRIC.cluster, network=replace(EFA, gbps_per_nic=EFA.gbps_per_nic * faster)))
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        time = FABRIC.seconds(kind, size, at)
        assert FABRIC.seconds(kind, size + more, at) >= time
        assert fast.seconds(kind, size, at) <= time * (1 + 1e-12)
    assert 0 < size_share(size) <= size_share(size + more) <= 1


@given(size=st.integers(1, 2**34), ranks=st.sampled_from([2, 4, 8]), faster=st.floats(1.0, 8.0))
def test_faster_links_are_never_slower(size: int, ranks: int, faster: float) -> None:
    fast = Fabric(replace(FABRIC.cluster, gpu=replace(B200, link_gb_s=B200.link_gb_s * faster)))
    at = Group(ranks, 8)
    assert fast.seconds("all_reduce", size, at) <= FABRIC.seconds("all_reduce", size, at) * (1 + 1e-12)
    assert size_share(size, 300.0) >= size_share(size, 900.0)


def test_collectives_reach_a_networks_measured_share() -> None:
    """39.9 of 100 Gb/s a card over Omni-Path, with one rank a node and two cards' worth of ranks for each card."""
    slow, usual = find_network("Omni-Path 4x100"), find_network("AWS P4d")
    assert slow is not None
    assert usual is not None
    a100 = find_gpu("A100-80GB SXM")
    assert a100 is not None
    rates = [Fabric(Cluster(a100, 4, 8, n)).bandwidth(Group(4, 1)) for n in (slow, usual)]
    assert rates[0] / rates[1] == pytest.approx(0.4 / 0.95)


def test_every_network_has_a_source() -> None:
    assert len({n.name for n in networks()}) == len(networks())
    for network in networks():
        assert network.source
        assert network.hop_source
        assert network.reached_source
        assert 0 < network.reached <= 1
        assert 0 < network.gb_s_per_gpu <= 200
    reference = find_network("infiniband ndr 8x400")
    assert reference is not None
    assert 128 * reference.gb_s_per_gpu == pytest.approx(6400)  # 6.4 TB/s over 16 nodes
