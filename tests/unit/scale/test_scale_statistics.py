"""Intervals against their definition, and the warm-up in made step times."""

from __future__ import annotations

import math

import numpy as np
import pytest

from seatrial.scale.conduct import LEAST_REPEATS
from seatrial.scale.statistics import estimate, ratio, t_quantile, warm_up


def density(t: np.ndarray, degrees: float) -> np.ndarray:
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    return np.asarray(np.exp(log - (degrees + 1) / 2 * np.log1p(t**2 / degrees)))


@pytest.mark.parametrize("degrees", [2, 2.5, 3, 4.7, 9, 11, 13.3, 25, 45, 90])
def test_the_quantile_holds_95_percent_of_students_t(degrees: float) -> None:
    t = np.linspace(0, t_quantile(degrees), 200_001)
    assert 2 * np.trapezoid(density(t, degrees), t) == pytest.approx(0.95, abs=2e-3)


def test_quantiles_at_the_ends() -> None:
    assert t_quantile(1) == 12.706
    assert t_quantile(math.inf) == 1.960
    with pytest.raises(ValueError, match=r"0\.5"):
        t_quantile(0.5)


def test_an_estimate_is_the_mean_with_its_t_interval() -> None:
    found = estimate([9.0, 10.0, 11.0])
    assert found.mean == 10
    # Standard error 1 / sqrt(3), two degrees of freedom; the interval is that of the logarithm.
    factor = math.exp(4.303 / math.sqrt(3) / 10)
    assert (found.low, found.high) == pytest.approx((10 / factor, 10 * factor))
    assert found.half == pytest.approx((factor - 1 / factor) / 2)


def test_a_single_value_has_no_interval() -> None:
    found = estimate([3.0])
    assert (found.mean, found.low, found.high, found.half) == (3.0, None, None, None)
    assert ratio(found, estimate([1.0, 1.1])).half is None


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [-1.0]])
def test_invalid_speeds_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="no estimate"):
        estimate(values)


def test_equal_values_have_a_ratio_without_width() -> None:
    found = ratio(estimate([2.0, 2.0]), estimate([1.0, 1.0]), 0.5)
    assert (found.mean, found.low, found.high) == (1.0, 1.0, 1.0)


def test_intervals_of_efficiencies_cover_95_percent() -> None:
    """With runs added until the interval is within 2 %, as `scale` does: this may not narrow it wrongly."""
    random = np.random.default_rng(3)
    for spread in (0.01, 0.02, 0.04):
        covered = 0
        for _ in range(1500):
            ones, twos = (list(random.normal(v, spread * v, LEAST_REPEATS)) for v in (100.0, 180.0))
            found = ratio(estimate(twos), estimate(ones), 0.5)
            while (found.half or 0.0) > 0.02 and len(ones) < 10:
                ones.append(random.normal(100, spread * 100))
                twos.append(random.normal(180, spread * 180))
                found = ratio(estimate(twos), estimate(ones), 0.5)
            assert found.low is not None
            assert found.high is not None
            covered += found.low <= 0.9 <= found.high
        assert 0.93 <= covered / 1500 <= 0.97, spread


def noisy(seed: int, n: int = 30) -> np.ndarray:
    return np.asarray(np.exp(np.random.default_rng(seed).normal(math.log(0.2), 0.03, n)))


def cuts(change: object, of: int = 60) -> list[int]:
    found = []
    for seed in range(of):
        times = noisy(seed)
        change(times)  # type: ignore[operator]
        found.append(warm_up(list(times)))
    return found


def test_a_run_without_a_warm_up_keeps_all_but_one() -> None:
    assert sum(cut == 1 for cut in cuts(lambda times: None)) >= 50


@pytest.mark.parametrize("stages", [{1: 20.0}, {2: 3.0}, {1: 30.0, 6: 1.3}, {10: 1.25}, {5: 0.7}])
def test_a_warm_up_of_several_stages_is_found(stages: dict[int, float]) -> None:
    def change(times: np.ndarray) -> None:
        begin = 0
        for end, factor in stages.items():
            times[begin:end] *= factor
            begin = end

    found = cuts(change)
    assert sum(cut == max(stages) for cut in found) >= 45
    assert min(found) >= 1


def test_single_slow_steps_are_no_warm_up() -> None:
    def change(times: np.ndarray) -> None:
        times[[7, 12, 21]] *= 4

    assert sum(cut == 1 for cut in cuts(change)) >= 50


def test_at_most_half_of_the_steps_are_left_out() -> None:
    times = noisy(0)
    times[:24] *= np.linspace(5, 1, 24)
    assert warm_up(list(times)) == 15


def test_equal_steps_and_too_few_steps() -> None:
    assert warm_up([0.5] * 12) == 1
    assert warm_up([5.0, 5.0] + [0.5] * 10) == 2
    with pytest.raises(ValueError, match="7 steps are too few"):
        warm_up([0.5] * 7)
