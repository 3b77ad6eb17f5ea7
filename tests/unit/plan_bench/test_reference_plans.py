"""Ten reference plans give the reviewed answers: the same text, layouts and reasons, figures within 2 %."""

from __future__ import annotations

import re

import pytest
from rows_cases import BENCH

from plan_answers import jobs, kept, told

# A figure, not the size in a name such as TP8 or PP2x4.
_FIGURE = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
_LONG = {"70b-64-h100", "70b-gb200-nvl72", "qwen2.5-72b-b300", "405b-100000-h100", "1b-100gbe"}


def words(text: str) -> str:
    return " ".join(_FIGURE.sub("#", text).split())


def values(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in _FIGURE.findall(text)]


def test_there_are_ten_reference_plans() -> None:
    assert sorted(kept()) == sorted(jobs())
    assert len(kept()) == 10


@pytest.mark.cluster  # slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n in _LONG else n for n in jobs()]
)
def test_a_reference_plan_answers_as_reviewed(name: str) -> None:
    now, reviewed = told(jobs()[name]), kept()[name]
    assert words(now) == words(reviewed), f"if it is right: python {BENCH}/plan_answers.py --write"
    # Small shares and differences are printed with one digit.
    assert values(now) == pytest.approx(values(reviewed), rel=0.02, abs=1)
