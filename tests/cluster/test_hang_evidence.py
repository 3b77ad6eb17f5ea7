"""Real hangs of real ranks: who is found, how, and that the others can be had out of it and go on."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hang_agent import Forker, RankAgent

from seatrial.record import messages as msg

pytestmark = [pytest.mark.cluster, pytest.mark.timed]

LAYOUT = {"pipeline": 2, "shard": 2}
CULPRIT = 1

Begin = Callable[..., RankAgent]


@pytest.fixture(scope="module")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def begin(forker: Forker, tmp_path: Path) -> Iterator[Begin]:
    """Start four ranks; the culprit hangs in its third step, in the way given."""
    agents: list[RankAgent] = []

    def start(
        fault: str | None = None, *, culprit: int = CULPRIT, layout: Any = LAYOUT, **plan: Any
    ) -> RankAgent:
        planted = {"rank": culprit, "step": 3, "kind": fault} if fault is not None else None
        agent = RankAgent(forker, tmp_path, {"layout": layout, "steps": 1000, "fault": planted, **plan})
        agents.append(agent)
        agent.fork(*range(agent.layout.world_size))
        agent.start_generation(1)
        if fault is not None:
            assert agent.hear("fault", culprit) == {culprit: fault}
        return agent

    yield start
    for agent in agents:
        agent.close()


@pytest.mark.parametrize("kind", ["sleep", "spin"])
def test_absent_rank_is_found_behind_indirect_waiters(begin: Begin, kind: str) -> None:
    blame = begin(kind).blame(CULPRIT)
    assert (blame.ranks, blame.kind) == ((CULPRIT,), "not_arrived"), blame
    assert blame.operation is not None
    assert blame.operation.waiting == (0,)
    # FSDP2's all-gather: on gloo a broadcast of each rank's part.
    assert str(blame.operation).startswith("broadcast number ")
    assert "of the shard group of ranks 0, 1" in str(blame)
    assert "hang_ranks.py" in str(blame)  # the line that hangs
    assert "2 more wait through others" in str(blame)


def test_absent_rank_is_found_with_several_collectives_in_flight(begin: Begin) -> None:
    """Asynchronous tensor parallel: all gathers of a layer are launched before the first one is waited for."""
    blame = begin("sleep", layout={"tensor": 2, "shard": 2}, async_tensor=True).blame(CULPRIT)
    assert (blame.ranks, blame.kind) == ((CULPRIT,), "not_arrived"), blame
    assert blame.operation is not None
    # Both wait for it directly, in its tensor and its shard group, and begin within milliseconds of each other: the operation
    # that is named is the one that has waited longest.
    groups = {(0,): "tensor group of ranks 0, 1", (3,): "shard group of ranks 1, 3"}
    assert blame.operation.group == groups[blame.operation.waiting]
    assert "hang_ranks.py" in str(blame)  # the line that hangs
    assert "2 more wait through others" in str(blame)


def test_absent_pipeline_rank_is_found_without_gloo_recv_records(begin: Begin) -> None:
    blame = begin("sleep", culprit=2, layout={"pipeline": 4}).blame(2)
    assert (blame.ranks, blame.kind) == ((2,), "not_arrived"), blame
    assert blame.operation is not None
    assert blame.operation.name == "send or receive"
    assert "rank 0 for 1 for 2" in str(blame)


@pytest.mark.parametrize("kind", ["gil-waiting", "gil-busy"])
def test_rank_holding_the_gil_in_native_code_is_found_by_silence(begin: Begin, kind: str) -> None:
    blame = begin(kind).blame(CULPRIT)
    assert (blame.ranks, blame.kind) == ((CULPRIT,), "gil_held"), blame
    assert "in hang" in str(blame)  # the native stack's last frame of Python
    assert blame.operation is not None
    assert blame.operation.waiting == (0,)


def test_a_stopped_rank_is_found(begin: Begin) -> None:
    agent = begin()
    agent.hear("beat", *range(4))
    os.kill(agent.pids[CULPRIT], signal.SIGSTOP)
    blame = agent.blame(CULPRIT)
    assert (blame.ranks, blame.kind) == ((CULPRIT,), "stopped"), blame
    assert blame.operation is not None


def test_ranks_leave_a_hung_collective_and_train_in_a_new_world(begin: Begin) -> None:
    agent = begin("sleep")
    others = [r for r in range(4) if r != CULPRIT]
    agent.settled(CULPRIT)
    asked = time.monotonic()
    agent.send(msg.Abandon(1), *others)
    assert {p["generation"] for p in agent.hear("parked", *others).values()} == {1}
    print(f"parked {(time.monotonic() - asked) * 1e3:.0f} ms after the order")
    agent.kill(CULPRIT)
    agent.plan["fault"] = None
    agent.fork(CULPRIT)
    agent.start_generation(2)
    assert len(agent.hear("losses", *range(4))) == 4


def test_worlds_are_rebuilt_repeatedly_in_the_same_processes(begin: Begin) -> None:
    agent = begin()
    agent.hear("first", *range(4))
    losses = agent.hear("losses", *range(4))[0]
    left: dict[int, list[dict[str, Any]]] = {r: [] for r in range(4)}
    for generation, victim in enumerate((0, 3, 3, 3, 3), start=2):
        # At rest, since gloo can lose a send whose peer dies at that moment; `rounds.py` kills at any.
        os.kill(agent.pids[victim], signal.SIGSTOP)
        agent.settled(victim)
        killed = time.monotonic()
        agent.kill(victim)
        others = [r for r in range(4) if r != victim]
        for rank, values in agent.hear("left", *others).items():
            left[rank].append(values)
        assert len(agent.hear("parked", *others)) == 3
        parked = time.monotonic()
        agent.fork(victim)
        agent.start_generation(generation)
        assert len(agent.hear("first", *range(4))) == 4
        stepped = time.monotonic()
        assert agent.hear("losses", *range(4)) == dict.fromkeys(range(4), losses)
        print(
            f"all parked {(parked - killed) * 1e3:.0f} ms after the kill, first step of the new world "
            f"{(stepped - parked) * 1e3:.0f} ms later; {left[1][-1]}"
        )
    for rank in (1, 2):
        assert all(v["groups"] == 0 for v in left[rank])
        # The first two worlds leave something in torch's caches; after that nothing may be added.
        for what in ("threads", "fds"):
            assert left[rank][1][what] == left[rank][2][what] == left[rank][4][what], left[rank]


def test_a_rank_ends_when_its_agent_does(begin: Begin) -> None:
    agent = begin("sleep")
    handles = [os.pidfd_open(pid) for pid in agent.pids.values()]
    agent.leave()
    for handle in handles:  # of the one that hangs as well as of those that wait for it
        assert select.select([handle], [], [], 10.0)[0]
        os.close(handle)
