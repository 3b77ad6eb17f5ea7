"""Compares groups of nodes that were measured in parallel. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median

from seatrial.scale.judge import Judgement
from seatrial.scale.sizes import in_words
from seatrial.scale.statistics import LEVEL, t_quantile
from seatrial.scale.trial import Trial

LEAST_LOSS = 0.03  # a group slower by less than this is never bad


@dataclass(frozen=True)
class Group:
    """One group of nodes at one size. `bad`: slower than the others, or failed."""

    hosts: tuple[str, ...]
    runs: int
    tokens_per_s: float | None  # mean of its runs
    slower: float | None  # 0..1: slowdown against the median of the others, in the same repeats
    low: float | None  # simultaneous 95 % interval of `slower` over all groups
    high: float | None
    bad: bool
    problem: str = ""  # of its last run, if none is valid


def compare(trials: Sequence[Trial]) -> list[Group]:
    """Compare the groups of one size; [] if there are fewer than two.

    Two-way model: an effect of the repeat, one of the group, and noise, which gives the
    intervals. These are widened for the number of groups (Bonferroni), so that one of many healthy groups is rarely blamed.
    Only repeats in which all groups with valid runs were measured are compared.
    """
    runs: dict[tuple[str, ...], dict[int, float]] = {}
    problems: dict[tuple[str, ...], str] = {}
    for trial in trials:
        group = tuple(trial.hosts)
        runs.setdefault(group, {})
        if trial.figures is not None:
            runs[group][trial.repeat] = trial.figures.tokens_per_s
        elif trial.problem != "interrupted":
            problems[group] = trial.problem
    if len(runs) < 2:
        return []
    compared = _compared({group: values for group, values in runs.items() if values})
    found = []
    for group, values in runs.items():
        slower, low, high = compared.get(group, (None, None, None))
        bad = low is not None and slower is not None and low > 0 and slower > LEAST_LOSS
        speed = fmean(values.values()) if values else None
        failed = "" if values else problems.get(group, "")
        found.append(Group(group, len(values), speed, slower, low, high, bad or bool(failed), failed))
    return found


def _compared(
    runs: Mapping[tuple[str, ...], Mapping[int, float]],
) -> dict[tuple[str, ...], tuple[float, float | None, float | None]]:
    """group -> (slowdown, low, high); low and high are None with a single repeat."""
    repeats = sorted(set.intersection(*(set(values) for values in runs.values()))) if runs else []
    if len(runs) < 2 or not repeats:
        return {}
    logs = {group: [math.log(values[r]) for r in repeats] for group, values in runs.items()}
    means = {group: fmean(row) for group, row in logs.items()}
    columns = [fmean(column) for column in zip(*logs.values(), strict=True)]
    every, count, n = fmean(columns), len(logs), len(repeats)
    half = None
    if n > 1:
        rest = math.fsum(
            (x - means[group] - column + every) ** 2
            for group, row in logs.items()
            for x, column in zip(row, columns, strict=True)
        )
        degrees = (count - 1) * (n - 1)
        # Standard error of the difference from the mean of the others.
        error = math.sqrt(rest / degrees / n * count / (count - 1))
        normal = NormalDist()
        widened = normal.inv_cdf(1 - (1 - LEVEL) / 2 / count) / normal.inv_cdf(1 - (1 - LEVEL) / 2)
        half = t_quantile(degrees) * widened * error
    found = {}
    for group, mean in means.items():
        off = mean - median(value for other, value in means.items() if other != group)
        low, high = (None, None) if half is None else (1 - math.exp(off + half), 1 - math.exp(off - half))
        found[group] = (1 - math.exp(off), low, high)
    return found


def judge(nodes: int, groups: Sequence[Group]) -> list[Judgement]:
    """Judge the groups of one size; [] if there are none."""
    if not groups:
        return []
    name = f"groups of {in_words(nodes)}"
    bad = [f"bad group {', '.join(g.hosts)}: {_reason(g)}" for g in groups if g.bad]
    if bad:
        return [Judgement(name, "FAIL", "; ".join(bad))]
    known = [g for g in groups if g.slower is not None]
    if any(g.low is None for g in groups):
        return [Judgement(name, "UNJUDGED", "needs two repeats in which all groups were measured")]
    worst = max(known, key=lambda g: g.slower or 0.0)
    summary = f"of {len(groups)}, the slowest is {', '.join(worst.hosts)}: {_reason(worst)}"
    if any((g.high or 0.0) > LEAST_LOSS for g in known):
        return [Judgement(name, "UNJUDGED", f"{summary}: more --repeats would narrow it")]
    return [Judgement(name, "PASS", summary)]


def _reason(group: Group) -> str:
    if group.problem:
        return f"its run failed: {group.problem}"
    assert group.slower is not None
    assert group.low is not None
    assert group.high is not None
    share = f"{group.slower * 100:.1f} % ({group.low * 100:.1f} to {group.high * 100:.1f})"
    return f"{share} slower than the median of the others"
