import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.data.order import sample_index, sample_indices


def epoch_order(n: int, *, seed: int = 1, epoch: int = 0) -> list[int]:
    found = [sample_index(epoch * n + i, seed=seed, samples_per_epoch=n) for i in range(n)]
    assert {e for e, _ in found} == {epoch}
    return [index for _, index in found]


def test_every_size_up_to_300_is_a_bijection() -> None:
    for n in range(1, 301):
        assert sorted(epoch_order(n)) == list(range(n)), n


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 5000), seed=st.integers(0, 2**70), epoch=st.integers(0, 10**9))
def test_bijection(n: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(n, seed=seed, epoch=epoch)) == list(range(n))


@given(position=st.integers(0, 2**60), n=st.integers(1, 2**50), seed=st.integers(0, 2**64))
def test_any_position_of_any_size_is_found_at_once(position: int, n: int, seed: int) -> None:
    epoch, index = sample_index(position, seed=seed, samples_per_epoch=n)
    assert epoch == position // n
    assert 0 <= index < n


def test_the_order_of_today_is_the_order_of_tomorrow() -> None:
    # A change here makes every checkpoint resume on other data.
    assert epoch_order(10, seed=1234) == [2, 0, 1, 8, 9, 7, 4, 5, 3, 6]
    far = [sample_index(p, seed=1234, samples_per_epoch=1_000_003)[1] for p in (0, 1, 10**6, 10**7, 10**15)]
    assert far == [571805, 524983, 210895, 521484, 639834]


@settings(max_examples=150, deadline=None)
@given(
    first=st.integers(0, 2**60),
    count=st.integers(0, 200),
    n=st.one_of(st.integers(1, 300), st.integers(1, 2**62)),
    seed=st.integers(0, 2**70),
)
def test_many_at_once_are_the_same_as_one_by_one(first: int, count: int, n: int, seed: int) -> None:
    many = sample_indices(first, count, seed=seed, samples_per_epoch=n)
    assert many.dtype == np.int64
    one_by_one = [sample_index(p, seed=seed, samples_per_epoch=n)[1] for p in range(first, first + count)]
    assert many.tolist() == one_by_one


@pytest.mark.parametrize("n", [2**62, 2**62 - 1, (2**31 - 1) ** 2, (2**31 - 1) ** 2 + 1])
def test_sizes_where_64_bits_are_nearly_full(n: int) -> None:
    # Rounds add numbers of nearly 64 bits there; that wraps around in numpy, and does not in Python.
    many = sample_indices(10**17, 4000, seed=7, samples_per_epoch=n)
    assert many.tolist() == [sample_index(10**17 + i, seed=7, samples_per_epoch=n)[1] for i in range(4000)]


@pytest.mark.parametrize(("first", "count", "n"), [(-1, 1, 1), (0, -1, 1), (0, 1, 0), (0, 1, 2**62 + 1)])
def test_no_such_samples(first: int, count: int, n: int) -> None:
    with pytest.raises(ValueError, match="no samples"):
        sample_indices(first, count, seed=0, samples_per_epoch=n)


def test_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(50, seed=s, epoch=e) for s, e in itertools.product(range(5), range(5))]
    assert len({tuple(o) for o in orders}) == 25


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 10, 16, 17])
def test_each_sample_is_equally_likely_at_each_place(n: int) -> None:
    epochs = 4000
    counts = Counter(pair for e in range(epochs) for pair in enumerate(epoch_order(n, epoch=e)))
    expected = epochs / n
    chi2 = sum((counts[i, j] - expected) ** 2 / expected for i in range(n) for j in range(n))
    # Mean (n-1)^2, variance 2 (n-1)^2: five standard deviations.
    assert chi2 < (n - 1) ** 2 + 5 * (2 * (n - 1) ** 2) ** 0.5


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    n, epochs = 101, 400
    near = 0
    for e in range(epochs):
        order = epoch_order(n, epoch=e)
        near += sum(b - a == 1 for a, b in itertools.pairwise(order))
    # In a random permutation the number of successions has mean (n-1)/n and variance about 1.
    assert abs(near - epochs * (n - 1) / n) < 5 * epochs**0.5


@pytest.mark.parametrize(("position", "seed", "n"), [(-1, 0, 1), (0, -1, 1), (0, 0, 0)])
def test_no_such_sample(position: int, seed: int, n: int) -> None:
    with pytest.raises(ValueError, match="no sample at"):
        sample_index(position, seed=seed, samples_per_epoch=n)
