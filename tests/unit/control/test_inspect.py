"""Asking ranks what they wait for, and the kernel about those that keep silent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wired import Clock

from rank_specs import rank_spec
from seatrial.base.lines import Channel
from seatrial.control.agent import inspect as inspect_module
from seatrial.control.agent.inspect import Inspection
from seatrial.control.agent.worker import Worker
from seatrial.control.hangs.evidence import Evidence
from seatrial.record import messages as msg


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inspect_module, "time", clock)
    return clock


class Rank:
    """A process that waits, and both ends of its channel."""

    def __init__(self, local: int, log: Path) -> None:
        self.popen = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        self.ours, self.theirs = Channel.pair()
        self.worker = Worker(
            local,
            1,
            10 + local,
            "",
            rank_spec(1, 10 + local),
            "running",
            self.popen.pid,
            self.ours,
            log=log / f"{local}.log",
        )

    def close(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    made = [Rank(local, tmp_path) for local in range(2)]
    yield made
    for rank in made:
        rank.close()


def answer(inspection: Inspection, rank: int, number: int = 4) -> dict[str, Any]:
    dump = msg.Dump(number, 1, 7, 1.5, flight=[])
    inspection.add_answer(rank, dump)
    return vars(dump)


def test_it_is_over_as_soon_as_all_have_answered(clock: Clock, ranks: list[Rank]) -> None:
    inspection = Inspection(4, 2.0, [r.worker for r in ranks])
    assert [r.theirs.receive() for r in ranks] == [[msg.encode(msg.AskDump(4))]] * 2
    answer(inspection, 10)
    assert not inspection.over()
    dump = answer(inspection, 11)
    assert inspection.over()
    assert inspection.result() == msg.Inspected(4, left=[], dumps={"10": dump, "11": dump}, evidence={})


def test_an_answer_to_an_earlier_question_does_not_count(clock: Clock, ranks: list[Rank]) -> None:
    inspection = Inspection(4, 2.0, [ranks[0].worker])
    answer(inspection, 10, number=3)
    assert not inspection.over()


def test_of_the_silent_the_kernel_is_asked(clock: Clock, ranks: list[Rank]) -> None:
    os.kill(ranks[1].popen.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, ranks[1].popen.pid, os.WSTOPPED | os.WNOWAIT)
    inspection = Inspection(4, 2.0, [r.worker for r in ranks])
    answer(inspection, 10)
    clock.now = inspection.deadline
    assert not inspection.over(), "now it has looked once"
    clock.now = inspection.deadline
    assert inspection.over()
    result = inspection.result()
    assert set(result.dumps) == {"10"}
    assert set(result.evidence) == {"11"}
    assert Evidence.from_dict(result.evidence["11"]).stopped


def test_one_that_ends_meanwhile_is_dead(clock: Clock, ranks: list[Rank]) -> None:
    inspection = Inspection(4, 2.0, [ranks[0].worker])
    clock.now = inspection.deadline
    inspection.over()
    ranks[0].popen.kill()
    ranks[0].popen.wait()
    clock.now = inspection.deadline
    assert inspection.over()
    assert not Evidence.from_dict(inspection.result().evidence["10"]).alive


def test_only_ranks_that_work_are_asked(clock: Clock, ranks: list[Rank]) -> None:
    first, second = ranks
    first.worker.state = "parked"
    second.worker.channel = None  # it has hung up: the kernel can still be asked
    inspection = Inspection(4, 2.0, [first.worker, second.worker, Worker(3, 1, 13, "", rank_spec(1, 13))])
    assert first.theirs.receive() == []
    assert not inspection.over()
    first.worker.state = second.worker.state = "parked"
    empty = Inspection(5, 2.0, [first.worker, second.worker])
    assert empty.over(), "nothing to wait for"
    assert empty.result() == msg.Inspected(5, left=[], dumps={}, evidence={})
