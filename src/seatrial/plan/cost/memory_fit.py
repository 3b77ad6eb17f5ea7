"""Whether a layout fits (yes, tight, no): predicted against available memory, given the error of predictions.

The upper tail of that error decides: with `margin` = available over predicted memory, a run fails if it needs more than
`margin` times the prediction. How many published figures exceeded their prediction by that much is counted, not fitted
(memory_error.toml, written by bench/plan_accuracy.py --calibration). Few published runs ran out of memory, so the tail is too
short rather than too long.
"""

from __future__ import annotations

import math
import tomllib
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, Literal

# "fits": fewer than this share of the published figures exceeded their prediction by the margin.
SURE = 0.01
Word = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Tail:
    """One source: its number of figures, and measured over predicted for those above their prediction."""

    name: str
    figures: int
    above: tuple[float, ...]


@dataclass(frozen=True)
class Errors:
    """Measured over predicted memory, by source."""

    sources: tuple[Tail, ...]

    @cached_property
    def figures(self) -> int:
        return sum(s.figures for s in self.sources)

    @cached_property
    def _ratios(self) -> tuple[float, ...]:
        return tuple(sorted(r for s in self.sources for r in s.above))

    def beyond(self, margin: float) -> int:
        """Figures that were more than `margin` (1 or more) times their prediction."""
        return len(self._ratios) - bisect_right(self._ratios, margin)

    @cached_property
    def full(self) -> float:
        """The largest share of a GPU's memory that fits with margin; 0 if no figure is known."""
        enough = (m for m in (1.0, *self._ratios) if self.beyond(m) < SURE * self.figures)
        return 1 / next(enough, math.inf)

    def without(self, source: str) -> Errors:
        """The errors of the other sources, to judge layouts of `source` (held out)."""
        return replace(self, sources=tuple(s for s in self.sources if s.name != source))


@dataclass(frozen=True)
class MemoryFit:
    """One of the three answers. `beyond` of `figures` published ones exceed this margin; None if it does not fit."""

    word: Word
    beyond: int | None
    figures: int

    @property
    def sure(self) -> bool:
        return self.word == "fits"

    @property
    def share(self) -> float | None:
        """Share of published figures that exceed this margin; None if unknown."""
        return None if self.beyond is None or not self.figures else self.beyond / self.figures

    @property
    def why(self) -> str:
        """Why it is tight; empty otherwise."""
        if self.word != "tight":
            return ""
        if self.share is None:
            return "may run out of memory: the error of predictions is unknown"
        return (
            f"may run out of memory: {self.beyond} of {self.figures} published figures ({self.share:.1%}) "
            "exceeded their prediction by that much"
        )

    def document(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "verdict": self.word,
            "figures_above": self.beyond,
            "figures": self.figures,
            "share": self.share,
        }


def judge(needs: float, available: float, errors: Errors | None = None) -> MemoryFit:
    """Judge a GPU's predicted bytes `needs` against the `available` ones; `errors` replaces the shipped ones."""
    known = shipped_errors() if errors is None else errors
    if needs > available:
        return MemoryFit("does not fit", None, known.figures)
    beyond = known.beyond(available / needs if needs > 0 else math.inf)
    return MemoryFit("fits" if beyond < SURE * known.figures else "tight", beyond, known.figures)


def errors_from(text: str) -> Errors:
    """Parse the text of memory_error.toml."""
    table = tomllib.loads(text)
    return Errors(tuple(Tail(s["name"], s["figures"], tuple(s["above"])) for s in table["source"]))


@cache
def shipped_errors() -> Errors:
    """The errors of memory_error.toml."""
    return errors_from(files("seatrial.plan.cost").joinpath("memory_error.toml").read_text(encoding="utf-8"))
