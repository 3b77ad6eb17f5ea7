"""Groups of nodes: which nodes they are, and which of them is blamed."""

from __future__ import annotations

import numpy as np
import pytest

from seatrial.scale.groups import compare, judge
from seatrial.scale.site import Site
from seatrial.scale.trial import Figures, Trial


def trial(hosts: str, repeat: int, speed: float | None, problem: str = "") -> Trial:
    figures = None if speed is None else Figures(1, 11, 1.0, speed, None, [])
    return Trial(len(hosts), len(hosts), 0.0, 1.0, "x", problem, figures, list(hosts), repeat)


def drawn(rng: np.random.Generator, speeds: dict[str, float], repeats: int, noise: float) -> list[Trial]:
    """Repeats drift by ten percent, all groups alike."""
    found = []
    for repeat in range(1, repeats + 1):
        drift = rng.normal(1, 0.1)
        found += [trial(h, repeat, 1000 * s * drift * rng.normal(1, noise)) for h, s in speeds.items()]
    return found


@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 2), (3, 1), (5, 1), (6, 0)])
def test_groups_are_disjoint_and_in_order(size: int, count: int) -> None:
    groups = Site(tuple("abcde")).groups(size)
    assert len(groups) == count
    assert [n for group in groups for n in group] == list("abcde")[: count * size]


@pytest.mark.parametrize("count", [2, 4, 16, 40])
def test_a_slow_group_is_blamed_and_healthy_ones_are_not(count: int) -> None:
    rng = np.random.default_rng(count)
    names = [chr(ord("A") + i) for i in range(count)]
    found = wrong = 0
    for _ in range(200):
        healthy = compare(drawn(rng, dict.fromkeys(names, 1.0), 4, 0.02))
        wrong += any(g.bad for g in healthy)
        sick = compare(drawn(rng, {n: 0.85 if n == "B" else 1.0 for n in names}, 4, 0.02))
        found += [g.hosts for g in sick if g.bad] == [("B",)]
    assert wrong <= 10
    assert found >= 190


def test_a_slightly_slower_group_is_not_bad() -> None:
    rng = np.random.default_rng(1)
    groups = compare(drawn(rng, {"A": 1.0, "B": 0.98, "C": 1.0}, 8, 0.0001))
    assert [j.verdict for j in judge(1, groups)] == ["PASS"]
    assert groups[1].slower == pytest.approx(0.02, abs=0.001)


def test_a_group_that_fails_is_bad_and_others_compared() -> None:
    rng = np.random.default_rng(2)
    runs = [*drawn(rng, {"A": 1.0, "B": 1.0}, 3, 0.001), trial("C", 1, None, "it broke")]
    groups = compare(runs)
    assert [(g.hosts, g.bad, g.runs) for g in groups] == [
        (("A",), False, 3),
        (("B",), False, 3),
        (("C",), True, 0),
    ]
    (found,) = judge(1, groups)
    assert (found.verdict, "bad group C: its run failed: it broke" in found.text) == ("FAIL", True)


def test_a_wide_interval_is_not_judged() -> None:
    (found,) = judge(1, compare(drawn(np.random.default_rng(3), {"A": 1.0, "B": 0.95}, 2, 0.05)))
    assert (found.verdict, "more --repeats" in found.text) == ("UNJUDGED", True)


def test_one_repeat_is_unjudged() -> None:
    (found,) = judge(1, compare([trial("A", 1, 100.0), trial("B", 1, 50.0)]))
    assert found.verdict == "UNJUDGED"
    assert compare([trial("A", 1, 100.0)]) == []
