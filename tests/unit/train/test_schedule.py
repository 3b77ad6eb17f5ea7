from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.job.schema import OptimizerSection
from seatrial.train.schedule import learning_rate


def curve(steps: int, **keys: object) -> list[float]:
    optimizer = OptimizerSection(lr=1.0, **keys)  # type: ignore[arg-type]
    return [learning_rate(step, steps, optimizer) for step in range(1, steps + 1)]


def test_warm_up_is_linear_and_reaches_lr() -> None:
    assert curve(100, warmup_steps=4)[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert curve(10, warmup_steps=0, decay="constant") == [1.0] * 10


def test_cosine() -> None:
    values = curve(100, warmup_steps=20, min_lr_ratio=0.1)
    assert values[19] == 1.0
    assert values[59] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert values[-1] == pytest.approx(0.1)


def test_wsd_is_constant_then_decays_linearly() -> None:
    values = curve(100, warmup_steps=10, decay="wsd", decay_steps=20, min_lr_ratio=0.0)
    assert set(values[9:80]) == {1.0}
    assert values[80] == pytest.approx(0.95)
    assert values[-1] == pytest.approx(0.0)
    assert curve(100, decay="wsd", min_lr_ratio=0.5)[-1] == 0.5
    assert curve(100, decay="wsd", min_lr_ratio=0.5)[89] == 1.0, "a tenth of the steps if not told"


@given(
    st.integers(1, 300),
    st.data(),
    st.sampled_from(["cosine", "wsd", "constant"]),
    st.floats(0, 1),
)
def test_learning_rate_stays_within_its_bounds(
    steps: int, data: st.DataObject, decay: str, ratio: float
) -> None:
    warmup = data.draw(st.integers(0, steps))
    values = curve(steps, warmup_steps=warmup, decay=decay, min_lr_ratio=ratio)
    assert all(0 <= v <= 1 for v in values)
    after = values[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after)), "it falls only"
    assert all(v >= ratio - 1e-12 for v in after)
