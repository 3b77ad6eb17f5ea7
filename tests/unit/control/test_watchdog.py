"""Stalled processes of an agent: which are killed, which are reported, and what follows."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from node_processes import Node, node

from seatrial.base import process, stalled
from seatrial.control.agent import watchdog
from seatrial.control.agent.watchdog import Watchdog
from seatrial.control.agent.worker import Worker

__all__ = ["node"]


class Watched:
    """A node's workers with a watchdog that looks twenty times a second, and what it told."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (stalled, watchdog):
            monkeypatch.setattr(module, "SAMPLE_S", 0.05)
        monkeypatch.setattr(stalled, "STOPPED_S", 0.5)
        self.node = node
        self.helpers: dict[int, str] = {}
        self.ranks: list[tuple[int, str]] = []
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.dog = Watchdog(
            node.workers,
            lambda: dict(self.helpers),
            os.getppid(),
            rank_stopped=self._rank_stopped,
            report=lambda message, data: self.told.append((message, data)),
        )
        node.pump.ticks.append(self.dog.tick)

    def _rank_stopped(self, worker: Worker, why: str) -> None:
        self.ranks.append((worker.rank, why))


@pytest.fixture
def watched(node: Node, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(node, monkeypatch)


@pytest.mark.cluster  # slow
def test_a_stopped_fork_server_is_killed_and_comes_again(node: Node, watched: Watched) -> None:
    node.pump.until(lambda: node.workers.fork_server_ready)
    old = node.workers.fork_server
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    node.start(1, {0: ["beat"]})
    node.pump.until(lambda: [k for k, *_ in node.told if k == "fork_server_exited"])
    assert node.values("fork_server_exited")["status"] == -signal.SIGKILL, (
        "a failure, which is recovered from"
    )
    ((message, data),) = watched.told
    assert message.startswith(f"the fork server (process {old}) has been stopped by a signal for")
    assert data == {"pid": old, "killed": True}
    node.start(2, {0: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step)


@pytest.mark.cluster  # slow
def test_a_fork_server_that_does_not_answer_is_killed(
    node: Node, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_CHECKS", 5)
    monkeypatch.setattr(stalled, "STOPPED_S", 1e9)  # what keeps it from answering is not known
    node.pump.until(lambda: node.workers.fork_server_ready)
    old = node.workers.fork_server
    assert old is not None
    for _ in range(20):
        node.pump.round(0.05)
    assert watched.told == [], "it answers"
    os.kill(old, signal.SIGSTOP)
    node.pump.until(lambda: node.workers.fork_server not in (None, old))
    assert "has not answered for" in watched.told[0][0]


@pytest.mark.cluster  # slow
def test_stopped_rank_is_reported_once_and_not_killed(node: Node, watched: Watched) -> None:
    node.start(1, {0: ["beat"], 1: ["beat"]})
    node.pump.until(lambda: node.workers.workers[0].step and node.workers.workers[1].step)
    pid = node.workers.workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    node.pump.until(lambda: watched.ranks)
    for _ in range(10):
        node.pump.round(0.05)
    ((rank, why),) = watched.ranks
    assert (rank, why.split(" for")[0]) == (11, f"process {pid} has been stopped by a signal")
    assert node.workers.workers[1].alive
    assert watched.told == []


@pytest.mark.cluster  # slow
def test_finished_rank_that_is_stopped_is_killed_as_clean_exit(node: Node, watched: Watched) -> None:
    node.start(1, {0: [{"finish": "done"}], 1: ["park"]})
    node.pump.until(node.state("finished", "parked"))
    pids = [w.pid for w in node.workers.workers.values()]
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    node.pump.until(node.state("exited", "exited"))
    assert [w.left for w in node.workers.workers.values()] == [True, False]
    assert sorted(data["pid"] for _, data in watched.told) == sorted(pids)


@pytest.fixture
def helper() -> Iterator[int]:
    pid = process.fork(lambda: signal.pause() or 0)
    yield pid
    process.signal_group(pid, signal.SIGKILL)


@pytest.mark.cluster  # slow
def test_stopped_transfer_is_killed_but_stopped_launcher_is_not(
    node: Node, watched: Watched, helper: int
) -> None:
    launcher = process.fork(lambda: signal.pause() or 0)
    watched.dog._parent = launcher
    watched.helpers[helper] = "snapshot transfer (push)"
    for pid in (helper, launcher):
        os.kill(pid, signal.SIGSTOP)
    try:
        node.pump.until(lambda: len(watched.told) == 2)
        node.pump.until(lambda: helper in node.reaped)
        assert launcher in process.living()
        told = sorted(message.split(" for ")[0] for message, _ in watched.told)
        assert told == [
            f"the launcher (process {launcher}) has been stopped by a signal",
            f"the snapshot transfer (push) (process {helper}) has been stopped by a signal",
        ]
    finally:
        process.signal_group(launcher, signal.SIGKILL)
