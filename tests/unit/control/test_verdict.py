"""Which failure is named as the first."""

from __future__ import annotations

import itertools
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.control.coordinator.first_failure import Exited, first_failure
from seatrial.record import messages as msg
from seatrial.record.failure import RankError

Exit = tuple[int, Exited]


def ended(rank: int, time: float, status: int, error: RankError | None = None, **more: Any) -> Exit:
    values: dict[str, Any] = {"generation": 1, "local": rank % 4, "pid": 100 + rank, "signalled": None}
    values |= {"oom_killed": None, "ran": True, "never_began": False, **more}
    return rank // 4, msg.RankExited(rank=rank, time=time, status=status, error=error, **values)


def error(time: float, **more: Any) -> RankError:
    values: dict[str, Any] = {"rank": 0, "node": 0, "type": "ValueError", "message": "bad", "traceback": None}
    return RankError(time=time, **values | {"consequence": False, "exit_code": 1, "hint": None} | more)


def test_nothing_failed() -> None:
    assert first_failure([ended(0, 1.0, 0), (0, msg.ForkServerExited(9, 0, 2.0, None))]) is None
    assert first_failure([]) is None


def test_a_consequence_is_only_named_where_nothing_else_failed() -> None:
    consequence, cause = ended(1, 1.0, 1, error(0.9, consequence=True)), ended(6, 2.0, 1, error(1.9))
    found = first_failure([consequence, cause])
    assert found is not None
    assert (found.rank, found.node, found.time) == (6, 1, 1.9)
    assert found.message == "rank 6 on node 1: ValueError: bad"
    only = first_failure([consequence])
    assert only is not None
    assert only.rank == 1


def test_the_error_files_time_counts_not_the_time_of_reaping() -> None:
    slow_to_end, quick_to_end = ended(2, 9.0, 1, error(4.0)), ended(3, 5.0, 1, error(4.5))
    found = first_failure([quick_to_end, slow_to_end])
    assert found is not None
    assert found.rank == 2


def test_what_we_stopped_ourselves_is_not_blamed() -> None:
    stopped = ended(0, 5.0, -signal.SIGTERM, signalled=4.9)
    in_order = ended(1, 5.0, 1, error(4.95), signalled=4.9)  # made an exception of our SIGTERM
    assert first_failure([stopped, in_order]) is None
    failed_before = ended(2, 5.0, 1, error(4.8), signalled=4.9)
    found = first_failure([stopped, in_order, failed_before])
    assert found is not None
    assert found.rank == 2


def test_a_fork_server_goes_before_its_peers_closed_connections() -> None:
    fork_server = (1, msg.ForkServerExited(9, -signal.SIGKILL, 3.0, oom_killed=False))
    found = first_failure([ended(0, 2.9, 1, error(2.8, consequence=True)), fork_server])
    assert found is not None
    assert found.message == "fork server of node 1 was killed by SIGKILL"


@pytest.mark.parametrize(
    ("oom_killed", "cause", "hint"),
    [
        (True, "was killed by SIGKILL (out of memory)", "smaller microbatch"),
        (False, "was killed by SIGKILL", "has killed nothing here"),
        (None, "was killed by SIGKILL", "dmesg"),
    ],
)
def test_out_of_memory_is_reported_with_its_certainty(oom_killed: bool | None, cause: str, hint: str) -> None:
    found = first_failure([ended(0, 1.0, -signal.SIGKILL, oom_killed=oom_killed)])
    assert found is not None
    assert found.cause == cause
    assert hint in found.hint


def test_bad_input_is_reported_with_its_own_message() -> None:
    found = first_failure([ended(0, 1.0, 2, error(1.0, exit_code=2, hint="do this"))])
    assert found is not None
    assert (found.exit_code, found.cause, found.hint) == (2, "bad", "do this")
    assert first_failure([ended(0, 1.0, 2)]).exit_code == 1  # type: ignore[union-attr]  # a bare 2 may be anything


@given(
    st.lists(st.tuples(st.floats(0, 10), st.sampled_from([-9, 0, 1]), st.booleans()), min_size=1, max_size=5)
)
def test_the_order_of_the_reports_does_not_matter(ends: list[tuple[float, int, bool]]) -> None:
    exits = [
        ended(rank, time, status, error(time, consequence=consequence) if status == 1 else None)
        for rank, (time, status, consequence) in enumerate(ends)
    ]
    verdicts = {first_failure(order) for order in itertools.permutations(exits)}
    assert len(verdicts) == 1
    assert (verdicts == {None}) == all(status == 0 for _, status, _ in ends)
