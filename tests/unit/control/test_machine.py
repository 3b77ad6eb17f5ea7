"""The control machine, story by story: the first start, failures, lost nodes. Random histories are in tests/sim."""

from __future__ import annotations

from typing import Any

from machine_run import Run, none, notes, only, started

from seatrial.control.machine import types as m
from seatrial.control.machine.policy import rule_for


class TestTheFirstStart:
    def test_it_comes_when_every_node_is_here(self) -> None:
        run = Run(2)
        assert run.join(0) == []
        assert run.join(1) == [m.Start(1, {0: 0, 1: 1}, 0, False, "first start")]

    def test_generations_go_on_where_an_earlier_command_ended(self) -> None:
        assert only(Run(1, first_generation=8).join(0), m.Start).generation == 8

    def test_nodes_need_not_be_ready(self) -> None:
        assert only(Run(2).join(1, 0, ready=False), m.Start).slots == {0: 0, 1: 1}

    def test_early_spare_waits_briefly_for_the_slots_own_node(self) -> None:
        run = Run(2, 1, silence_s=3.0)
        assert run.join(2, 0) == []
        run.now += 1.0
        assert only(run.join(1), m.Start).slots == {0: 0, 1: 1}

    def test_a_spare_takes_the_place_of_a_node_that_does_not_come(self) -> None:
        run = Run(2, 1, silence_s=3.0)
        run.join(2, 0)
        assert run.machine.deadline() == run.now + 3.0
        assert only(run.wait(), m.Start).slots == {0: 0, 1: 2}

    def test_after_the_wait_it_starts_smaller(self) -> None:
        run = Run(4, shapes=(4, 3, 1), join_wait_s=60.0)
        run.join(0, 3)
        assert run.wait(59.9) == []
        actions = run.wait()
        assert notes(actions) == ["shrunk"]
        assert only(actions, m.Start) == m.Start(1, {0: 0}, 2, False, "first start")
        assert none(actions, m.Flush), "there is nothing in memory yet"

    def test_too_few_nodes_end_the_run_and_are_named(self) -> None:
        run = Run(3, shapes=(3, 2), join_wait_s=60.0)
        run.join(1)
        told = only(run.wait(), m.Note)
        assert (told.kind, told.data) == ("waiting_for_nodes", {"usable": 1, "needed": 2, "until_s": 55.0})
        assert "node 0 is not connected; node 2 is not connected" in told.message
        finish = only(run.wait(), m.Finish)
        assert finish.how == "failed"
        assert (
            "1 are usable, 2 are needed; node 0 is not connected; node 2 is not connected" in finish.message
        )

    def test_a_run_that_may_not_shrink_needs_all(self) -> None:
        run = Run(3, shapes=(3, 2), shrink=False, join_wait_s=60.0)
        run.join(0, 1)
        assert "2 are usable, 3 are needed" in only(run.wait(), m.Note).message
        assert "2 are usable, 3 are needed" in only(run.wait(), m.Finish).message

    def test_it_may_wait_for_ever(self) -> None:
        run = Run(2, shapes=(2, 1), join_wait_s=0.0)
        run.join(0)
        assert run.machine.deadline() is None
        assert run.wait(1e9) == []
        assert only(run.join(1), m.Start).shape == 0

    def test_what_a_node_still_runs_from_before_is_stopped_first(self) -> None:
        run = Run(2, first_generation=3)
        assert run.join(0, running=5) == [m.Stop(5, (0,), 1.0)]
        assert run.join(1) == []
        assert only(run.tell(m.Stopped, 5, 0), m.Start).generation == 6


class TestAFailedRank:
    def test_all_nodes_stop_before_in_place_restart(self) -> None:
        run = started(2)
        run.progress(7)
        actions = run.fail(1, rank=5, step=7)
        note, stop = only(actions, m.Note), only(actions, m.Stop)
        assert (note.kind, note.node, note.rank) == ("recovering", 1, 5)
        assert note.data["signal"] == "worker_exit"
        assert note.data["action"] == "restart"
        assert note.data["step"] == 7
        assert stop == m.Stop(1, (0, 1), 1.0)
        assert run.stopped(1) == []
        start = only(run.stopped(0), m.Start)
        assert start == m.Start(2, {0: 0, 1: 1}, 0, True, "rank 5: worker_exit on 1")

    def test_in_place_can_be_forbidden(self) -> None:
        run = started(1, in_place=False)
        run.fail(0)
        assert not only(run.stopped(0), m.Start).in_place

    def test_several_failures_at_one_time_are_one_recovery(self) -> None:
        run = started(3)
        run.fail(0, rank=0)
        assert notes(run.fail(1, rank=8)) == ["signal"]
        run.stopped(0, 1, 2)
        assert notes(run.all).count("recovering") == 1
        assert run.machine.counts.restarts == 1

    def test_a_report_from_an_older_generation_changes_nothing(self) -> None:
        run = started(2)
        run.fail(0)
        run.stopped(0, 1)
        assert notes(run.fail(1, generation=1)) == ["signal"]
        assert run.machine.phase == "running"

    def test_late_messages_of_an_older_generation_are_ignored(self) -> None:
        run = started(2)
        run.fail(0)
        run.stopped(0, 1)
        assert run.tell(m.Stopped, 1, 1) == []
        assert run.tell(m.Finished, 1, 1, "done") == []
        assert run.left("done", 0) == [], "node 1 has not finished this one"
        run.tell(m.Progress, 1, 99)
        assert run.machine.counts.best == -1

    def test_an_application_error_ends_the_run(self) -> None:
        run = started(2)
        actions = run.fail(1, "app_error", rank=4)
        assert only(actions, m.Stop).nodes == (0, 1)
        assert only(actions, m.Finish) == m.Finish("failed", "app_error on 1")
        assert run.stopped(0, 1) == []
        assert run.machine.deadline() is None

    def test_what_is_only_recorded_changes_nothing(self) -> None:
        run = started(1)
        actions = run.fail(0, "xid:45")
        assert notes(actions) == ["signal"]
        assert len(actions) == 1

    def test_what_it_may_not_know_does_not_need_the_policy_to_guess(self) -> None:
        """Signals that the machine itself speaks of have rules of their own."""
        for signal in ("agent_exit", "node_silent", "hang"):
            assert rule_for(signal).cls != rule_for("no such signal").cls


class TestALostNode:
    def test_a_spare_takes_its_slot_and_the_others_keep_theirs(self) -> None:
        run = started(3, 2)
        actions = run.tell(m.Lost, 1, True, "died")
        assert only(actions, m.Note).data["signal"] == "agent_exit"
        assert only(actions, m.Stop).nodes == (0, 2)
        run.stopped(2)
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 3, 2: 2}

    def test_a_ready_spare_is_better_than_a_lower_number(self) -> None:
        run = Run(1, 2)
        run.join(1, ready=False)
        run.join(2, 0)
        assert only(run.tell(m.Lost, 0, True, "died"), m.Start).slots == {0: 2}

    def test_a_spare_is_ready_once_it_reports_ready(self) -> None:
        run = Run(1, 2)
        run.join(1, 2, ready=False)
        run.join(0)
        run.tell(m.Ready, 2)
        assert only(run.tell(m.Lost, 0, True, "died"), m.Start).slots == {0: 2}

    def test_nothing_starts_before_a_silent_node_must_have_stopped(self) -> None:
        run = started(2, 1, fence_s=2.0)
        assert only(run.tell(m.Lost, 1, False, "silent"), m.Note).data["signal"] == "node_silent"
        lost = run.now
        run.now += 0.5
        assert none(run.stopped(0), m.Start)
        assert run.machine.deadline() == lost + 2.0
        assert run.wait(1.4) == []
        assert only(run.wait(), m.Start).slots == {0: 0, 1: 2}

    def test_node_rejoining_in_time_must_stop_and_keeps_its_slot(self) -> None:
        """It is heard again, so it will not stop of itself: the time at which it would have says nothing now."""
        run = started(2, fence_s=2.0)
        run.tell(m.Lost, 1, False, "silent")
        run.stopped(0)
        run.now += 1.9
        assert run.join(1, running=1) == [m.Stop(1, (1,), 1.0)]
        assert run.wait(1.0) == []
        assert only(run.stopped(1), m.Start).slots == {0: 0, 1: 1}

    def test_a_node_that_reports_nothing_running_must_answer_too(self) -> None:
        """An order to start may be on its way to it."""
        run = started(2, fence_s=2.0)
        run.tell(m.Lost, 1, False, "silent")
        run.stopped(0)
        assert only(run.join(1), m.Stop).nodes == (1,)

    def test_losing_it_twice_does_not_take_longer(self) -> None:
        run = started(2, 1, fence_s=2.0)
        run.tell(m.Lost, 1, False, "silent")
        lost = run.now
        run.stopped(0)
        run.now += 1.0
        run.tell(m.Lost, 1, False, "still silent")
        assert run.machine.deadline() == lost + 2.0

    def test_rejoined_node_must_stop_the_newest_it_may_run(self) -> None:
        run = started(2)
        run.fail(0)
        run.stopped(0, 1)
        run.tell(m.Lost, 1, False, "silent")
        run.stopped(0)
        assert run.join(1, running=1) == [m.Stop(2, (1,), 1.0)]
        assert run.tell(m.Stopped, 1, 1) == []
        assert only(run.tell(m.Stopped, 2, 1), m.Start).generation == 3

    def test_a_second_one_while_the_first_is_dealt_with(self) -> None:
        run = started(3, 2)
        run.tell(m.Lost, 1, True, "died")
        run.stopped(0)
        actions = run.tell(m.Lost, 2, True, "died")
        assert "recovering" not in notes(actions)
        assert only(actions, m.Start).slots == {0: 0, 1: 3, 2: 4}

    def test_a_lost_spare_is_not_a_failure(self) -> None:
        run = started(2, 1)
        assert run.tell(m.Lost, 2, True, "died") == []

    def test_a_node_whose_agent_started_again_has_lost_its_ranks(self) -> None:
        run = started(2)
        actions = run.join(1)
        assert only(actions, m.Note).data["signal"] == "agent_exit"
        assert only(actions, m.Stop).nodes == (0, 1)

    def test_a_reconnection_is_not_a_failure(self) -> None:
        run = started(2)
        assert run.join(1, running=1) == []

    def test_a_node_that_stops_without_being_asked_has_failed(self) -> None:
        run = started(2)
        assert only(run.stopped(1), m.Stop).nodes == (0,)


class TestANodeThatDoesNotStop:
    def failed(self, **options: Any) -> Run:
        run = started(2, stop_grace_s=1.0, silence_s=3.0, fence_s=0.5, **options)
        run.fail(0)
        run.stopped(0)
        return run

    def test_it_counts_as_lost_after_grace_and_silence(self) -> None:
        run = self.failed(spares=1)
        failed = run.now
        note = only(run.wait(), m.Note)
        assert (note.kind, note.node, run.now) == ("node_lost", 1, failed + 6.0), (
            "three graces at most, and silence"
        )
        assert only(run.wait(), m.Start).slots == {0: 0, 1: 2}
        assert run.now == failed + 6.5

    def test_its_late_answer_brings_it_back(self) -> None:
        run = self.failed()
        run.wait()
        run.wait()
        assert run.machine.phase == "idle"
        assert only(run.stopped(1), m.Start).slots == {0: 0, 1: 1}

    def test_an_agent_that_starts_again_brings_it_back(self) -> None:
        run = self.failed()
        run.wait()
        run.wait()
        assert only(run.join(1), m.Start).slots == {0: 0, 1: 1}

    def test_it_is_named_when_nothing_else_is_left(self) -> None:
        run = self.failed(join_wait_s=60.0)
        run.wait()
        run.wait()
        assert notes(run.wait()) == ["waiting_for_nodes"]
        assert "node 1 did not stop its ranks" in only(run.wait(), m.Finish).message


def test_times_that_run_backwards_do_not() -> None:
    run = started(2, 1, fence_s=2.0)
    run.tell(m.Lost, 1, False, "silent")
    run.stopped(0)
    run.now -= 50.0
    assert run.tell(m.Tick) == []
    run.now += 52.0
    assert only(run.tell(m.Tick), m.Start).generation == 2


def test_the_story_lists_the_last_events_and_actions() -> None:
    run = started(1)
    run.fail(0)
    story = run.machine.story()
    assert "Joined(time=100.0, node=0" in story
    assert "Stop(generation=1, nodes=(0,)" in story
