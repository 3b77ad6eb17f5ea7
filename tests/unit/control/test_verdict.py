"""Which failure is named as the first."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.control.coordinator.first_failure import first_failure
from seatrial.control.coordinator.reports import Report


def ended(rank: int, time: float, status: int, **more: Any) -> Report:
    return Report("rank_exited", rank // 4, time, rank=rank, pid=100 + rank, status=status, **more)


def error(time: float, **more: Any) -> dict[str, Any]:
    return {"time": time, "type": "ValueError", "message": "bad", "consequence": False, "exit_code": 1} | more


def test_nothing_failed() -> None:
    assert first_failure([ended(0, 1.0, 0), Report("agent_exited", 0, 2.0, status=0)], {}) is None
    assert first_failure([], {}) is None


def test_a_consequence_is_only_named_where_nothing_else_failed() -> None:
    consequence, cause = ended(1, 1.0, 1), ended(6, 2.0, 1)
    errors = {1: error(0.9, consequence=True), 6: error(1.9)}
    found = first_failure([consequence, cause], errors)
    assert found is not None
    assert (found.rank, found.node, found.time) == (6, 1, 1.9)
    assert found.message == "rank 6 on node 1: ValueError: bad"
    only = first_failure([consequence], errors)
    assert only is not None
    assert only.rank == 1


def test_the_error_files_time_counts_not_the_time_of_reaping() -> None:
    slow_to_end, quick_to_end = ended(2, 9.0, 1), ended(3, 5.0, 1)
    found = first_failure([quick_to_end, slow_to_end], {2: error(4.0), 3: error(4.5)})
    assert found is not None
    assert found.rank == 2


def test_what_we_stopped_ourselves_is_not_blamed() -> None:
    stopped = ended(0, 5.0, -signal.SIGTERM, signalled=4.9)
    in_order = ended(1, 5.0, 1, signalled=4.9)  # made an exception of our SIGTERM
    assert first_failure([stopped, in_order], {1: error(4.95)}) is None
    failed_before = ended(2, 5.0, 1, signalled=4.9)
    found = first_failure([stopped, in_order, failed_before], {1: error(4.95), 2: error(4.8)})
    assert found is not None
    assert found.rank == 2


def test_a_dead_agent_goes_before_its_peers_closed_connections() -> None:
    agent = Report("agent_exited", 1, 3.0, pid=9, status=-signal.SIGKILL)
    found = first_failure([ended(0, 2.9, 1), agent], {0: error(2.8, consequence=True)})
    assert found is not None
    assert found.message == "agent of node 1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("oom_killed", "cause", "hint"),
    [
        (True, "was killed by SIGKILL (out of memory)", "smaller microbatch"),
        (False, "was killed by SIGKILL", "has killed nothing here"),
        (None, "was killed by SIGKILL", "dmesg"),
    ],
)
def test_out_of_memory_is_said_as_surely_as_it_is_known(
    oom_killed: bool | None, cause: str, hint: str
) -> None:
    found = first_failure([ended(0, 1.0, -signal.SIGKILL, oom_killed=oom_killed)], {})
    assert found is not None
    assert found.cause == cause
    assert found.hint is not None
    assert hint in found.hint


def test_bad_input_is_told_in_its_own_words() -> None:
    found = first_failure([ended(0, 1.0, 2)], {0: error(1.0, exit_code=2, hint="do this")})
    assert found is not None
    assert (found.exit_code, found.cause, found.hint) == (2, "bad", "do this")
    assert first_failure([ended(0, 1.0, 2)], {}).exit_code == 1  # type: ignore[union-attr]  # a bare 2 may be anything


@given(
    st.lists(st.tuples(st.floats(0, 10), st.sampled_from([-9, 0, 1]), st.booleans()), min_size=1, max_size=5)
)
def test_the_order_of_the_reports_does_not_matter(ends: list[tuple[float, int, bool]]) -> None:
    reports = [ended(rank, time, status) for rank, (time, status, _) in enumerate(ends)]
    errors = {r: error(t, consequence=c) for r, (t, status, c) in enumerate(ends) if status == 1}
    verdicts = {first_failure(order, errors) for order in itertools.permutations(reports)}
    assert len(verdicts) == 1
    assert (verdicts == {None}) == all(status == 0 for _, status, _ in ends)
