"""The control machine: going on with fewer nodes, growing again, and the ways in which a run ends."""

from __future__ import annotations

import pytest
from machine_run import Run, notes, only, shrinking, small, started

from seatrial.control.machine import types as m


class TestShrinking:
    def test_memory_goes_to_disk_first_because_the_layout_changes(self) -> None:
        run = shrinking()
        assert run.stopped(0, 2, 3) == [m.Flush(1)]
        actions = run.tell(m.Flushed, 10, True)
        assert notes(actions) == ["shrunk"]
        start = only(actions, m.Start)
        assert (start.slots, start.shape, start.in_place) == ({0: 0, 1: 2}, 1, False)

    def test_a_flush_that_fails_is_not_asked_for_again(self) -> None:
        run = shrinking()
        run.stopped(0, 2, 3)
        assert only(run.tell(m.Flushed, 0, False), m.Start).shape == 1

    def test_an_unanswered_flush_times_out(self) -> None:
        run = shrinking(flush_wait_s=30.0)
        run.stopped(0, 2, 3)
        assert run.wait(29.9) == []
        assert only(run.wait(), m.Start).shape == 1
        assert run.tell(m.Flushed, 10, True) == []

    def test_a_node_that_comes_during_the_flush_is_used(self) -> None:
        run = shrinking()
        run.stopped(0, 2, 3)
        assert run.join(1) == []
        start = only(run.tell(m.Flushed, 10, True), m.Start)
        assert (start.slots, start.shape) == ({0: 0, 1: 1, 2: 2, 3: 3}, 0)

    def test_it_waits_for_a_node_first_if_node_wait_s_is_set(self) -> None:
        run = shrinking(node_wait_s=20.0)
        assert run.stopped(0, 2, 3) == []
        run.now += 19.0
        assert only(run.join(1), m.Start).slots == {0: 0, 1: 1, 2: 2, 3: 3}

    def test_and_no_longer(self) -> None:
        run = shrinking(node_wait_s=20.0)
        run.stopped(0, 2, 3)
        assert run.wait() == [m.Flush(1)]

    def test_a_run_that_may_not_shrink_waits_and_fails(self) -> None:
        run = shrinking(shrink=False, join_wait_s=60.0)
        assert run.stopped(0, 2, 3) == []
        assert notes(run.wait()) == ["waiting_for_nodes"]
        finish = only(run.wait(), m.Finish)
        assert "3 are usable, 4 are needed; node 1 is not connected (died)" in finish.message

    def test_a_second_failure_at_the_smaller_size_needs_no_wait(self) -> None:
        run = shrinking(node_wait_s=20.0)
        run.stopped(0, 2, 3)
        run.wait()
        run.tell(m.Flushed, 10, True)
        run.fail(0, step=11)
        assert only(run.stopped(0, 2), m.Start).shape == 1


class TestGrowing:
    def test_grows_only_after_the_state_is_confirmed_on_disk(self) -> None:
        run = small()
        assert run.join(1) == []
        assert run.progress(1) == [m.Yield(2, "yielded")], "only after a step: else it might never make one"
        assert only(run.left("yielded", 0), m.Flush) == m.Flush(2), "its own save may have failed"
        actions = run.tell(m.Flushed, 1, True)
        assert notes(actions) == ["grown"]
        assert only(actions, m.Start) == m.Start(3, {0: 0, 1: 1}, 0, False, "enough nodes to grow")

    def test_a_node_that_is_not_ready_would_only_be_waited_for(self) -> None:
        run = small()
        run.progress(1)
        assert run.join(1, ready=False) == []
        assert only(run.tell(m.Ready, 1), m.Yield).how == "yielded"

    def test_not_where_it_is_forbidden(self) -> None:
        run = small(grow=False)
        run.progress(1)
        assert run.join(1) == []
        run.fail(0)
        assert only(run.stopped(0), m.Start).shape == 1

    def test_a_failure_meanwhile_is_a_recovery_with_all_nodes(self) -> None:
        run = small()
        run.progress(1)
        run.join(1)
        run.fail(0, step=1)
        assert only(run.stopped(0), m.Flush)
        assert only(run.tell(m.Flushed, 1, True), m.Start).shape == 0

    def test_ranks_that_do_not_leave_are_stopped(self) -> None:
        run = small(preempt_grace_s=30.0)
        run.progress(1)
        run.join(1)
        actions = run.wait()
        assert only(actions, m.Note).data["signal"] == "hang"
        assert only(actions, m.Stop).nodes == (0,)

    def test_a_new_connection_is_asked_again(self) -> None:
        run = small()
        run.progress(1)
        run.join(1)
        assert run.join(0, running=2) == [m.Yield(2, "yielded")]


class TestTheEnd:
    def test_done_when_every_node_is(self) -> None:
        run = started(2)
        assert run.left("done", 1) == []
        assert run.left("done", 0) == [m.Finish("done", "")]
        assert run.join(0) == []

    def test_a_failure_after_some_have_finished_does_not_stop_those(self) -> None:
        run = started(2)
        run.left("done", 1)
        assert only(run.fail(0, step=9), m.Stop).nodes == (0,)
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 1}

    def test_a_run_that_is_done_while_it_stops_counts_as_done(self) -> None:
        run = started(2)
        run.left("done", 1)
        run.fail(0, step=9)
        assert run.left("done", 0) == [m.Finish("done", "")]

    def test_preemption_saves_and_leaves(self) -> None:
        run = started(2)
        assert run.tell(m.StopAsked, "preempt") == [m.Yield(1, "preempted")]
        assert run.tell(m.StopAsked, "preempt") == []
        run.left("preempted", 0)
        assert only(run.left("preempted", 1), m.Finish).how == "preempted"

    def test_preemption_does_not_recover_from_failures(self) -> None:
        run = started(2, 1)
        run.tell(m.StopAsked, "preempt")
        actions = run.tell(m.Lost, 1, True, "died")
        assert only(actions, m.Stop).nodes == (0,)
        assert only(actions, m.Finish).how == "preempted"

    def test_preemption_has_a_limit(self) -> None:
        run = started(2, preempt_grace_s=60.0)
        asked = run.now
        run.tell(m.StopAsked, "preempt")
        run.left("preempted", 0)
        actions = run.wait()
        assert run.now == asked + 60.0
        assert only(actions, m.Stop).nodes == (1,)
        assert only(actions, m.Finish).how == "preempted"

    def test_preemption_while_nothing_runs(self) -> None:
        run = Run(2)
        run.join(0)
        assert only(run.tell(m.StopAsked, "preempt"), m.Finish).how == "preempted"

    def test_preemption_overtakes_growth(self) -> None:
        run = small()
        run.progress(1)
        run.join(1)
        assert run.tell(m.StopAsked, "preempt") == [m.Yield(2, "preempted")]
        assert only(run.left("yielded", 0), m.Finish).how == "preempted"

    @pytest.mark.parametrize("why", ["interrupt", "now"])
    def test_an_interrupt_does_not_wait_for_nodes(self, why: str) -> None:
        run = started(2)
        run.tell(m.StopAsked, "preempt")
        actions = run.tell(m.StopAsked, why)
        assert only(actions, m.Stop).nodes == (0, 1)
        assert only(actions, m.Finish).how == "interrupted"

    def test_ranks_that_were_preempted_by_themselves(self) -> None:
        run = started(1)
        assert only(run.left("preempted", 0), m.Finish).how == "preempted"
