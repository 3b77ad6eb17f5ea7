"""Pace of a stack on a GPU: its kernel times over those of good kernels alone, with spread and source (calibration.toml).

    pace = typical x family x architecture x (watts / usual watts)^-power x fp8 x residual of this stack on this GPU

`operators` and `attention` also multiply the time of their kind: stacks differ more in fusion and attention kernels than
in GEMMs, for which all use the vendor's. All factors are fitted together (bench/plan_fit.py) with priors at 1, so the
effect of a GPU on one stack applies to all, and a stack with few rows stays near its family.

Interval: pace x exp(+- z x spread), spread being the standard deviation of log(measured / predicted), with a term for
each unmeasured factor. The pace of a stack whose family was measured on this GPU is "borrowed", others "extrapolated":
`away` is the additional spread where other families were measured on this GPU, `unmeasured` that where none was. Both
are fitted to what predictions without a publisher lose if they lack these rows as well (bench/plan_accuracy.py).
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Literal

from seatrial.hardware.catalogue import Gpu, Precision, gpus

Kind = Literal["calibrated", "borrowed", "extrapolated"]
# Normal quantile: 85 % lie within +- Z standard deviations.
Z = 1.44
# Standard deviations of logarithms, for the fit's priors and intervals: rows of one source, and releases of one stack
# (4 % in the median of published results); sources; a stack on a GPU beyond family and architecture; families;
# architectures. Chosen so that at least 85 % of the rows of held-out sources are inside (bench/plan_accuracy.json).
ROWS, SOURCES, CELLS, FAMILIES, ARCHITECTURES = 0.04, 0.04, 0.1, 0.15, 0.2


@dataclass(frozen=True)
class Factors:
    """Factors on the time of memory-bound operators and of attention, in addition to the pace."""

    operators: float = 1.0
    attention: float = 1.0


UNIT_FACTORS = Factors()


@dataclass(frozen=True)
class Pace:
    """`value` multiplies all kernel times, `factors` those of some kinds; `spread` is of the whole step."""

    value: float
    spread: float
    kind: Kind
    source: str
    factors: Factors = UNIT_FACTORS


@dataclass(frozen=True)
class Entry:
    """One stack on one GPU, measured in 16 bits. `spread`: of own runs; else it follows from rows and sources."""

    stack: str
    gpu: str
    pace: float
    rows: int
    source: str
    architecture: str
    sources: int = 1
    spread: float | None = None

    @property
    def few(self) -> str:
        """How little a published pace rests on, if it has one source or fewer than three rows; else empty."""
        if self.spread is not None or (self.sources > 1 and self.rows > 2):
            return ""
        rows, sources = ((n, "s" * (n > 1)) for n in (self.rows, self.sources))
        return f" ({rows[0]} row{rows[1]} of {sources[0]} source{sources[1]})"


@dataclass(frozen=True, eq=False)  # compared by identity: predictions are cached by it
class Calibration:
    """The measured paces, and the factors for others."""

    entries: tuple[Entry, ...]
    family: dict[str, str]  # stack -> its family
    families: dict[str, float]
    operators_of: dict[str, float]  # by family
    architectures: dict[str, float]
    typical: float = 1.0
    operators: float = 1.0
    attention: float = 1.0
    power: float = 0.0
    fp8: float = 1.0
    away: float = 0.0
    unmeasured: float = 0.0

    def pace(self, stack: str, gpu: Gpu, precision: Precision = "bf16") -> Pace:
        """The best known pace. ValueError if there is no entry at all."""
        if not self.entries:
            raise ValueError("no calibration: nothing was measured")
        family = self.family.get(stack, "")
        factors = Factors(self.operators * self.operators_of.get(family, 1.0), self.attention)
        eight = self.fp8 if precision == "fp8" else 1.0
        own = next((e for e in self.entries if (e.stack, e.gpu) == (stack, gpu.name)), None)
        if own is not None:
            spread = own.spread
            if spread is None:
                spread = math.hypot(ROWS * (1 + 1 / own.rows) ** 0.5, SOURCES * (1 + 1 / own.sources) ** 0.5)
            return Pace(own.pace * eight, spread, "calibrated", own.source + own.few, factors)
        value = self.typical * self.families.get(family, 1.0) * self.gpu_factor(gpu) * eight
        deviations = [ROWS, SOURCES, CELLS]
        if family not in self.families:
            deviations.append(FAMILIES)
        if gpu.architecture not in self.architectures:
            deviations.append(ARCHITECTURES)
        near = [e for e in self.entries if self.family.get(e.stack, "") == family]
        here = [e for e in near if e.gpu == gpu.name]
        if not here:
            deviations.append(self.away)
        if all(e.gpu != gpu.name for e in self.entries):
            deviations.append(self.unmeasured)
        text = ", ".join(sorted(f"{e.stack} on {e.gpu}{e.few}" for e in here or near)) or "all stacks"
        return Pace(
            value, math.hypot(*deviations), "borrowed" if here else "extrapolated", f"from {text}", factors
        )

    def gpu_factor(self, gpu: Gpu) -> float:
        """The factor of architecture and power limit on every stack's pace."""
        usual = next((g.watts for g in gpus() if g.architecture == gpu.architecture and g.watts), None)
        power = 1.0 if usual is None or gpu.watts is None else (gpu.watts / usual) ** -self.power
        return self.architectures.get(gpu.architecture, self._unknown) * power

    @cached_property
    def _unknown(self) -> float:
        """The mean of the known architectures, weighted by rows."""
        known = [(e.rows, math.log(self.architectures.get(e.architecture, 1.0))) for e in self.entries]
        return math.exp(sum(n * x for n, x in known) / max(1, sum(n for n, _ in known)))


@cache
def shipped() -> Calibration:
    """The calibration of calibration.toml."""
    text = files("seatrial.plan.cost").joinpath("calibration.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return Calibration(
        tuple(Entry(**e) for e in table["pace"]),
        table["family"],
        table["families"],
        table["operators_of"],
        table["architectures"],
        **table["shared"],
    )
