"""Straggler detection with the noise of eight ranks on two cores."""

from __future__ import annotations

import random

import pytest

from seatrial.job.layout import Layout
from seatrial.train.health.straggler import STEPS, WINDOWS, Straggler, StragglerWatch

LAYOUT = Layout(pipeline=2, shard=2, tensor=2)


def simulate(
    steps: int,
    *,
    seed: int,
    slow: dict[int, float] | None = None,
    layout: Layout = LAYOUT,
    own: float = 0.1,
    until: int = 10**9,
) -> list[tuple[int, Straggler]]:
    """Own times of about `own` seconds that scatter by half, and now and then by much more; stage 1 has twice the work."""
    noise = random.Random(seed)
    watch = StragglerWatch(layout, 2.0)
    found = []
    for step in range(steps):
        seconds = []
        for rank in range(layout.world_size):
            value = own * (1 + layout.coordinates(rank).pipeline) * noise.lognormvariate(0, 0.5)
            if noise.random() < 0.05:
                value *= noise.uniform(2, 10)
            if slow and step < until:
                value *= slow.get(rank, 1.0)
            seconds.append(value)
        found += [(step, s) for s in watch.add(seconds, 0.9)]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_noise_is_not_a_straggler(seed: int) -> None:
    assert simulate(4000, seed=seed) == []


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_three_times_as_slow_is_reported_once(seed: int) -> None:
    found = simulate(300, seed=seed, slow={5: 3.0})
    assert [s.rank for _, s in found] == [5]
    assert found[0][0] < 2 * STEPS * WINDOWS
    assert found[0][1].factor > 2
    assert "rank 5" in found[0][1].message


def test_two_slow_ranks_are_both_reported() -> None:
    found = simulate(100, seed=1, slow={2: 4.0, 6: 4.0})
    assert sorted(s.rank for _, s in found) == [2, 6]


def test_a_straggler_is_reported_again_after_recovery() -> None:
    watch = StragglerWatch(Layout(shard=4), 2.0)
    told = []
    for step in range(240):
        slow = 4.0 if step < 60 or step >= 150 else 1.0
        told += [step for _ in watch.add([0.1, 0.1 * slow, 0.1, 0.1], 1.0)]
    assert len(told) == 2


def test_one_bad_window_or_a_step_that_hangs_is_not_enough() -> None:
    watch = StragglerWatch(Layout(shard=4), 2.0)
    for step in range(200):
        slow = 9.0 if step % (STEPS * WINDOWS) < STEPS else 1.0
        assert watch.add([0.1, 0.1 * slow, 0.1, 0.1], 1.0) == []
    watch = StragglerWatch(Layout(shard=4), 2.0)
    for step in range(200):
        assert watch.add([0.1, 30.0 if step % STEPS == 3 else 0.1, 0.1, 0.1], 1.0) == []


def test_a_negligible_delay_is_ignored() -> None:
    watch = StragglerWatch(Layout(shard=4), 2.0)
    for _ in range(100):
        assert watch.add([1e-4, 1e-3, 1e-4, 1e-4], 1.0) == []


def test_a_rank_without_peers_is_not_judged() -> None:
    watch = StragglerWatch(Layout(pipeline=4), 2.0)
    for _ in range(100):
        assert watch.add([0.1, 0.9, 0.1, 0.1], 1.0) == []


def test_times_not_known_yet_are_ignored() -> None:
    watch = StragglerWatch(Layout(shard=4), 2.0)
    for _ in range(100):
        assert watch.add([0.0, 0.1, 0.0, 0.0], 1.0) == []
