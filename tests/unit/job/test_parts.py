"""Into how many parts asynchronous tensor parallel cuts a microbatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.job.parts import MOST, parts, sequence_parts


@pytest.mark.parametrize(
    ("microbatch", "positions", "expected"),
    [
        (1, 8192, 4), (1, 6144, 3), (1, 2, 2), (1, 7, 1), (2, 1024, 2), (3, 1024, 3), (4, 2048, 4), (6, 1024, 3),
        (8, 1024, 4), (5, 8192, 4), (5, 7, 1), (10, 8192, 2),
        # Parts of fewer than 2,048 positions of a rank: as few as can be.
        (1, 1024, 2), (1, 8184, 3), (1, 9, 3), (4, 1024, 2), (6, 256, 2), (9, 1, 3), (8, 1023, 2),
    ],
)  # fmt: skip
def test_sequences_first_then_positions(microbatch: int, positions: int, expected: int) -> None:
    assert parts(microbatch, positions) == expected


@given(st.integers(1, 10_000), st.integers(1, 100_000))
def test_parts_are_equal(microbatch: int, positions: int) -> None:
    number, between = parts(microbatch, positions), sequence_parts(microbatch, positions)
    assert 1 <= number <= MOST
    assert microbatch % between == 0
    assert number in (between, number * (between == 1))
    assert (microbatch if between > 1 else positions) % number == 0


@given(st.integers(1, 10_000), st.integers(1, 10_000), st.integers(2, 16))
def test_a_job_that_passes_the_rules_is_always_cut(microbatch: int, unit: int, tensor: int) -> None:
    """sequence_length divides by 2 x tensor: see `rules_layout._sequence`."""
    sequence_length = unit * 2 * tensor
    assert parts(microbatch, sequence_length // tensor) >= 2
