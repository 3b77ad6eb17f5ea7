"""Leases on a network file system whose caches lag by up to a minute, through random histories.

`network_files.py` is the file system, `lease_world.py` has the hosts and what must hold:

1. What a term decides is written before the next term begins, or not at all.
2. Ranks of two generations never run at the same time, and no generation begins twice.
3. When the faults are over, all hosts follow one coordinator within the life of a cache and a few times `silence_s`.

A failure says its seed: `World(SEED).run()` is the same history again.
"""

from __future__ import annotations

import pytest
from broken_leases import BROKEN
from lease_world import BrokenInvariantError, World

from seatrial.control.net.lease import Leases

ENOUGH = 1000


def play(seeds: range) -> tuple[int, int]:
    """Takeovers and starts in these histories."""
    takeovers = starts = 0
    for seed in seeds:
        world = World(seed)
        world.run()
        takeovers += world.takeovers
        starts += world.started_count
    return takeovers, starts


@pytest.mark.cluster  # slow
def test_a_few_hundred_histories() -> None:
    takeovers, starts = play(range(300))
    assert takeovers > 600
    assert starts > 1300


@pytest.mark.ci
@pytest.mark.cluster
@pytest.mark.parametrize("histories", [1000, pytest.param(5000, marks=pytest.mark.long)])
def test_thousands_of_histories(histories: int) -> None:
    play(range(300, 300 + histories))


@pytest.mark.parametrize("leases_type", BROKEN, ids=lambda t: t.__name__)
def test_a_broken_lease_is_caught(leases_type: type[Leases]) -> None:
    for seed in range(ENOUGH):
        try:
            World(seed, leases_type).run()
        except BrokenInvariantError as error:
            print(f"{leases_type.__name__}: after {seed + 1}: {error}")
            return
    raise AssertionError(f"{leases_type.__name__} was not caught in {ENOUGH} histories")
