"""The laws against speeds that follow them."""

from __future__ import annotations

import numpy as np
import pytest
from scale_cases import speed

from seatrial.scale.fit import Law, fit
from seatrial.scale.statistics import estimate

pytestmark = pytest.mark.cluster  # slow together

SIZES = [1.0, 2.0, 4.0, 8.0, 16.0]


def usl(n: float, s: float, k: float = 0.0) -> float:
    return 5000 * n / (1 + s * (n - 1) + k * n * (n - 1))


def test_amdahl_is_recovered_and_extrapolated() -> None:
    found = fit("Amdahl", SIZES, [speed(usl(n, 0.02), 0.003) for n in SIZES], [32, 64])
    assert found is not None
    assert found.contention.value == pytest.approx(0.02, rel=1e-6)
    assert found.contention.low < 0.02 < found.contention.high
    assert found.coherency is None
    assert found.worst < 1e-9
    assert [n for n, _ in found.efficiency] == [32, 64]
    for n, range_ in found.efficiency:
        assert range_.value == pytest.approx(usl(n, 0.02) / n / 5000)
        assert range_.low < range_.value < range_.high


def test_the_scalability_law_is_recovered() -> None:
    found = fit("universal scalability law", SIZES, [speed(usl(n, 0.01, 0.001), 0.003) for n in SIZES], [32])
    assert found is not None
    assert found.coherency is not None
    assert (found.contention.value, found.coherency.value) == pytest.approx((0.01, 0.001), rel=1e-5)


def test_coefficients_are_not_negative_where_speeds_grow_faster() -> None:
    found = fit("universal scalability law", SIZES, [speed(5000 * n**1.05) for n in SIZES], [32])
    assert found is not None
    assert found.coherency is not None
    assert found.contention.value == found.coherency.value == 0
    assert found.efficiency[0][1].value == 1
    assert found.worst > 0.05


@pytest.mark.ci
@pytest.mark.parametrize("law", ["Amdahl", "universal scalability law"])
def test_the_interval_covers_the_truth(law: Law) -> None:
    random = np.random.default_rng(5)
    s, k = (0.03, 0.0) if law == "Amdahl" else (0.03, 0.0005)
    covered = 0
    for _ in range(40):
        speeds = [estimate([usl(n, s, k) * (1 + random.normal(0, 0.01)) for _ in range(5)]) for n in SIZES]
        found = fit(law, SIZES, speeds, [32])
        assert found is not None
        range_ = found.efficiency[0][1]
        covered += range_.low <= usl(32, s, k) / 32 / 5000 <= range_.high
    assert covered >= 35


def test_too_few_sizes_or_runs_are_not_fitted() -> None:
    assert fit("Amdahl", [1, 2], [speed(1), speed(2)], [4]) is None
    assert fit("Amdahl", [1, 2, 4], [speed(1), speed(2), estimate([4.0])], [8]) is None
