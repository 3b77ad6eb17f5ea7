"""The control machine: what ends a run that fails again and again, and which nodes must leave it."""

from __future__ import annotations

from machine_run import none, notes, only, started

from seatrial.control.machine import types as m


class TestBudgets:
    def test_the_same_failure_without_progress_ends_the_run(self) -> None:
        run = started(2, max_same_failure=3)
        for _ in range(2):
            run.fail(1, rank=5, step=7)
            run.stopped(0, 1)
        actions = run.fail(1, rank=5, step=7)
        assert notes(actions) == ["recovering", "gave_up"]
        finish = only(actions, m.Finish)
        assert finish.how == "failed"
        assert "rank 5 has failed 3 times at step 7 without progress: worker_exit on 1" in finish.message

    def test_the_same_rank_elsewhere_is_the_same_failure(self) -> None:
        """A spare took its place, and it fails there too: it is not the node."""
        run = started(1, 2, evict_after=1, max_same_failure=3)
        for node in (0, 1):
            run.fail(node, rank=0, step=7)
            run.stopped(node)
        assert only(run.fail(2, rank=0, step=7), m.Finish).how == "failed"

    def test_progress_beyond_it_counts_afresh(self) -> None:
        run = started(1, max_same_failure=2)
        run.fail(0, rank=0, step=7)
        run.stopped(0)
        run.progress(7)
        run.progress(8)
        assert none(run.fail(0, rank=0, step=8), m.Finish)

    def test_repeated_steps_are_not_progress(self) -> None:
        run = started(1, max_same_failure=2)
        run.progress(7)
        run.fail(0, rank=0, step=7)
        run.stopped(0)
        run.progress(5)
        run.progress(6)
        assert only(run.fail(0, rank=0, step=6), m.Finish).how == "failed"

    def test_repeated_hang_blamed_on_different_ranks_ends_the_run(self) -> None:
        run = started(9, max_same_failure=3)
        for node in range(8):
            assert none(run.fail(node, "hang", rank=node, step=7), m.Finish)
            run.stopped(*range(9))
        finish = only(run.fail(8, "hang", rank=8, step=7), m.Finish)
        assert "hang occurred 9 times up to step 7 without progress" in finish.message

    def test_restarts_are_bounded_even_with_progress(self) -> None:
        run = started(1, max_restarts=2)
        for step in (10, 20):
            run.progress(step)
            run.fail(0, step=step)
            run.stopped(0)
        run.progress(30)
        actions = run.fail(0, step=30)
        assert "gave_up" in notes(actions)
        assert "all 2 restarts are used up" in only(actions, m.Finish).message

    def test_no_restart_at_all(self) -> None:
        run = started(2, max_restarts=0)
        actions = run.fail(1)
        assert only(actions, m.Finish) == m.Finish("failed", "worker_exit on 1")
        assert "gave_up" not in notes(actions)


class TestNodesThatLeave:
    def test_evicted_node_leaves_once_idle_and_cannot_rejoin(self) -> None:
        run = started(2, 1)
        actions = run.fail(1, "xid:79")
        assert only(actions, m.Note).data["action"] == "evict"
        assert none(actions, m.Evict)
        assert run.stopped(1) == [m.Evict(1, "xid:79 on 1"), m.Drain(1, "xid:79 on 1")]
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 2}
        assert run.join(1) == [m.Evict(1, "xid:79 on 1")]
        run.fail(0)
        assert only(run.stopped(0, 2), m.Start).slots == {0: 0, 1: 2}

    def test_a_spare_is_evicted_without_a_stop(self) -> None:
        run = started(2, 1)
        actions = run.fail(2, "xid:79")
        assert none(actions, m.Stop)
        assert only(actions, m.Evict).node == 2

    def test_an_eviction_while_others_stop_is_honoured(self) -> None:
        run = started(2, 1)
        run.fail(0)
        run.fail(1, "xid:79")
        run.stopped(1)
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 2}
        assert run.machine.counts.restarts == 1

    def test_a_gpu_is_reset_and_the_node_comes_back_as_a_spare(self) -> None:
        run = started(2, 1)
        run.fail(1, "xid:74")
        assert run.stopped(1) == [m.ResetGpu(1, None, "xid:74 on 1")]
        assert only(run.stopped(0), m.Start).slots == {0: 0, 1: 2}
        assert run.tell(m.Requalified, 1, True) == []
        run.tell(m.Lost, 0, True, "died")
        assert only(run.stopped(2), m.Start).slots == {0: 1, 1: 2}

    def test_one_bad_gpu_with_many_messages_is_reset_once(self) -> None:
        run = started(2, 1)
        for _ in range(18):
            run.fail(1, "xid:74")
        run.stopped(1, 0)
        assert len([a for a in run.all if isinstance(a, m.ResetGpu)]) == 1
        assert none(run.all, m.Evict)

    def test_a_node_that_fails_its_test_is_evicted(self) -> None:
        run = started(2, 1)
        run.fail(1, "xid:74")
        run.stopped(1, 0)
        actions = run.tell(m.Requalified, 1, False)
        assert only(actions, m.Evict).cause == "failed its test after: xid:74 on 1"
        assert only(actions, m.Drain).node == 1

    def test_a_node_that_comes_back_from_a_reboot_is_tested(self) -> None:
        run = started(2, 1)
        run.fail(1, "xid:74")
        run.stopped(1, 0)
        run.tell(m.Lost, 1, True, "rebooted")
        assert run.join(1) == [m.Requalify(1)]

    def test_a_reset_waits_for_a_node_that_is_away(self) -> None:
        run = started(2, 1)
        run.fail(1, "xid:74")
        run.tell(m.Lost, 1, True, "died")
        run.stopped(0)
        assert none(run.all, m.ResetGpu)
        assert run.join(1) == [m.ResetGpu(1, None, "xid:74 on 1")]

    def test_a_test_of_before_the_reset_does_not_count(self) -> None:
        run = started(2, 1)
        run.fail(1, "xid:74")
        run.tell(m.Requalified, 1, True)
        run.stopped(0, 1)
        assert run.machine.slots == {0: 0, 1: 2}

    def test_the_gpu_is_named_where_it_is_known(self) -> None:
        run = started(1)
        run.tell(m.Failed, 1, 0, None, "xid:74", "NVLink", 3, 6)
        assert only(run.stopped(0), m.ResetGpu).gpu == 6


class TestRepetition:
    def test_node_blamed_twice_is_evicted_if_a_spare_is_ready(self) -> None:
        run = started(2, 1, evict_after=2)
        run.fail(1, rank=4, step=5)
        run.stopped(0, 1)
        run.progress(6)
        assert only(run.fail(1, "hang", rank=5, step=6), m.Note).data["action"] == "evict"
        actions = run.stopped(1)
        assert only(actions, m.Evict).cause == "2 failures, the last: hang on 1"
        assert none(actions, m.Drain), "that it is the node's fault is only likely"

    def test_a_node_stays_if_no_spare_can_replace_it(self) -> None:
        run = started(2, shapes=(2, 1), evict_after=2)
        for step in (5, 10, 15):
            run.progress(step)
            run.fail(1, rank=4, step=step)
            run.stopped(0, 1)
        assert run.machine.slots == {0: 0, 1: 1}
        assert none(run.all, m.Evict)

    def test_two_reports_of_one_failure_are_one(self) -> None:
        run = started(2, 1, evict_after=2)
        run.fail(1, rank=4)
        run.fail(1, "hang", rank=5)
        assert only(run.stopped(0, 1), m.Start).slots == {0: 0, 1: 1}

    def test_one_spare_cannot_replace_two(self) -> None:
        run = started(3, 1, evict_after=1)
        run.fail(1, rank=4)
        run.fail(2, rank=8)
        assert only(run.stopped(0, 1, 2), m.Start).slots == {0: 0, 1: 3, 2: 2}

    def test_failures_that_follow_the_program_blame_no_node(self) -> None:
        run = started(2, 1, evict_after=1)
        run.fail(1, "oom", rank=4)
        assert only(run.stopped(0, 1), m.Start).slots == {0: 0, 1: 1}

    def test_what_is_tolerated_once_is_not_the_second_time(self) -> None:
        run = started(2, 1)
        assert notes(run.fail(1, "slow")) == ["signal"]
        run.now += 60.0
        assert notes(run.fail(0, "slow")) == ["signal"], "another node"
        run.now += 60.0
        assert only(run.fail(1, "slow"), m.Stop).nodes == (0, 1)
        assert only(run.stopped(1), m.Evict).node == 1

    def test_a_burst_is_one_time(self) -> None:
        run = started(2, 1, burst_s=5.0)
        for _ in range(10):
            run.now += 1.0
            assert notes(run.fail(1, "slow")) == ["signal"]

    def test_a_node_without_which_the_run_would_end_is_tolerated(self) -> None:
        run = started(2)
        for _ in range(3):
            run.now += 60.0
            assert notes(run.fail(1, "slow")) == ["signal"]
