"""How many sequences each step has, and which."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.base.batches import BatchSizes

PHASES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), max_size=4)


@given(ramp=PHASES, last=st.integers(1, 50), steps=st.integers(1, 40))
def test_samples_of_each_step_follow_those_before(ramp: list[tuple[int, int]], last: int, steps: int) -> None:
    batches = BatchSizes.of(last, ramp)
    sizes = [size for n, size in ramp for _ in range(n)] + [last] * steps
    firsts = np.cumsum([0, *sizes]).tolist()
    for step, size in enumerate(sizes, 1):
        assert batches.size(step) == size
        assert batches.samples(step) == (firsts[step - 1], firsts[step])
        assert batches.total(step) == firsts[step]
    many = np.arange(1, len(sizes) + 1)
    assert batches.first_sample(many).tolist() == firsts[:-1]
    within = list(batches.within(steps))
    assert [size for n, size in within for _ in range(n)] == sizes[:steps]


def test_there_is_no_step_zero() -> None:
    batches = BatchSizes.of(8, [(3, 2)])
    assert (batches.size(0), batches.size(-5), batches.total(0)) == (0, 0, 0)
    assert (batches.growth(0, 1), batches.growth(3, 4), batches.growth(1, 2)) == (1.0, 4.0, 1.0)


@pytest.mark.parametrize(
    ("ramp", "words"),
    [
        ((), "1,024"),
        (((500, 64),), "64 for 500 steps, then 1,024"),
        (((500, 64), (1500, 128)), "64 for 500 steps, 128 for 1,500, then 1,024"),
    ],
)
def test_in_words(ramp: tuple[tuple[int, int], ...], words: str) -> None:
    assert str(BatchSizes.of(1024, ramp)) == words
