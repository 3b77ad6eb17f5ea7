"""The control machine: another coordinator goes on from the memory of the last one."""

from __future__ import annotations

from machine_run import none, only, shrinking, started

from seatrial.control.machine import types as m


class TestAnotherCoordinator:
    def test_it_takes_over_what_runs_without_a_restart(self) -> None:
        run = started(2, 1).successor()
        assert run.join(0, running=1) == []
        assert run.join(2) == []
        assert run.join(1, running=1) == []
        assert run.machine.phase == "running"
        assert run.left("done", 0, 1) == [m.Finish("done", "")]

    def test_a_node_that_lost_its_ranks_meanwhile(self) -> None:
        run = started(2, 1).successor()
        run.join(0, running=1)
        run.join(2)
        actions = run.join(1)
        assert only(actions, m.Stop).nodes == (0, 1)
        assert only(run.stopped(0, 1), m.Start).generation == 2

    def test_a_node_that_does_not_come_has_stopped_by_then(self) -> None:
        run = started(2, 1, silence_s=3.0, fence_s=1.0).successor()
        run.join(0, running=1)
        run.join(2)
        assert run.machine.deadline() == run.now + 4.0
        actions = run.wait()
        assert only(actions, m.Note).data["signal"] == "node_silent"
        assert only(actions, m.Stop).nodes == (0,)
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 2}

    def test_a_node_that_is_known_to_be_dead_is_not_waited_for(self) -> None:
        run = started(2, 1).successor()
        run.join(1, running=1)
        run.join(2)
        run.tell(m.Lost, 0, True, "died with the coordinator")
        assert only(run.stopped(1), m.Start).slots == {0: 2, 1: 1}

    def test_it_does_not_shrink_before_the_others_can_have_come(self) -> None:
        before = started(3, shapes=(3, 2, 1), silence_s=3.0, fence_s=1.0)
        before.fail(0)
        run = before.successor()
        run.join(1)
        assert none(run.stopped(1), m.Start, m.Flush)
        run.join(0, 2)
        assert only(run.stopped(0, 2), m.Start).slots == {0: 0, 1: 1, 2: 2}

    def test_generation_numbers_exceed_all_reported_ones(self) -> None:
        run = started(2).successor()
        run.join(0, running=1)
        run.join(1, running=4)
        assert only(run.stopped(0) + run.tell(m.Stopped, 4, 1), m.Start).generation == 5

    def test_a_start_that_reached_only_some(self) -> None:
        run = started(3).successor()
        run.join(0, running=1)
        run.join(1)
        run.join(2)
        assert only(run.stopped(0, 1, 2), m.Start).generation == 2

    def test_evicted_nodes_stay_evicted(self) -> None:
        before = started(2, 1)
        before.fail(1, "xid:79")
        before.stopped(0, 1)
        run = before.successor()
        assert run.join(1) == [m.Evict(1, "xid:79 on 1")]
        run.join(0, 2, running=2)
        assert run.machine.phase == "running"

    def test_a_reset_that_was_not_ordered_yet_is(self) -> None:
        before = started(2, 1)
        before.fail(1, "xid:74")
        run = before.successor()
        run.join(1)
        assert run.stopped(1) == [m.ResetGpu(1, None, "xid:74 on 1")]

    def test_budgets_are_kept(self) -> None:
        run = started(1, max_same_failure=2)
        run.fail(0, rank=0, step=7)
        run.stopped(0)
        run = run.successor()
        run.join(0, running=2)
        assert "2 times at step 7" in only(run.fail(0, rank=0, step=7), m.Finish).message

    def test_a_preemption_goes_on(self) -> None:
        before = started(2)
        before.tell(m.StopAsked, "preempt")
        before.left("preempted", 0)
        run = before.successor()
        run.join(0)
        assert run.join(1, running=1) == [m.Yield(1, "preempted")]
        assert only(run.left("preempted", 1), m.Finish).how == "preempted"

    def test_the_successor_repeats_the_end_of_the_run_once(self) -> None:
        before = started(1)
        finish = only(before.left("done", 0), m.Finish)
        run = before.successor()
        assert run.join(0) == [finish]
        assert run.join(0) == []

    def test_a_flush_is_asked_for_again(self) -> None:
        before = shrinking()
        before.stopped(0, 2, 3)
        run = before.successor()
        run.join(0, 2, 3)
        assert run.wait() == [m.Flush(1)]
