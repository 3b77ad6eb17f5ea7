"""The processes of one node in the hands of a test: an agent's workers around ranks that load no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wired import Pump

from rank_specs import rank_spec
from seatrial.base import process
from seatrial.control.agent.worker import Worker
from seatrial.control.agent.workers import Workers
from seatrial.control.node.spec import AgentSpec
from seatrial.record import messages as msg

HERE = Path(__file__).parent
RANKS = 2


class Node:
    """One node's workers, and all that they told."""

    def __init__(self, folder: Path) -> None:
        self.pump = Pump()
        self.spec = AgentSpec(
            run=folder,
            generation=1,
            node=0,
            nodes=1,
            ranks_per_node=RANKS,
            device="cpu",
            worker_module="standin_rank",
        )
        self.spec.log.parent.mkdir(parents=True)
        self.told: list[tuple[str, int, int, dict[str, Any]]] = []  # kind, generation, rank, values
        self.workers = Workers(self.spec, self._tell, self._tell_node, self.pump.watch, self.pump.unwatch)
        self.pump.ticks.append(lambda: process.reap(self._reaped))
        self.pump.ticks.append(self.workers.meet_deadlines)
        self.reaped: set[int] = set()
        self.before = process.descendants(os.getpid())  # services that other tests use
        self.workers.start_fork_server()

    def _tell(self, worker: Worker, message: msg.Message) -> None:
        kind = message.op.removeprefix("worker_")
        self.told.append((kind, worker.generation, worker.rank, vars(message)))

    def _tell_node(self, message: msg.Message) -> None:
        kind = "fork_server_ready" if isinstance(message, msg.Ready) else message.op
        self.told.append((kind, 0, -1, vars(message)))

    def _reaped(self, pid: int, status: int) -> None:
        self.reaped.add(pid)
        self.workers.reaped(pid, status)

    def start(self, generation: int, do: dict[int, list[Any]], *, in_place: bool = True) -> None:
        """Local number -> what its rank does, which it finds beside its log; rank 10 is local number 0."""
        rank_specs = {}
        for local, actions in do.items():
            log = self.spec.rank_log(generation, 10 + local)
            log.parent.mkdir(parents=True, exist_ok=True)
            log.with_suffix(".do").write_text(json.dumps(actions))
            about = {"local_rank": local, "slot": 5, "slots": 6, "world_size": 12, "log": str(log)}
            rank_specs[local] = rank_spec(generation, 10 + local, **about)
        self.workers.start(generation, rank_specs, in_place=in_place)

    def state(self, *states: str) -> Callable[[], bool]:
        return lambda: [w.state for _, w in sorted(self.workers.workers.items())] == list(states)

    def kinds(self, generation: int, rank: int) -> list[str]:
        told = [k for k, g, r, _ in self.told if (g, r) == (generation, rank)]
        # That it has started its fork server tells, the rest the rank: which of the two is heard first is chance.
        return sorted(told, key=lambda kind: kind != "started")

    def values(self, kind: str, rank: int = -1) -> dict[str, Any]:
        """Of the last message of that kind."""
        return next(v for k, _, r, v in reversed(self.told) if (k, r) == (kind, rank))

    def close(self) -> None:
        process.kill_all(lambda: process.descendants(os.getpid()) - self.before)
        process.reap(lambda pid, status: None)
        self.pump.close()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    )
    monkeypatch.setenv(process.MARK, "test-workers")
    process.become_subreaper()
    made = Node(tmp_path)
    yield made
    made.close()
    process._prctl(process._PR_SET_CHILD_SUBREAPER, 0)
