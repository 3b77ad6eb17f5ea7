"""`cluster.namespaces`: nodes of one machine that share nothing but the disk."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Run, records
from seatrial.base.errors import InputError
from seatrial.job import load_job
from seatrial.launch.netns import Hosts, Unavailable

pytestmark = [pytest.mark.cluster, pytest.mark.ci, pytest.mark.timed]

APART = ("--set", "cluster.namespaces=true")


@pytest.fixture(autouse=True)
def possible() -> None:
    try:
        with Hosts(1):
            pass
    except Unavailable as error:
        pytest.skip(str(error))


def losses(folder: Path) -> list[float]:
    last = {r["step"]: r["loss"] for r in records(folder / "runs/small/metrics.jsonl")}
    return [last[step] for step in sorted(last)]


@pytest.mark.long
def test_nodes_in_namespaces_give_the_same_losses_as_without(folder: Path, start: Callable[..., Run]) -> None:
    run = start("--set", "train.steps=40", *APART)
    run.wait_line("step   ")
    ranks = run.ranks()
    for kind in ("net", "mnt", "uts"):
        found = [os.readlink(f"/proc/{ranks[r]}/ns/{kind}") for r in range(4)]
        assert found[0] == found[1] != found[2] == found[3]
    for rank, pid in ranks.items():
        assert b"\0TMPDIR=/dev/shm/tmp\0" in Path(f"/proc/{pid}/environ").read_bytes()
        shm = os.stat(f"/proc/{pid}/root/dev/shm").st_dev
        assert (shm == os.stat(f"/proc/{ranks[0]}/root/dev/shm").st_dev) == (rank < 2)
    assert run.wait()[0] == 0
    apart = losses(folder)
    assert start("--fresh", "--set", "train.steps=40").wait()[0] == 0
    assert losses(folder) == apart
    assert len(apart) == 40
    assert not list(Path("/run/netns").glob(f"st-{run.process.pid}*"))


@pytest.mark.long
def test_the_loss_of_the_coordinators_node_is_survived(folder: Path, start: Callable[..., Run]) -> None:
    run = start("--set", "cluster.spares=1", "--set", "train.steps=60", "--set", "data.train=corpus", *APART)
    run.wait_line("step   ")
    events = folder / "runs/small/events.jsonl"
    (node,) = (e["node"] for e in records(events) if e["kind"] == "coordinator_elected")
    (agent,) = (
        e["data"]["pid"] for e in records(events) if e["kind"] == "agent_started" and e["node"] == node
    )
    os.kill(agent, signal.SIGKILL)
    assert run.wait()[0] == 0
    elected = [e["node"] for e in records(events) if e["kind"] == "coordinator_elected"]
    assert elected[0] == node != elected[-1]
    assert len(losses(folder)) == 60


def test_namespaces_are_for_one_machine(folder: Path) -> None:
    with pytest.raises(
        InputError, match=r'namespaces is for the nodes of one machine, but launcher is "slurm"'
    ):
        load_job(folder / "job.toml", ["cluster.namespaces=true", "cluster.launcher=slurm"])
