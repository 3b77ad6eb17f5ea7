"""The frontier over ranks: its split adds up, and a planted delay is charged to its stage and its rank."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from seatrial.record.frontier import WARM_UP, account, split_step
from seatrial.record.stages import (
    BACKWARD,
    DATA,
    FORWARD,
    OPTIMIZER,
    OWN,
    STAGES,
    STEP_SUM,
    TENSOR,
    RankStages,
)

TIMES = st.floats(0, 1e3, allow_nan=False)
TABLES = st.integers(1, 6).flatmap(
    lambda ranks: st.lists(
        st.lists(TIMES, min_size=len(STAGES), max_size=len(STAGES)), min_size=ranks, max_size=ranks
    )
)


def step(delayed: int | None = None, stage: int = DATA, seconds: float = 0.0) -> NDArray[np.float64]:
    """Four equal ranks in one tensor group; the others wait for a delayed one in the tensor stage."""
    table = np.zeros((4, len(STAGES)))
    table[:, [DATA, FORWARD, BACKWARD, OPTIMIZER, TENSOR, STEP_SUM]] = (0.01, 0.2, 0.4, 0.03, 0.1, 0.02)
    if delayed is not None:
        table[:, TENSOR] += seconds
        table[delayed, TENSOR] -= seconds
        table[delayed, stage] += seconds
    return table


def recorded(tables: list[NDArray[np.float64]], first: int = 1) -> dict[int, RankStages]:
    steps = np.arange(first, first + len(tables))
    cube = np.stack(tables)
    return {
        rank: RankStages(1, rank, cube.shape[1], "cpu", first, {}, steps, cube[:, rank])
        for rank in range(cube.shape[1])
    }


@given(TABLES)
def test_the_split_adds_up_to_the_slowest_ranks_time(rows: list[list[float]]) -> None:
    table = np.array(rows)
    split = split_step(table)
    assert (split.seconds >= 0).all()
    assert split.step_s == pytest.approx(table.sum(axis=1).max(), rel=1e-12, abs=1e-12)


@given(TABLES, st.randoms())
def test_the_order_of_ranks_does_not_matter(rows: list[list[float]], random: object) -> None:
    table = np.array(rows)
    random.shuffle(rows)  # type: ignore[attr-defined]
    assert split_step(np.array(rows)).seconds == pytest.approx(split_step(table).seconds, rel=1e-9, abs=1e-9)


@given(TABLES)
def test_the_setter_of_each_stage_is_on_the_frontier(rows: list[list[float]]) -> None:
    table = np.array(rows)
    split = split_step(table)
    for i, rank in enumerate(split.setters):
        assert table[rank, : i + 1].sum() == pytest.approx(split.seconds[: i + 1].sum(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("stage", range(OWN))
@pytest.mark.parametrize("rank", [0, 2])
def test_a_delay_is_charged_to_its_stage_and_rank(stage: int, rank: int) -> None:
    plain, delayed = split_step(step()), split_step(step(rank, stage, 0.5))
    grown = delayed.seconds - plain.seconds
    assert grown[stage] == pytest.approx(0.5)
    assert np.delete(grown, stage) == pytest.approx(0.0, abs=1e-12)
    assert delayed.setters[stage] == rank
    assert delayed.pace_rank == rank
    assert delayed.pace_ahead_s == pytest.approx(0.5)


def test_averages_would_have_hidden_it() -> None:
    table = step(2, DATA, 0.5)
    assert table[:, DATA].mean() == pytest.approx(0.01 + 0.125)
    assert split_step(table).seconds[DATA] == pytest.approx(0.51)


class TestAccount:
    def test_it_is_the_mean_of_the_steps_after_the_warm_up(self) -> None:
        first = [step(0, FORWARD, 9.0)] * WARM_UP
        found = account(recorded([*first, step(), step(1, DATA, 0.3), step(1, DATA, 0.3)]))
        assert found is not None
        assert (found.first_step, found.last_step, found.steps) == (WARM_UP + 1, WARM_UP + 3, 3)
        assert found.seconds["data"] == pytest.approx(0.01 + 0.2)
        assert found.seconds["forward"] == pytest.approx(0.2)
        assert found.split.step_s == pytest.approx(0.76 + 0.2)
        assert set(found.seconds) == {"data", "forward", "backward", "optimizer", "tensor", "step_sum"}

    def test_the_pace_setter_is_slow_in_most_steps(self) -> None:
        steps = [step(3, BACKWARD, 0.1)] * 4 + [step(0, DATA, 5.0)]
        found = account(recorded([step()] * WARM_UP + steps))
        assert found is not None
        told = found.as_dict()
        assert told["pace"] == {
            "rank": 3,
            "own_s": pytest.approx(0.74),
            "above_median_s": pytest.approx(0.1),
        }
        assert told["frontier_ranks"]["backward"] == 3  # type: ignore[index]

    def test_only_steps_that_all_ranks_recorded_count(self) -> None:
        found = recorded([step()] * 6)
        cut = found[2]
        found[2] = RankStages(1, 2, 4, "cpu", 1, {"tensor": "why"}, cut.steps[:4], cut.seconds[:4])
        told = account(found)
        assert told is not None
        assert (told.first_step, told.last_step) == (3, 4)
        assert told.not_separated == {"tensor": "why"}

    def test_there_is_none_without_all_ranks(self) -> None:
        found = recorded([step()] * 6)
        del found[1]
        assert account(found) is None
        assert account({}) is None
        assert account(recorded([step()] * WARM_UP)) is None
