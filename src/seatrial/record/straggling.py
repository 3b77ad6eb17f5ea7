"""How much of a run's step time is the excess of stragglers, from a bounded sample of its steps.

The excess of a step is that of frontier accounting: the own work of the rank with most of it, above the median of the
ranks'. All steps of 1,024 ranks over a month would be gigabytes: groups of steps are read, spread evenly over those that
count, and the share of their time stands for all.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from seatrial.record.folder import RunFolder
from seatrial.record.frontier import WARM_UP, split_step
from seatrial.record.stages import read_generation
from seatrial.record.step_log import StepLog

_GROUP = 32  # steps
_FILES = 4096  # read at most, and two groups at least
_MOST_GROUPS = 16


@dataclass(frozen=True)
class Straggling:
    """Measured on `steps` of `of_steps` steps."""

    share: float  # of step time
    error: float | None  # its standard error, from the spread of the groups; None: of a single group
    steps: int
    of_steps: int
    rank: int  # the rank that was slowest most often
    rank_steps: int  # number of steps in which this rank was the slowest


def straggling(folder: RunFolder, log: StepLog) -> Straggling | None:
    """None where no step is known from all of its ranks."""
    generation = np.array(log.generations, np.int64)
    first = np.flatnonzero(np.diff(generation, prepend=-1))
    index = np.arange(generation.size) - np.repeat(first, np.diff(np.append(first, generation.size)))
    steady = np.flatnonzero(index >= WARM_UP)
    if not steady.size:
        return None
    first_group, _ = read_generation(folder, int(generation[steady[-1]]), most=1)
    groups = min(max(2, _FILES // max(1, len(first_group))), _MOST_GROUPS, -(-steady.size // _GROUP))
    shares, seconds, excess, pace = [], 0.0, 0.0, Counter[int]()
    for part in np.array_split(steady, groups):
        count = min(_GROUP, part.size)
        last = part[(part.size + count) // 2 - 1]
        found = _group(folder, int(generation[last]), log.steps[last], count)
        if found is None:
            continue
        total_s, ahead, ranks = found
        shares.append(ahead / total_s)
        seconds, excess = seconds + total_s, excess + ahead
        pace.update(ranks)
    if not shares:
        return None
    error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares)) if len(shares) > 1 else None
    rank, often = pace.most_common(1)[0]
    return Straggling(excess / seconds, error, pace.total(), generation.size, rank, often)


def _group(
    folder: RunFolder, generation: int, last: int, count: int
) -> tuple[float, float, list[int]] | None:
    """(seconds, of them excess, the rank with most own work of each step) of `count` recorded steps up to `last`."""
    found, _ = read_generation(folder, generation, most=count, until=last)
    if not found or any(each.ranks != len(found) for each in found.values()) or len(found) != max(found) + 1:
        return None
    ranks = [found[rank] for rank in range(len(found))]
    common = ranks[0].steps
    for each in ranks[1:]:
        common = np.intersect1d(common, each.steps, assume_unique=True)
    if not common.size:
        return None
    tables = np.stack([each.seconds[np.searchsorted(each.steps, common)] for each in ranks], axis=1)
    splits = [split_step(table) for table in tables]
    total_s = sum(split.step_s for split in splits)
    if total_s <= 0:
        return None
    return total_s, sum(split.pace_ahead_s for split in splits), [split.pace_rank for split in splits]
