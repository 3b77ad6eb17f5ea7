"""Small arithmetic: divisors and lists of numbers for the hints of the rules, shares of weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction


def shares(weights: Sequence[float]) -> list[Fraction]:
    """Each positive weight over the sum of all, exactly; a float is the decimal number it is written as (0.7: 7/10)."""
    exact = [Fraction(repr(float(w))) for w in weights]
    total = sum(exact)
    return [w / total for w in exact]


def divisors(n: int, *, most: int = 128) -> list[int]:
    """The divisors of n up to `most`, in order; bounded so that an absurd n costs nothing."""
    return [d for d in range(1, min(n, most) + 1) if n % d == 0]


def next_multiple(n: int, of: int) -> int:
    """The smallest multiple of `of` that is at least n."""
    return -(-n // of) * of


def near_multiples(n: int, of: int) -> list[int]:
    """The multiples of `of` right below and above n; never 0."""
    above = next_multiple(n, of)
    return [m for m in (above - of, above) if m > 0]


def either(values: Iterable[object]) -> str:
    """1, 2, 4 -> '1, 2 or 4'."""
    return _join(values, "or")


def both(values: Iterable[object]) -> str:
    """1, 2, 4 -> '1, 2 and 4'."""
    return _join(values, "and")


def _join(values: Iterable[object], last: str) -> str:
    *most, final = map(str, values)
    return f"{', '.join(most)} {last} {final}" if most else final
