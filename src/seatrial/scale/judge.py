"""Judges a measurement: gates on its efficiency, and the losses of its runs. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from seatrial.plan.search.scaling import Mode
from seatrial.scale.sizes import in_words
from seatrial.scale.statistics import Estimate

TargetResult = Literal["PASS", "FAIL", "UNJUDGED"]

# Tolerated relative difference of a step's loss on the same samples in another layout, from summation order.
# fp32: as the drill allows (drill.expectation.OTHER_WORLD); lower precisions round to 3 digits and differ accordingly.
_TOLERANCE = {"fp32": 1e-4}
_TOLERANCE_LOW = 1e-2
_MEDIAN = 1.4826  # standard deviation / median absolute value of a normal distribution
_SPREADS = 4.0  # tolerance of first losses in weak scaling, standard deviations


@dataclass(frozen=True)
class Gates:
    """Requested gates; None: not requested."""

    doubling: float | None = None  # minimum efficiency at each doubling
    speedup: tuple[int, int, float] | None = None  # (from GPUs, to GPUs, minimum speed-up)
    utilisation: float | None = None  # minimum tensor core activity


@dataclass(frozen=True)
class Judgement:
    """The verdict of one gate or check, with the reason."""

    name: str
    verdict: TargetResult
    text: str


def judge_gates(
    gates: Gates,
    sizes: Sequence[tuple[int, int]],
    doublings: Mapping[int, Estimate | None],
    speedup: Callable[[int, int], Estimate | None],
) -> list[Judgement]:
    """`sizes`: (nodes, GPUs), ascending. `doublings`: nodes -> efficiency over half as many nodes, where that is a size.

    `speedup(a, b)`: tokens/s at `a` nodes over those at `b`, None if unknown. A gate passes or
    fails only if the whole interval is on one side of it.
    """
    found: list[Judgement] = []
    if gates.doubling is None:
        found.append(Judgement("each doubling", "UNJUDGED", "not requested (--min-doubling)"))
    elif not doublings:
        found.append(Judgement("each doubling", "UNJUDGED", "no two sizes differ by a factor of two"))
    else:
        for nodes, efficiency in doublings.items():
            name = f"{nodes // 2} to {nodes} nodes"
            found.append(_against(name, efficiency, gates.doubling, _percent, "above"))
    if gates.speedup is None:
        found.append(Judgement("total speed-up", "UNJUDGED", "not requested (--min-speedup)"))
    else:
        low, high, times = gates.speedup
        name = f"{low} to {high} GPUs"
        at = {gpus: nodes for nodes, gpus in sizes}
        missing = [str(gpus) for gpus in (low, high) if gpus not in at]
        if missing:
            text = f"no size in --nodes has {' or '.join(missing)} GPUs"
            found.append(Judgement(name, "UNJUDGED", text))
        else:
            found.append(_against(name, speedup(at[high], at[low]), times, _times, "at least"))
    return found


def judge_utilisation(least: float, active: Mapping[int, Estimate | None]) -> list[Judgement]:
    """`active`: nodes -> tensor core activity of all GPUs; None if the GPUs do not report it."""
    found = []
    for nodes, share in active.items():
        name = f"tensor cores, {in_words(nodes)}"
        if share is None:
            text = f"above {_percent(least)} is required, and the activity is unknown: it needs Hopper or later and NVML"
            found.append(Judgement(name, "UNJUDGED", text))
        else:
            found.append(_against(name, share, least, _percent, "above"))
    return found


def _against(
    name: str, value: Estimate | None, least: float, words: Callable[[float], str], how: str
) -> Judgement:
    wanted = f"{how} {words(least)}"
    if value is None:
        return Judgement(name, "UNJUDGED", f"{wanted} is required, and a size was not measured")
    if value.low is None or value.high is None:
        return Judgement(name, "UNJUDGED", f"{words(value.mean)}, from a single run: {wanted} is required")
    summary = f"{words(value.mean)} ({words(value.low)} to {words(value.high)}), {wanted} is required"
    if value.low > least:
        return Judgement(name, "PASS", summary)
    if value.high < least:
        return Judgement(name, "FAIL", summary)
    return Judgement(name, "UNJUDGED", f"{summary}: the interval contains it, more --repeats would narrow it")


def _percent(value: float) -> str:
    return f"{value * 100:.1f} %"


def _times(value: float) -> str:
    return f"{value:.2f} times"


def judge_losses(
    mode: Mode, precision: str, batches: Mapping[int, int], losses: Mapping[int, Sequence[Sequence[float]]]
) -> list[Judgement]:
    """Compare the losses of each size with those of the first. `batches`: nodes -> global batch.

    `losses`: nodes -> losses by step of each run. Strong scaling: every size trains on the same samples in every
    step, so the losses of each step are compared. Weak scaling: the first step of a larger size contains the first size's
    samples and more, all with the initial weights; so the first losses are compared, within four
    standard deviations of their difference. These come from the median difference of successive losses of the first size,
    which a falling loss hardly changes. The losses of all runs must be finite.
    """
    if not losses:
        return []
    base = min(batches)
    found = []
    for nodes in sorted(losses):
        name = f"losses, {in_words(nodes)}"
        if not all(math.isfinite(loss) for run in losses[nodes] for loss in run):
            found.append(Judgement(name, "FAIL", "a loss is not finite"))
        elif base not in losses:
            found.append(Judgement(name, "UNJUDGED", "the first size was not measured"))
        elif not all(math.isfinite(loss) for loss in losses[base][0]):
            found.append(Judgement(name, "UNJUDGED", "a loss of the first size is not finite"))
        else:
            compare = _same_steps if mode == "strong" or nodes == base else _first_steps
            allowed = _TOLERANCE.get(precision, _TOLERANCE_LOW)
            found.append(
                compare(name, losses[base][0], losses[nodes], allowed, batches[nodes] / batches[base])
            )
    return found


def _same_steps(
    name: str, base: Sequence[float], runs: Sequence[Sequence[float]], allowed: float, _: float
) -> Judgement:
    worst = max(abs(a - b) / abs(b) for run in runs for a, b in zip(run, base, strict=True))
    text = f"every step within {worst:.1e} of the first size's, tolerance {allowed:.0e}"
    return Judgement(name, "PASS" if worst <= allowed else "FAIL", text)


def _first_steps(
    name: str, base: Sequence[float], runs: Sequence[Sequence[float]], allowed: float, times: float
) -> Judgement:
    """`times`: batch size relative to the first size."""
    spread = median(abs(b - a) for a, b in itertools.pairwise(base)) * _MEDIAN / math.sqrt(2)
    room = _SPREADS * spread * math.sqrt(1 - 1 / times) + allowed * abs(base[0])
    worst = max(abs(run[0] - base[0]) for run in runs)
    text = f"the first step's within {worst:.2g} of the first size's, tolerance {room:.2g}; all are finite"
    return Judgement(name, "PASS" if worst <= room else "FAIL", text)
