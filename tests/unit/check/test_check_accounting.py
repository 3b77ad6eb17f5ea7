"""Every line of a file is accounted for: no output passes because of what stands beside it, and nothing passes unread."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from itertools import product, zip_longest
from pathlib import Path

import pytest

from seatrial.check.intake.collect import pieces_of
from seatrial.check.intake.offline import judge_pieces
from seatrial.check.judging.findings import Verdict
from seatrial.check.judging.report import Report

FIXTURES = Path(__file__).parents[2] / "fixtures" / "check"
TEXTS = {p.name: p.read_text().rstrip("\n") + "\n" for p in sorted(FIXTURES.iterdir())}
PAIRS = list(product(sorted(TEXTS), repeat=2))


def report(text: str) -> Report:
    return judge_pieces(pieces_of(text.encode(), "f.txt", None))


def verdict(text: str) -> Verdict:
    return report(text).verdict


@cache
def alone(name: str) -> Verdict:
    return verdict(TEXTS[name])


def after_each_other(one: str, other: str) -> str:
    return one + other


def by_turns(one: str, other: str) -> str:
    pairs = zip_longest(one.splitlines(), other.splitlines())
    return "\n".join(line for pair in pairs for line in pair if line is not None) + "\n"


def in_the_midst(one: str, other: str) -> str:
    lines = one.splitlines()
    at = random.Random(one + other).randrange(len(lines))
    return "\n".join([*lines[:at], *other.splitlines(), *lines[at:]]) + "\n"


def shuffled_in(one: str, other: str) -> str:
    """A few lines of the one, a few of the other, each in its order."""
    dice = random.Random(one + other)
    both, mixed = [one.splitlines(), other.splitlines()], []
    while any(both):
        lines = dice.choice([lines for lines in both if lines])
        count = dice.randint(1, 8)
        mixed += lines[:count]
        del lines[:count]
    return "\n".join(mixed) + "\n"


Mix = Callable[[str, str], str]
MIXES: tuple[Mix, ...] = (after_each_other, by_turns, in_the_midst, shuffled_in)


def passes_wrongly(names: tuple[str, ...], text: str) -> bool:
    return verdict(text) == "PASS" and any(alone(name) != "PASS" for name in names)


@pytest.mark.cluster  # slow
@pytest.mark.parametrize("mix", MIXES, ids=lambda f: f.__name__)
def test_no_pair_of_outputs_passes_where_one_alone_does_not(mix: Mix) -> None:
    """A sample; every pair in every mix: the next test."""
    pairs = random.Random(0).sample(PAIRS, 150)
    assert [p for p in pairs if passes_wrongly(p, mix(TEXTS[p[0]], TEXTS[p[1]]))] == []


@pytest.mark.long
@pytest.mark.parametrize("mix", MIXES, ids=lambda f: f.__name__)
def test_no_pair_at_all_passes_where_one_alone_does_not(mix: Mix) -> None:
    assert [p for p in PAIRS if passes_wrongly(p, mix(TEXTS[p[0]], TEXTS[p[1]]))] == []
