"""Geometry of a waterfall chart from the dense peak down to the MFU, for all renderers.

All figures are shares of the GPU's dense peak over the time covered. The first bar is the peak; each further one begins
at the end of the previous one; the last is the remainder, the MFU. The kinds group the parts, for colours and legends; the
same parts are measured on real runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from seatrial.plan.cost.predict import Share

Kind = Literal["peak", "kernels", "recomputation", "communication", "schedule", "run", "rest", "result"]

# Parts by kind, as named by `waterfall` in predict.py and by `finish`; others are drawn as "rest".
KINDS: dict[str, Kind] = {
    "GEMMs below peak": "kernels",
    "attention below peak": "kernels",
    "memory-bound operators": "kernels",
    "optimizer": "kernels",
    "recomputation": "recomputation",
    "tensor-parallel communication": "communication",
    "context-parallel communication": "communication",
    "expert-parallel communication": "communication",
    "pipeline communication": "communication",
    "data-parallel communication": "communication",
    "compute slowed by overlap": "communication",
    "pipeline bubble and uneven stages": "schedule",
    # Rows of measured steps, in which some of these are not separated (step_waterfall.py).
    "computation below peak": "kernels",
    "computation below peak, tensor-parallel communication": "kernels",
    "pipeline bubble and communication": "schedule",
    "waiting for data": "rest",
    "host": "rest",
    "sum of loss and gradient norm": "rest",
    "saving checkpoints": "run",
    "validation": "run",
    "failures and recovery": "run",
}
WORDS: dict[Kind, str] = {
    "peak": "dense peak",
    "kernels": "kernels below peak",
    "recomputation": "recomputation",
    "communication": "exposed communication",
    "schedule": "pipeline schedule",
    "run": "checkpoints and failures",
    "rest": "other",
    "result": "model FLOPs (MFU)",
}
PEAK = WORDS["peak"]
# A part below this is not drawn: it would be thinner than its outline.
LEAST = 0.0005


@dataclass(frozen=True)
class Bar:
    """One bar from `low` to `high`, shares of the peak. `seconds` of a step, or of the whole run."""

    name: str
    kind: Kind
    low: float
    high: float
    share: float  # signed: a part can be a gain
    seconds: float

    @property
    def words(self) -> str:
        """Its share as charts show it: 100 %, -12.4 %, 27.5 %."""
        if self.kind == "peak":
            return "100 %"
        return f"{self.share * 100:.1f} %" if self.kind == "result" else f"{-self.share * 100:+.1f} %"


@dataclass(frozen=True)
class Waterfall:
    """Bars from the peak to the result, and the names of the parts that are (almost) zero."""

    bars: tuple[Bar, ...]
    nothing: tuple[str, ...]

    @property
    def mfu(self) -> float:
        return self.bars[-1].share

    @property
    def seconds(self) -> float:
        """Seconds of the time covered: a step, or the whole run."""
        return self.bars[0].seconds

    @property
    def losses(self) -> tuple[Kind, ...]:
        """The kinds of losses present, in the order of their first bar, for a legend; both ends are labelled."""
        return tuple(dict.fromkeys(b.kind for b in self.bars[1:-1]))

    @property
    def too_small(self) -> str:
        """The parts that are not drawn, as text; empty if there are none."""
        return "" if not self.nothing else f"below {LEAST * 100:g} %: {', '.join(self.nothing)}"

    @property
    def sentence(self) -> str:
        """The chart in one sentence, as alternative text."""
        losses = sorted((b for b in self.bars if b.kind not in ("peak", "result")), key=lambda b: -b.share)
        text = ", ".join(f"{b.name} {b.share * 100:.1f} %" for b in losses[:3])
        rest = len(losses) - 3
        more = f" and {rest} smaller part{'s' if rest > 1 else ''}" if rest > 0 else ""
        first, last = self.bars[0], self.bars[-1]
        of = "GPUs' dense peak" if first.name == PEAK else first.name
        return (
            f"Of the {of} {last.share * 100:.1f} % goes into {last.name}; lost to {text or 'nothing'}{more}."
        )


def waterfall_of(shares: Sequence[Share], whole_name: str = PEAK) -> Waterfall:
    """The bars of `Prediction.waterfall`, `Finish.waterfall` or a measured step: the first share is the result, all add up to 1.

    ValueError if they do not.
    """
    whole = sum(s.share for s in shares)
    if not shares or abs(whole - 1) > 1e-6:
        raise ValueError(f"the parts add up to {whole:g} of the whole")
    first, *parts = shares
    bars = [Bar(whole_name, "peak", 0.0, 1.0, 1.0, sum(s.seconds for s in shares))]
    nothing: list[str] = []
    at = 1.0
    for part in parts:
        after = at - part.share
        if abs(part.share) >= LEAST:
            low, high = min(at, after), max(at, after)
            bars.append(Bar(part.name, KINDS.get(part.name, "rest"), low, high, part.share, part.seconds))
        else:
            nothing.append(part.name)
        at = after
    bars.append(Bar(first.name, "result", 0.0, first.share, first.share, first.seconds))
    return Waterfall(tuple(bars), tuple(nothing))
