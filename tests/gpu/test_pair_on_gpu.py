"""Ranks of a check on CUDA devices: NCCL in forked ranks, its refusals as failures in time, and two GPUs as two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool
from seatrial.check.live.hosts import LOOPBACK, Host
from seatrial.check.live.live_ranks import Outcome, RankGroup, Ranks

MIB = 1 << 20
DURATIONS = msg.Durations(flow_s=0.5, sum_s=0.5, stall_s=60.0)
WAYS = ((0, 1, 0), (1, 0, 1))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device (torch.cuda.is_available() is false)"
    ),
]
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, there are {torch.cuda.device_count()}"
)


@pytest.fixture
def agent_pool() -> Iterator[AgentPool]:
    """Two hosts on this machine, ready to run ranks. The machine's names say that they do not have to take turns."""
    with AgentPool(
        [Host(f"node{n}", LOOPBACK, environment={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}) for n in (0, 1)]
    ) as made:
        assert all(reply.alive for reply in made.greet(60.0).values())
        ready = made.ask({(n, 0): msg.Prepare() for n in (0, 1)}, limit_s=300.0)
        assert all(reply.value is not None for reply in ready.values()), ready
        yield made


def play(agent_pool: AgentPool, *worlds: RankGroup) -> list[Outcome]:
    return Ranks(agent_pool, agent_pool.hosts, ["a", "b"], "cuda").run(worlds, DURATIONS, 300.0)


def test_one_rank_sums_correctly_and_nccl_logs(agent_pool: AgentPool) -> None:
    (result,) = play(agent_pool, RankGroup((0,), ((0,),), sizes=(MIB, 256 * MIB)))
    assert result.whole, result.why
    assert [(s.size_bytes, s.wrong) for s in result.sums] == [(MIB, 0), (256 * MIB, 0)]
    assert all(s.seconds > 0 for s in result.sums)
    assert all(host == 0 and "NCCL" in line for host, line in result.nccl)


def test_two_ranks_on_one_gpu_fail_in_time_and_hosts_survive(agent_pool: AgentPool) -> None:
    (result,) = play(agent_pool, RankGroup((0, 1), ((0,), (0,)), WAYS, (MIB,)))
    assert not result.whole
    assert result.sums == []
    assert "duplicate gpu" in (result.why + " ".join(line for _, line in result.nccl)).lower()
    assert all(
        reply.alive for reply in agent_pool.ask({(n, 0): msg.Ping() for n in (0, 1)}, limit_s=30.0).values()
    )
    (again,) = play(agent_pool, RankGroup((0,), ((0,),), sizes=(MIB,)))
    assert again.whole, again.why


@two_gpus
def test_two_gpus_send_and_receive_and_sum(agent_pool: AgentPool) -> None:
    (result,) = play(agent_pool, RankGroup((0, 1), ((0,), (1,)), WAYS, (MIB, 256 * MIB)))
    assert result.whole, result.why
    for way in (0, 1):
        (flow,) = result.direction(way)
        assert flow.gbit_s > 10.0  # PCIe 3.0 x4 carries twice as much
    assert [s.wrong for s in result.sums] == [0, 0]
    text = " ".join(line for _, line in result.nccl)
    assert "nRanks 2" in text
    assert "coll channels" in text


@two_gpus
def test_the_gpus_of_one_host_sum_together(agent_pool: AgentPool) -> None:
    count = torch.cuda.device_count()
    (result,) = play(agent_pool, RankGroup((0,), (tuple(range(count)),), sizes=(256 * MIB,)))
    assert result.whole, result.why
    (total,) = result.sums
    assert total.wrong == 0
    assert total.busbw(count) > 1.0
