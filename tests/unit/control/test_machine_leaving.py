"""The control machine: nodes whose agents were signalled, agents that take another's place, and the order of nodes."""

from __future__ import annotations

from machine_run import Run, none, notes, only, started

from seatrial.control.machine import types as m


class TestOneAlone:
    def test_it_saves_hands_over_to_a_spare_and_goes_when_that_works(self) -> None:
        run = started(3, 1)
        run.progress(5)
        assert run.leave(1) == [], "others may follow"
        assert run.wait(2.9) == []
        assert run.wait() == [m.Yield(1, "yielded")]
        run.left("yielded", 0, 1)
        actions = run.left("yielded", 2)
        assert actions == [m.Start(2, {0: 0, 1: 3, 2: 2}, 0, True, "node 1 leaves")]
        assert run.progress(6) == [m.Release(1)]
        assert run.tell(m.Lost, 1, True, "its agent exited") == []
        assert run.machine.phase == "running"

    def test_without_a_spare_the_run_goes_on_smaller(self) -> None:
        run = started(3, shapes=(3, 2))
        run.progress(5)
        run.leave(1)
        run.wait()
        run.left("yielded", 0, 1)
        assert run.left("yielded", 2) == [m.Flush(1)]
        actions = run.tell(m.Flushed, 6, True)
        assert notes(actions) == ["shrunk"]
        assert only(actions, m.Start).slots == {0: 0, 1: 2}
        assert run.progress(6) == [m.Release(1)]

    def test_with_too_few_left_it_is_a_preemption(self) -> None:
        run = started(3)
        run.leave(1)
        assert run.wait() == [m.Yield(1, "preempted")]
        run.left("preempted", 0, 1)
        assert only(run.left("preempted", 2), m.Finish).how == "preempted"

    def test_a_short_grace_leaves_less_time_to_wait_for_others(self) -> None:
        run = started(3, 1)
        run.leave(1, grace_s=8.0)
        told = run.now
        assert run.wait() == [m.Yield(1, "yielded")]
        assert run.now == told + 2.0
        assert run.machine.deadline() == told + 8.0, "then it ends of itself"

    def test_a_leaving_spare_is_released_once_no_other_node_leaves(self) -> None:
        run = started(2, 1)
        run.progress(1)
        run.leave(2)
        assert run.wait() == [m.Release(2)]

    def test_all_spares_leaving_does_not_preempt_the_run(self) -> None:
        run = started(1, 3)
        run.progress(1)
        run.leave(1, 2, 3)
        assert run.wait() == [m.Release(1), m.Release(2), m.Release(3)]

    def test_a_leaving_spare_replaces_no_node(self) -> None:
        run = started(2, 1, shapes=(2, 1))
        run.leave(2)
        run.fail(0)
        assert run.stopped(0) == []
        assert only(run.stopped(1), m.Start).slots == {0: 0, 1: 1}

    def test_leaving_node_flushes_memory_to_disk_during_recovery(self) -> None:
        run = started(3, shapes=(3, 2), node_wait_s=30.0)
        run.progress(5)
        run.leave(1)
        run.fail(0)
        run.stopped(0, 2)
        assert run.stopped(1) == [m.Flush(1)]
        run.wait(3.0)
        assert run.tell(m.Flushed, 5, True) == [m.Release(1)]

    def test_before_anything_was_started_it_just_goes(self) -> None:
        run = Run(3)
        run.join(0, 1)
        run.leave(0)
        run.join(2)
        assert run.wait() == [m.Release(0)]
        assert only(run.tell(m.Lost, 0, True, "ended") + run.join(0), m.Start).slots == {0: 0, 1: 1, 2: 2}

    def test_the_next_coordinator_learns_it_from_the_hello(self) -> None:
        run = started(3, 1).successor()
        run.join(3)
        run.join(0, running=1)
        assert run.tell(m.Joined, 1, True, 1, "", 40.0) == []
        assert run.join(2, running=1) == []
        while (actions := run.wait()) == []:
            pass
        assert actions == [m.Yield(1, "yielded")]


class TestMostOfThem:
    def test_more_than_half_are_a_preemption_at_once(self) -> None:
        run = started(4, 4)
        assert run.leave(0, 1) == []
        assert run.leave(3) == [m.Yield(1, "preempted")]

    def test_also_when_the_first_of_them_hands_over_already(self) -> None:
        run = started(3, 1)
        run.leave(0)
        run.wait()
        assert run.leave(1) == [m.Yield(1, "preempted")]

    def test_one_that_leaves_during_a_preemption_changes_nothing(self) -> None:
        run = started(3)
        run.tell(m.StopAsked, "preempt")
        assert run.leave(1) == []
        run.left("preempted", 0, 1)
        assert only(run.left("preempted", 2), m.Finish).how == "preempted"

    def test_the_end_comes_before_the_agents_end_of_themselves(self) -> None:
        run = started(2, preempt_grace_s=60.0)
        told = run.now
        run.leave(0, 1, grace_s=20.0)
        assert only(run.wait(), m.Finish).how == "preempted"
        assert run.now == told + 20.0

    def test_while_recovering_memory_goes_to_disk_first(self) -> None:
        run = started(2, 1)
        run.fail(0)
        run.leave(0, 1, 2)
        assert none(run.stopped(0), m.Finish)
        run.stopped(1)
        run.wait()
        actions = run.all[-1]
        assert actions == m.Flush(1)
        assert only(run.tell(m.Flushed, 5, True), m.Finish).how == "preempted"


class TestAnAgentThatTakesAnothersPlace:
    def replaced(self, **options: float) -> Run:
        run = started(2, silence_s=3.0, fence_s=1.0, **options)
        run.tell(m.Joined, 1, True, None, "", None, True)
        return run

    def test_it_gets_ranks_when_the_one_before_has_fenced_itself(self) -> None:
        run = self.replaced()
        assert only(run.all, m.Stop).nodes == (0,), (
            "what the new one says of the other's ranks is worth nothing"
        )
        run.stopped(0)
        assert run.stopped(1) == []
        came = run.now
        assert only(run.wait(), m.Start).slots == {0: 0, 1: 1}
        assert run.now == came + 4.0

    def test_its_death_does_not_prove_its_predecessors_death(self) -> None:
        run = self.replaced()
        run.stopped(0)
        run.tell(m.Lost, 1, True, "its agent exited")
        assert none(run.tell(m.Joined, 1, True, None, "", None, True), m.Start)
        assert only(run.wait(), m.Start).generation == 2

    def test_the_next_coordinator_does_not_take_its_word_either(self) -> None:
        run = self.replaced().successor()
        run.join(0)
        run.stopped(0)
        run.join(1)
        assert run.stopped(1) == []
        assert only(run.wait(), m.Start).slots == {0: 0, 1: 1}


class TestAdmission:
    def test_a_node_that_the_run_did_not_count_with_is_a_spare(self) -> None:
        run = started(2)
        run.join(7)
        run.tell(m.Lost, 1, True, "died")
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 7}
        assert run.successor().join(7, running=2) == []

    def test_nodes_are_in_their_order_at_the_first_start(self) -> None:
        run = Run(4)
        for node, order in ((0, "switch1.a"), (1, "switch0.b"), (2, "switch1.b"), (3, "switch0.a")):
            run.tell(m.Joined, node, True, None, order)
        assert only(run.all, m.Start).slots == {0: 3, 1: 1, 2: 0, 3: 2}

    def test_and_keep_their_slots_later(self) -> None:
        run = Run(3, 1)
        for node, order in ((3, "a"), (2, "b"), (1, "c"), (0, "d")):
            run.tell(m.Joined, node, True, None, order)
        assert only(run.all, m.Start).slots == {0: 2, 1: 1, 2: 0}
        run.tell(m.Lost, 1, True, "died")
        assert only(run.stopped(0, 2), m.Start).slots == {0: 2, 1: 3, 2: 0}
