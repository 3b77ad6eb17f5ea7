"""Agents of a check started by a real srun, in an allocation of a real Slurm: they reply, run ranks, and end with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import slurm_cluster

from seatrial.check.live import messages as msg
from seatrial.check.live.agent_pool import AgentPool
from seatrial.check.live.hosts import LOOPBACK, SRUN, hosts_of
from seatrial.check.live.live_ranks import RankGroup, Ranks

pytestmark = [
    pytest.mark.ci,
    pytest.mark.cluster,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]
WITHIN_S = 60.0


@pytest.fixture
def allocation(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[slurm_cluster.Slurm]:
    """Two of three nodes, allocated; this process is as one that runs in the job."""
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm") / "s", ("n1", "n2", "n3")) as slurm:
        done = subprocess.run(
            ["salloc", "--nodes=2", "--no-shell"],
            env=slurm.environment,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=True,
        )
        job = done.stderr.partition("job allocation ")[2].split()[0]
        nodes = slurm.run("squeue", "--noheader", "--jobs", job, "--format=%N").strip()
        for name, value in {**slurm.environment, "SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": nodes}.items():
            monkeypatch.setenv(name, value)
        try:
            yield slurm
        finally:
            slurm.run("scancel", job)


def test_agents_are_steps_of_the_job_and_end_with_the_check(allocation: slurm_cluster.Slurm) -> None:
    hosts = hosts_of()
    assert [h.name for h in hosts] == ["n1", "n2"]
    assert hosts[0].prefix == (*SRUN, "--nodelist=n1")
    # The names of these nodes are Slurm's own: no resolver knows them.
    hosts = [replace(h, address=LOOPBACK) for h in hosts]
    with AgentPool(hosts) as agent_pool:
        greetings = agent_pool.greet(WITHIN_S)
        assert all(reply.alive for reply in greetings.values()), greetings
        argv = ["sh", "-c", "echo $SLURMD_NODENAME"]
        replies = agent_pool.ask({(n, 0): msg.RunTool(argv) for n in (0, 1)}, limit_s=WITHIN_S)
        assert {n: r.value.out if r.value else r.problem for (n, _), r in replies.items()} == {
            0: "n1\n",
            1: "n2\n",
        }
        agent_pool.ask({(n, 0): msg.Prepare() for n in (0, 1)}, limit_s=120.0)
        pair = RankGroup((0, 1), ((0,), (0,)), ((0, 1, 0), (1, 0, 1)), (65536,))
        durations = msg.Durations(flow_s=0.2, sum_s=0.1, stall_s=30.0)
        (result,) = Ranks(agent_pool, hosts, ["one", "one"], "cpu").run([pair], durations, WITHIN_S)
        assert result.whole, result.why
        pids = [reply.value.pid for reply in greetings.values() if reply.value is not None]
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    # srun ends with its step, and a step with its agent.
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert "n1" in allocation.run("sinfo", "--noheader", "--Node", "--format=%N")
    assert os.environ["SLURM_JOB_ID"] in allocation.run("squeue", "--noheader", "--format=%i")
