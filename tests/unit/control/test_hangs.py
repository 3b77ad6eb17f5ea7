"""When a step is overdue, who is asked, and which steps count as progress."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from seatrial.base.batches import BatchSizes
from seatrial.control.coordinator.hang_watch import Culprit, HangWatch
from seatrial.control.coordinator.recorder import Recorder
from seatrial.control.machine.world import World
from seatrial.control.net.lease import Lease
from seatrial.job.layout import Layout
from seatrial.job.schema import ResilienceSection
from seatrial.job.shapes import Shape
from seatrial.record import messages as msg
from seatrial.record.events import read_events
from seatrial.record.folder import RunFolder

WORLD = World.make(1, {0: 4, 1: 6}, [Shape(2, Layout(shard=2))], 0, 1)


class Watch:
    """A watch over two nodes with one rank each."""

    def __init__(self, folder: Path) -> None:
        self.folder = RunFolder(folder)
        self.sent: list[tuple[int, msg.ToAgent]] = []
        self.gone: set[int] = set()
        resilience = ResilienceSection(hang_min_s=10.0, hang_factor=5.0, first_step_s=100.0)
        recorder = Recorder(self.folder, 1, Lease(1, 0, "127.0.0.1", 1, 0.0))
        self.hangs = HangWatch(resilience, self._send, recorder, last_step=50, batches=BatchSizes.of(8))
        self.hangs.generation_started(0.0)

    def _send(self, node: int, message: msg.ToAgent) -> bool:
        if node not in self.gone:
            self.sent.append((node, message))
        return node not in self.gone

    def tick(self, now: float) -> list[Culprit]:
        return self.hangs.tick(now, WORLD, None)

    def steps(self, first: int, last: int, now: float) -> float:
        """One step a second."""
        for step in range(first, last + 1):
            now += 1.0
            assert self.hangs.progress(step, now)
        return now

    def answer(self, node: int, rank: int, **evidence: Any) -> None:
        asked = self.sent[-1][1]
        assert isinstance(asked, msg.Inspect)
        number = asked.id
        plain = {"pid": 1, "state": "S", "waited_s": 1.0, "cpu_s": 0.0, "threads": 1, "waits_in": ""}
        plain |= {"blocked": "", "tracer": "", "asked": False, "stack": ""}
        found = {str(rank): plain | evidence} if evidence else {}
        dump = {"id": number, "step": 3, "time": 0.0, "flight": []}
        dumps = {} if evidence else {str(rank): dump}
        self.hangs.inspected(node, msg.Inspected(number, [], dumps, found))

    def kinds(self) -> list[str]:
        return [e.kind for e in read_events(self.folder)[0]]


@pytest.fixture
def watch(tmp_path: Path) -> Watch:
    return Watch(tmp_path)


def test_the_first_step_has_a_limit_of_its_own(watch: Watch) -> None:
    assert watch.tick(99.0) == []
    assert watch.sent == []
    watch.tick(100.0)
    assert [node for node, _ in watch.sent] == [4, 6]
    assert watch.kinds() == ["step_overdue"]


def test_a_rank_that_is_stopped_is_named(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    assert watch.hangs.deadline == now + 10.0
    assert watch.tick(now + 10.0) == []
    watch.answer(4, 0)
    assert watch.tick(now + 10.1) == [], "one has not answered"
    watch.answer(6, 1, state="T")
    (culprit,) = watch.tick(now + 10.2)
    assert (culprit.node, culprit.rank, culprit.signal) == (6, 1, "stopped")
    assert watch.kinds() == ["step_overdue", "hang_blamed"]
    assert watch.tick(now + 500.0) == [], "what comes of it is another generation"


def test_a_node_that_does_not_answer_is_not_waited_for_for_ever(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    watch.gone = {6}
    watch.tick(now + 10.0)
    watch.answer(4, 0)
    assert len(watch.tick(now + 10.1)) == 1, "node 6 could not even be asked"


def test_progress_while_the_ranks_are_asked_ends_it(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    watch.tick(now + 10.0)
    assert watch.hangs.progress(6, now + 10.5)
    assert watch.tick(now + 14.0) == []
    assert watch.kinds() == ["step_overdue"]


def test_answers_to_an_earlier_question_do_not_count(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    watch.tick(now + 10.0)
    watch.hangs.inspected(4, msg.Inspected(77, [], {}, {}))
    watch.hangs.inspected(6, msg.Inspected(77, [], {}, {}))
    assert watch.tick(now + 10.1) == []


def test_steps_that_are_done_again_after_a_rollback_are_progress(watch: Watch) -> None:
    """From step 20 back to 10: the way back to 20 takes as long as ten steps."""
    now = watch.steps(1, 20, 0.0)
    assert watch.hangs.progress(11, now + 1.0), "it went back"
    assert watch.hangs.step == 11
    for step in range(12, 21):
        now += 9.0
        assert watch.hangs.progress(step, now)
        assert watch.tick(now) == []
    assert watch.kinds() == []


def test_the_same_step_again_is_not_progress(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    assert not watch.hangs.progress(5, now + 1.0)
    assert not watch.hangs.progress(0, now + 2.0), "some node has not done any yet"
    assert watch.hangs.deadline == now + 10.0


def test_a_long_validation_is_no_hang_but_a_hang_in_it_is_found(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    watch.hangs.validating((5, 0), now)  # none
    assert watch.hangs.deadline == now + 10.0
    watch.hangs.validating((5, 1), now)
    assert watch.hangs.deadline == now + 100.0, "the first of a generation may be compiled"
    for batch in range(2, 30):
        now += 9.0
        assert watch.tick(now) == []
        watch.hangs.validating((5, batch), now)
    assert watch.kinds() == []
    now = watch.steps(6, 6, now)
    assert watch.hangs.deadline == now + 10.0, "what it took is no step's time"
    watch.hangs.validating((6, 1), now)
    watch.hangs.validating((6, 1), now + 5.0)  # no news
    watch.tick(now + 10.0)
    assert watch.kinds() == ["step_overdue"]


def test_after_the_last_step_there_is_time_for_a_validation(watch: Watch) -> None:
    now = watch.steps(40, 50, 0.0)
    for batch in range(1, 4):
        now += 99.0
        assert watch.tick(now) == []
        watch.hangs.validating((50, batch), now)
    assert watch.tick(now + 99.0) == [], "the last save follows"
    assert watch.kinds() == []


def test_after_the_last_step_there_is_time_for_the_last_save(watch: Watch) -> None:
    now = watch.steps(40, 50, 0.0)
    assert watch.tick(now + 99.0) == []
    assert watch.kinds() == []
    assert not watch.hangs.progress(50, now + 99.0)
    watch.tick(now + 101.0)
    assert watch.kinds() == ["step_overdue"], "but not for ever"


@pytest.mark.parametrize("told_first", [True, False])
def test_ranks_that_wait_for_the_storage_do_not_hang(watch: Watch, told_first: bool) -> None:
    now = watch.steps(1, 19, 0.0)
    if told_first:
        watch.hangs.waits_for_storage(20, now)
    now = watch.steps(20, 20, now)
    if not told_first:
        watch.hangs.waits_for_storage(20, now)
    assert watch.tick(now + 99.0) == []
    assert watch.kinds() == []
    now = watch.steps(21, 22, now + 99.0)
    assert watch.hangs.deadline == now + 10.0, "afterwards it is as before"


def test_while_nothing_is_expected_nothing_counts(watch: Watch) -> None:
    now = watch.steps(1, 5, 0.0)
    watch.hangs.generation_ended()
    assert not watch.hangs.progress(3, now + 1.0)
    assert not watch.hangs.progress(6, now + 1.0)
    assert watch.tick(now + 1000.0) == []
    assert not watch.hangs.watching
    watch.hangs.generation_started(now + 1000.0)
    assert watch.hangs.progress(4, now + 1001.0), "another generation may begin at an earlier step"
