"""When a step counts as overdue."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.batches import BatchSizes
from seatrial.control.hangs.deadline import StepDeadline

FIRST_S = 600.0


def deadline(**changes: Any) -> StepDeadline:
    values = {"min_s": 10.0, "factor": 5.0, "first_step_s": FIRST_S, "batches": BatchSizes.of(6), **changes}
    return StepDeadline(**values)  # type: ignore[arg-type]


def after(steps: int, seconds: float, **changes: Any) -> tuple[StepDeadline, float]:
    """A deadline that has seen a first step of 100 s and then `steps` steps; and the time."""
    d, now = deadline(**changes), 1000.0
    d.begin(now)
    for step in range(1, steps + 2):
        now += 100.0 if step == 1 else seconds
        assert d.progress(now, step)
    return d, now


def test_nothing_is_overdue_before_something_is_expected() -> None:
    d = deadline()
    assert d.overdue(1e9) is None
    assert d.at() is None
    d.begin(5.0)
    d.end()
    assert d.overdue(1e9) is None


def test_first_step_has_its_own_time_limit() -> None:
    d = deadline()
    d.begin(0.0)
    assert d.waited_for is None
    assert d.at() == FIRST_S
    assert d.overdue(FIRST_S - 1) is None
    assert d.overdue(FIRST_S + 1) == FIRST_S + 1
    assert d.progress(100.0, 1)
    assert d.waited_for == 2
    assert d.limit_s == 500.0  # all that is known
    d.progress(104.0, 2)
    assert d.limit_s == 20.0


def test_the_limit_follows_the_runs_own_steps() -> None:
    d, now = after(10, 4.0)
    assert d.limit_s == 20.0
    assert d.overdue(now + 19.9) is None
    assert d.overdue(now + 20.1) == pytest.approx(20.1)
    for step in range(12, 60):
        now += 8.0
        d.progress(now, step)
    assert d.limit_s == 40.0


def test_quick_steps_have_the_least_limit() -> None:
    d, _ = after(10, 0.1)
    assert d.limit_s == 10.0


def test_one_slow_step_changes_nothing() -> None:
    d, now = after(10, 4.0)
    d.progress(now + 19.0, 12)
    assert d.limit_s == 20.0


def test_news_of_several_steps_at_once_is_shared_out() -> None:
    d, now = after(0, 0.0)
    for i in range(1, 6):
        d.progress(now + i * 12.0, 1 + 3 * i)
    assert d.limit_s == 20.0


def test_a_growing_batch_has_a_growing_limit() -> None:
    d, now = after(10, 4.0, batches=BatchSizes.of(48, [(12, 8), (10, 24)]))  # eleven steps
    assert d.limit_s == 20.0
    d.progress(now + 4, 12)
    assert d.limit_s == 60.0  # the next one has three times as many samples
    d.progress(now + 4 + 15 * 12, 27)
    assert d.limit_s == 120.0
    assert after(0, 0.0, batches=BatchSizes.of(48, [(12, 24)]))[0].limit_s == 500.0
    d.begin(now)
    assert d.limit_s == FIRST_S
    quick = deadline(batches=BatchSizes.of(48, [(12, 24)]))
    quick.begin(0.0)
    quick.progress(20.0, 1)
    quick.extend(20.0)  # a validation, in batches as large as the last ones
    assert quick.limit_s == 200.0


def test_repeated_progress_is_ignored() -> None:
    d, now = after(3, 4.0)
    assert not d.progress(now + 1, 4)
    assert not d.progress(now + 1, 2)
    assert d.overdue(now + 20.5) == pytest.approx(20.5)


def test_new_generation_keeps_learned_step_limits() -> None:
    d, now = after(10, 4.0)
    d.begin(now)
    assert d.limit_s == 500.0  # five times the first step of the first one
    assert d.progress(now + 300.0, 5)  # earlier steps again
    assert d.limit_s == 20.0
    d.begin(now + 400.0)
    assert d.limit_s == FIRST_S  # five times 300 s would be more


@given(
    st.lists(st.floats(0.5, 2.0), min_size=1, max_size=80),
    st.booleans(),
)
def test_steps_varying_less_than_the_factor_are_never_overdue(steps: list[float], told: bool) -> None:
    d, now = deadline(min_s=1.0), 0.0
    d.begin(now)
    for step, seconds in enumerate(steps, start=1):
        assert d.overdue(now + seconds) is None
        now += seconds
        d.progress(now, step, seconds if told else None)
    assert d.overdue(now + 10 * FIRST_S) is not None
