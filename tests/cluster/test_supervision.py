"""Agents, coordinator and launcher around stand-in ranks: who takes whose place, and what the ranks are told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_cluster import RankLine, VirtualCluster

from seatrial.record import events
from seatrial.record.events import Event

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

AGENT = "seatrial.control.agent"

Start = Callable[..., VirtualCluster]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[VirtualCluster] = []

    def begin(**options: Any) -> VirtualCluster:
        kept = {"worker_module": "standin_generations", "max_restarts": 10, "resilience": ("silence_s=3.0",)}
        started.append(VirtualCluster(tmp_path, **(kept | options)))
        return started[-1]

    yield begin
    for cluster in started:
        cluster.close()


def rank_spec(line: RankLine) -> dict[str, Any]:
    """The next generation that a rank is given, after whatever else it is told."""
    while True:
        message = line.hear()
        if "rank_spec" in message:
            found: dict[str, Any] = message["rank_spec"]
            return found


def rank_specs(cluster: VirtualCluster) -> dict[int, dict[str, Any]]:
    """The generations of all ranks, by rank; each has begun to work, and the run has made a step."""
    cluster.wait_ranks()
    found = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    for line in cluster.ranks.values():
        line.tell({"beat": 1})
    return found


def replaced(cluster: VirtualCluster, count: int) -> list[RankLine]:
    """The next `count` ranks that say hello, in the order of their ranks."""
    lines = sorted((cluster.next_rank() for _ in range(count)), key=lambda line: line.rank)
    for line in lines:
        cluster.ranks[line.rank].close()
        cluster.ranks[line.rank] = line
        cluster.remember([line.pid])
    return lines


def finish(cluster: VirtualCluster) -> list[Event]:
    """Let every rank end its work; what the run's events are then."""
    for line in cluster.ranks.values():
        line.tell({"finish": "done"})
    assert cluster.result()["outcome"] == {"exit_code": 0, "failure": None}
    assert cluster.left() == []
    told, problems = events.read_events(cluster.folder)
    assert not problems
    return told


def kinds(told: list[Event]) -> list[str]:
    return [e.kind for e in told]


def test_killed_rank_is_replaced_and_others_keep_their_processes(start: Start) -> None:
    cluster = start()
    first = rank_specs(cluster)
    assert {rank_spec["generation"] for rank_spec in first.values()} == {3}
    os.kill(cluster.ranks[3].pid, signal.SIGKILL)
    (new,) = replaced(cluster, 1)
    second = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    assert new.rank == 3
    for rank, now in second.items():
        before = first[rank]
        assert now["generation"] == 4
        assert now["master_port"] != before["master_port"], "a store of its own for each generation"
        for key in ("rank", "local_rank", "world_size", "slot", "node", "layout"):
            assert now[key] == before[key]
    told = finish(cluster)
    recovering = next(e for e in told if e.kind == "recovering")
    assert (recovering.node, recovering.rank) == (1, 3)
    assert [e.generation for e in told if e.kind == "generation_started"] == [3, 4]
    started = [(e.generation, e.rank, (e.data or {})["in_place"]) for e in told if e.kind == "rank_started"]
    assert sorted(started[4:]) == [(4, 0, True), (4, 1, True), (4, 2, True), (4, 3, False)]


def test_a_spare_takes_the_place_of_a_lost_node(start: Start) -> None:
    cluster = start(spares=1)
    first = rank_specs(cluster)
    os.kill(cluster.find(AGENT, node=1), signal.SIGKILL)
    replaced(cluster, 2)
    second = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    assert [second[rank]["node"] for rank in range(4)] == [0, 0, 2, 2]
    assert [second[rank]["slot"] for rank in range(4)] == [0, 0, 1, 1]
    assert second[0]["layout"] == first[0]["layout"]
    told = finish(cluster)
    lost = next(e for e in told if e.kind == "node_lost")
    assert (lost.node, (lost.data or {})["certain"]) == (1, True)
    assert "agent_failed" in kinds(told), "the launcher knows how it ended"


def test_the_coordinators_node_is_lost_like_any_other(start: Start) -> None:
    cluster = start(spares=1)
    first = rank_specs(cluster)
    told, _ = events.read_events(cluster.folder)
    node = next(e.node for e in reversed(told) if e.kind == "coordinator_elected")
    assert node is not None
    if node == 2:
        pytest.skip("the spare was the quickest and coordinates: no rank would be lost with it")
    os.kill(cluster.find(AGENT, node=node), signal.SIGKILL)
    replaced(cluster, 2)
    second = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    for rank in range(4):
        before = first[rank]["node"]
        assert second[rank]["node"] == (2 if before == node else before)
    terms = [(e.node, (e.data or {})["term"]) for e in finish(cluster) if e.kind == "coordinator_elected"]
    assert [term for _, term in terms] == sorted({term for _, term in terms}), "no term comes twice"
    assert terms[-1][0] != node


def test_a_frozen_node_is_lost_after_its_silence(start: Start) -> None:
    cluster = start(spares=1)
    rank_specs(cluster)
    elected = next(e for e in events.read_events(cluster.folder)[0] if e.kind == "coordinator_elected")
    frozen = 0 if elected.node == 1 else 1  # without the coordinator all would lose their right to run ranks
    os.kill(cluster.find(AGENT, node=frozen), signal.SIGSTOP)
    replaced(cluster, 2)
    second = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    nodes = [second[rank]["node"] for rank in range(4)]
    assert nodes == ([0, 0, 2, 2] if frozen == 1 else [2, 2, 1, 1])
    lost = next(e for e in finish(cluster) if e.kind == "node_lost")
    assert (lost.node, (lost.data or {})["certain"]) == (frozen, False)


def test_a_node_that_comes_back_is_used_again(start: Start) -> None:
    """Two nodes, no spare, and no smaller layout allowed: the run waits."""
    cluster = start(resilience=("silence_s=3.0", "shrink=false", "node_wait_s=60"), returns={1: 0.5})
    rank_specs(cluster)
    os.kill(cluster.find(AGENT, node=1), signal.SIGKILL)
    replaced(cluster, 2)
    second = {rank: rank_spec(line) for rank, line in sorted(cluster.ranks.items())}
    assert [second[rank]["node"] for rank in range(4)] == [0, 0, 1, 1]
    told = finish(cluster)
    assert [e.node for e in told if e.kind == "agent_started"].count(1) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_preemption_lets_the_ranks_save_and_is_exit_75(start: Start, signum: signal.Signals) -> None:
    cluster = start()
    rank_specs(cluster)
    # As the terminal or a scheduler does it: the signal goes to the whole group, which is the driver's alone.
    os.killpg(cluster.driver.pid, signum)
    for line in cluster.ranks.values():
        assert line.hear()["yield"] == {"generation": 3, "how": "preempted"}
    result = cluster.result()
    assert cluster.driver.returncode == 75
    assert result["outcome"] == {"exit_code": 75, "failure": None}
    told, _ = events.read_events(cluster.folder)
    assert "preempted" in kinds(told)
    assert cluster.left() == []


def test_the_same_failure_without_progress_ends_the_run(start: Start) -> None:
    cluster = start(resilience=("silence_s=3.0", "max_same_failure=2"))
    rank_specs(cluster)
    cluster.ranks[1].tell({"exit": 7})
    (new,) = replaced(cluster, 1)
    rank_spec(new)
    new.tell({"exit": 7})
    result = cluster.result()
    assert (cluster.driver.returncode, result["outcome"]["exit_code"]) == (1, 1)
    failure = result["outcome"]["failure"]
    assert failure["message"] == "rank 1 on node 0 ended with exit code 7"
    told, _ = events.read_events(cluster.folder)
    assert "gave_up" in kinds(told)
    assert cluster.left() == []


def test_strangers_at_every_door_cost_a_run_nothing(start: Start) -> None:
    """Two processes that know no secret connect again and again, and hold what they get."""
    cluster = start(resilience=("silence_s=2.0",))
    rank_specs(cluster)
    ports = [json.loads(path.read_text())["port"] for path in cluster.folder.leases.glob("*.json")]
    ports += [e.data["port"] for e in events.read_events(cluster.folder)[0] if e.data and "port" in e.data]
    code = (
        "import socket, sys, time\n"
        "held, end = [], time.monotonic() + 8\n"
        "while time.monotonic() < end:\n"
        "    for port in map(int, sys.argv[1:]):\n"
        "        s = socket.socket(); s.setblocking(False); s.connect_ex(('127.0.0.1', port)); held.append(s)\n"
        "    held = held[-500:]\n"
    )
    flood = [
        subprocess.Popen([sys.executable, "-c", code, *map(str, set(ports))], process_group=0)
        for _ in range(2)
    ]
    for attacker in flood:
        assert attacker.wait() == 0
    for line in cluster.ranks.values():
        line.tell({"beat": 2})
    assert not {"recovering", "node_lost"}.intersection(kinds(finish(cluster)))
