"""Some of what bench/check_fuzz.py does 20,000 times: damaged outputs never crash a reader, and none passes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[3] / "bench"


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(BENCH))
    import check_fuzz

    yield check_fuzz
    sys.modules.pop("check_fuzz")


@pytest.mark.cluster  # slow
def test_no_damaged_output_passes_or_crashes(fuzz) -> None:  # type: ignore[no-untyped-def]
    told: list[str] = []
    every = fuzz.outputs(fuzz.FIXTURES)
    count = fuzz.run(every, 300, 12, told.append)
    assert told == []
    assert {"junk", "prose", "fault", "cut", "anything", "beside the fault"} <= count.keys()


def test_what_passes_or_crashes_is_counted(fuzz, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    every = fuzz.outputs(fuzz.FIXTURES)
    told: list[str] = []
    passing = fuzz.report(next(o.text for o in every if o.verdict == "PASS"))
    monkeypatch.setattr(fuzz, "report", lambda text: passing)
    assert fuzz.run(every, 50, 0, told.append)["passed"] == len(told) > 20

    def broken(text: str) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fuzz, "report", broken)
    assert fuzz.run(every, 50, 0, told.append)["crashed"] > 40


def test_the_lines_of_a_fault_are_never_damaged(fuzz) -> None:  # type: ignore[no-untyped-def]
    dice = random.Random(0)
    every = fuzz.outputs(fuzz.FIXTURES)
    ill = [o for o in every if o.faults]
    assert len(ill) > 10
    for output in ill:
        lines = output.text.split("\n")
        for _ in range(5):
            damaged = fuzz.mutation(output, every, dice)[1].split("\n")
            assert all(lines[n - 1] in damaged for n in output.faults)
