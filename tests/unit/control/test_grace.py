"""How long processes that were told to stop may take."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from seatrial.control.agent.grace import SAMPLE_S, Grace, crowded
from seatrial.control.machine.types import MOST_GRACES


class Machine:
    """A clock, and whether it is crowded at each look."""

    def __init__(self, *crowds: bool) -> None:
        self.now = 100.0
        self._crowds: Iterator[bool] = cycle(crowds)

    def crowded(self) -> bool:
        return next(self._crowds)

    def grace(self, seconds: float, *, extend: bool = True) -> Grace:
        return Grace(seconds, extend=extend, clock=lambda: self.now, crowded=self.crowded)

    def wait(self, grace: Grace) -> float:
        """Ask when it says, and how long it took."""
        start = self.now
        while not grace.over():
            assert grace.deadline > self.now
            self.now = grace.deadline
        return self.now - start


def test_grace_period_is_not_extended_on_an_idle_machine() -> None:
    machine = Machine(False)
    assert machine.wait(machine.grace(1.0)) == pytest.approx(1.0)


def test_time_in_which_all_processors_are_wanted_does_not_count() -> None:
    machine = Machine(True, False)
    assert machine.wait(machine.grace(1.0)) == pytest.approx(2.0, abs=2 * SAMPLE_S)


def test_it_ends_on_a_machine_that_is_always_crowded() -> None:
    machine = Machine(True)
    assert machine.wait(machine.grace(1.0)) == pytest.approx(MOST_GRACES)


def test_without_extension_only_the_clock_counts() -> None:
    machine = Machine(True)
    assert machine.wait(machine.grace(1.0, extend=False)) == pytest.approx(1.0)


def test_a_late_reading_counts_as_two_intervals() -> None:
    machine = Machine(False)
    grace = machine.grace(1.0)
    machine.now += 2.0
    assert not grace.over()
    machine.now += 2.0
    assert grace.over()


@pytest.mark.parametrize("extend", [True, False])
def test_a_shorter_one_takes_its_place(extend: bool) -> None:
    machine = Machine(False)
    grace = machine.grace(10.0)
    grace.shorten(0.5, extend=extend)
    assert machine.wait(grace) == pytest.approx(0.5)
    grace = machine.grace(0.5)
    grace.shorten(10.0)
    assert machine.wait(grace) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("0.20 0.18 0.12 3/80 11206\n", True),
        ("9.20 0.18 0.12 2/80 11206\n", False),
        ("", False),
        (None, False),
    ],
)
def test_crowded_is_more_to_run_than_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: bool
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    if text is not None:
        (tmp_path / "loadavg").write_text(text)
    assert crowded(str(tmp_path / "loadavg")) == wanted
