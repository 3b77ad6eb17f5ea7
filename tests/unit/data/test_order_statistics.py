"""The order of a million samples, as a statistician would look at it: is it any permutation, as likely as others?

Bounds are five standard deviations of what a random permutation would give; the seeds are fixed.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from seatrial.data.order import sample_indices

N = 1_000_003
BINS = 64
CASES = [(seed, epoch) for seed in (0, 1, 1234) for epoch in (0, 1)]

Order = npt.NDArray[np.int64]


@cache
def order(seed: int, epoch: int) -> Order:
    return sample_indices(epoch * N, N, seed=seed, samples_per_epoch=N)


def chi_squared(found: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    return float(((found - expected) ** 2 / expected).sum())


def bins(values: Order) -> Order:
    return values * BINS // N


def sizes() -> npt.NDArray[np.float64]:
    return np.bincount(bins(np.arange(N)), minlength=BINS).astype(np.float64)


@pytest.mark.parametrize(("seed", "epoch"), CASES)
def test_every_part_of_the_data_comes_in_every_part_of_the_epoch(seed: int, epoch: int) -> None:
    grid = np.bincount(bins(np.arange(N)) * BINS + bins(order(seed, epoch)), minlength=BINS * BINS)
    expected = np.outer(sizes(), sizes()).ravel() / N
    freedom = (BINS - 1) ** 2
    assert abs(chi_squared(grid, expected) - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("seed", "epoch"), CASES)
@pytest.mark.parametrize("lag", [1, 2, 32, 1000])
def test_what_follows_does_not_depend_on_what_came(seed: int, epoch: int, lag: int) -> None:
    here = order(seed, epoch)
    steps = (here[lag:] - here[:-lag]) % N
    found = np.bincount(bins(steps), minlength=BINS)
    freedom = BINS - 1
    assert abs(chi_squared(found, sizes() * len(steps) / N) - freedom) < 5 * (2 * freedom) ** 0.5
    correlation = float(np.corrcoef(here[lag:], here[:-lag])[0, 1])
    assert abs(correlation) < 5 / N**0.5


def test_two_seeds_and_two_epochs_have_nothing_in_common() -> None:
    """Random permutations agree at one place on average, whatever their length; the number is Poisson's."""
    pairs = list(itertools.combinations(CASES, 2))
    agreeing = [int((order(*a) == order(*b)).sum()) for a, b in pairs]
    assert abs(sum(agreeing) - len(pairs)) < 5 * len(pairs) ** 0.5
    assert max(agreeing) < 10
    for a, b in pairs:
        correlation = float(np.corrcoef(order(*a), order(*b))[0, 1])
        assert abs(correlation) < 5 / N**0.5


def test_a_mixed_up_order_would_be_noticed() -> None:
    """The tests above see what they are for: rotated, reversed, and mixed within blocks only."""
    rng = np.random.default_rng(0)
    blocks = (np.arange(N - N % 1000).reshape(-1, 1000) + 0).copy()
    rng.shuffle(blocks)
    weak = {
        "rotated": (np.arange(N) + 12345) % N,
        "blocks": np.concatenate([blocks.ravel(), np.arange(N - N % 1000, N)]),
        "multiplied": np.arange(N) * 7_919 % N,
    }
    freedom = BINS - 1
    for name, here in weak.items():
        steps = (here[1:] - here[:-1]) % N
        found = np.bincount(bins(steps), minlength=BINS)
        assert chi_squared(found, sizes() * len(steps) / N) > freedom + 100 * (2 * freedom) ** 0.5, name
