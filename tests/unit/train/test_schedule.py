from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import optimization

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


def theirs(steps: int, schedule: Callable[[torch.optim.Optimizer], Any], ratio: float = 1.0) -> list[float]:
    """A schedule of torch or transformers, whose first update has number 0: ours has 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=ratio)
    scheduler = schedule(optimizer)
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(scheduler.get_last_lr()[0])
    return found


def test_schedules_are_those_of_transformers() -> None:
    steps, warmup = 60, 12
    linear = theirs(steps, lambda o: transformers.get_linear_schedule_with_warmup(o, warmup, steps))
    assert curve(steps, warmup_steps=warmup, decay="linear", min_lr_ratio=0.0) == pytest.approx(
        linear, abs=1e-12
    )
    inverse = theirs(steps, lambda o: transformers.get_inverse_sqrt_schedule(o, warmup))
    assert curve(steps, warmup_steps=warmup, decay="inverse_sqrt", min_lr_ratio=0.0) == pytest.approx(inverse)
    for cosine in (False, True):
        name = "get_cosine_with_min_lr_schedule_with_warmup" if cosine else "get_cosine_schedule_with_warmup"
        more = {"min_lr_rate": 0.2} if cosine else {}
        found = theirs(steps, lambda o, n=name, m=more: getattr(optimization, n)(o, warmup, steps, **m))
        ours = curve(steps, warmup_steps=warmup, min_lr_ratio=0.2 if cosine else 0.0)
        assert ours[warmup - 1 :] == pytest.approx(found[warmup - 1 :], abs=1e-12)
    constant = theirs(steps, lambda o: transformers.get_constant_schedule_with_warmup(o, warmup))
    assert curve(steps, warmup_steps=warmup, decay="constant") == pytest.approx(constant)


@pytest.mark.parametrize("form", ["linear", "cosine", "1-sqrt"])
def test_wsd_is_that_of_transformers(form: str) -> None:
    keys = {"num_warmup_steps": 12, "num_decay_steps": 20, "num_training_steps": 60, "min_lr_ratio": 0.1}
    found = theirs(60, lambda o: transformers.get_wsd_schedule(o, **keys, decay_type=form))
    ours = curve(60, warmup_steps=12, decay="wsd", decay_steps=20, decay_form=form)
    # Their warm-up begins at `min_lr_ratio`.
    assert ours[11:] == pytest.approx(found[11:], abs=1e-12)


def test_linear_is_torchs() -> None:
    found = theirs(50, lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.25, total_iters=50))
    assert curve(50, decay="linear", min_lr_ratio=0.25) == pytest.approx(found)


@given(
    st.integers(1, 300),
    st.data(),
    st.sampled_from(["cosine", "linear", "wsd", "inverse_sqrt", "constant"]),
    st.sampled_from(["linear", "cosine", "1-sqrt"]),
    st.floats(0, 1),
)
def test_learning_rate_stays_within_its_bounds(
    steps: int, data: st.DataObject, decay: str, form: str, ratio: float
) -> None:
    warmup = data.draw(st.integers(int(decay == "inverse_sqrt"), steps))
    keys = {"decay_form": form} if decay == "wsd" else {}
    values = curve(steps, warmup_steps=warmup, decay=decay, min_lr_ratio=ratio, **keys)
    assert all(0 <= v <= 1 for v in values)
    after = values[max(0, warmup - 1) :]
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(after)), "it falls only"
    assert all(v >= ratio - 1e-12 for v in after)
