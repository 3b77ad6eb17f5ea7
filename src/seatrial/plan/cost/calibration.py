"""Pace of a stack on a GPU: its kernel times over good kernels' alone, with spread and source (calibration.toml).

Three numbers: the pace multiplies every kernel's time; `operators` and `attention` multiply that of their kind again:
stacks differ more in fusion and choice of attention kernel than in matrix products, which all take from the vendor.

What was not measured is derived and labelled so: from a stack that runs the same kernels ("borrowed"), or from the same
stack on other GPUs ("extrapolated"). Interval: pace x exp(+- z x spread), spread being the standard deviation of
log(measured / predicted).
"""

from __future__ import annotations

import math
import statistics
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Literal

Kind = Literal["calibrated", "borrowed", "extrapolated"]
# Normal quantile: 85 % lie within +- Z standard deviations.
Z = 1.44
# Added to the spread, as standard deviations: another release of the same stack (4 % in the median of published
# results), another stack, another GPU (what leaving out a source or a GPU generation costs in bench/plan_accuracy.py).
DOUBT: dict[Kind, float] = {"calibrated": 0.04, "borrowed": 0.12, "extrapolated": 0.14}


@dataclass(frozen=True)
class Factors:
    """Factors on the time of memory-bound operators and of attention, on top of the pace of all kernels."""

    operators: float = 1.0
    attention: float = 1.0


EVEN = Factors()


@dataclass(frozen=True)
class Pace:
    """`value` multiplies the time of every kernel, `factors` that of some kinds; `spread` is of the whole step."""

    value: float
    spread: float
    kind: Kind
    source: str
    factors: Factors = EVEN


@dataclass(frozen=True)
class Entry:
    """One stack on one GPU, as measured."""

    stack: str
    gpu: str
    pace: float
    spread: float
    rows: int
    source: str
    operators: float = 1.0
    attention: float = 1.0

    @property
    def factors(self) -> Factors:
        return Factors(self.operators, self.attention)


@dataclass(frozen=True)
class Calibration:
    """The measured paces, and which stacks and GPUs stand for which others."""

    entries: tuple[Entry, ...]
    kin: dict[str, str]  # stack -> the stack whose kernels it runs
    alike: dict[str, str]  # GPU -> one of the same generation

    def pace(self, stack: str, gpu: str) -> Pace:
        """The best known pace. ValueError if there is no entry at all."""
        if not self.entries:
            raise ValueError("no calibration: nothing was measured")
        names = [stack]
        while names[-1] in self.kin and self.kin[names[-1]] not in names:
            names.append(self.kin[names[-1]])
        for i, name in enumerate(names):
            found = self._find(name, gpu)
            if found is not None:
                kind: Kind = "calibrated" if i == 0 else "borrowed"
                source = found.source if i == 0 else f"{name} on {gpu}: {found.source}"
                spread = math.hypot(found.spread, DOUBT[kind])
                return Pace(found.pace, spread, kind, source, found.factors)
        return self._extrapolate(names, gpu)

    def _find(self, stack: str, gpu: str) -> Entry | None:
        return next((e for e in self.entries if (e.stack, e.gpu) == (stack, gpu)), None)

    def _first(self, names: list[str], fits: Callable[[Entry], bool]) -> list[Entry]:
        """The entries that satisfy `fits`, of the first of these stacks that has any."""
        found = ([e for e in self.entries if e.stack == name and fits(e)] for name in names)
        return next((entries for entries in found if entries), [])

    def _chip(self, gpu: str) -> str:
        """One common name for all GPUs of `gpu`'s generation that `alike` links."""
        seen = [gpu]
        while seen[-1] in self.alike and self.alike[seen[-1]] not in seen:
            seen.append(self.alike[seen[-1]])
        return seen[-1]

    def _extrapolate(self, names: list[str], gpu: str) -> Pace:
        """log(pace) = stack + GPU, each relative to the mean of what was measured."""
        mine = self._first(names, lambda e: True)
        base = mine or list(self.entries)
        on = self.alike.get(gpu, gpu)
        if not any(e.gpu == on for e in base):
            # The same kernels on the same chip with another memory or board predict better than those on other chips.
            base = self._first(names, lambda e: self._chip(e.gpu) == self._chip(gpu)) or base
        stack_names = {e.stack for e in base}
        value = statistics.fmean(math.log(e.pace) for e in base)
        # How much the GPU differs from those that the stack was measured on, judged by other stacks on both.
        shifts = []
        for other in {e.stack for e in self.entries} - stack_names:
            there = [e for e in self.entries if e.stack == other and e.gpu in (gpu, on)]
            here = [e for e in self.entries if e.stack == other and e.gpu in {b.gpu for b in base}]
            if there and here:
                shifts.append(_mean_log(there) - _mean_log(here))
        same = [e for e in base if e.gpu == on] or [e for e in base if self._chip(e.gpu) == self._chip(gpu)]
        if same:
            value = _mean_log(same)
        elif shifts:
            value += statistics.fmean(shifts)
        spread = math.hypot(statistics.fmean(e.spread for e in base), DOUBT["extrapolated"])
        text = ", ".join(sorted({f"{e.stack} on {e.gpu}" for e in (same or base)}))
        factors = Factors(
            *(math.exp(statistics.fmean(math.log(getattr(e, name)) for e in same or base)) for name in _KINDS)
        )
        return Pace(math.exp(value), spread, "extrapolated", f"from {text}", factors)


_KINDS = tuple(f.name for f in fields(Factors))


def _mean_log(entries: Iterable[Entry]) -> float:
    return statistics.fmean(math.log(e.pace) for e in entries)


@cache
def shipped() -> Calibration:
    """The calibration of calibration.toml."""
    table = tomllib.loads(
        files("seatrial.plan.cost").joinpath("calibration.toml").read_text(encoding="utf-8")
    )
    return Calibration(tuple(Entry(**e) for e in table["pace"]), table["kin"], table["alike"])
