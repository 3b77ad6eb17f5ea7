"""Step time by stage over all ranks: frontier accounting (StageFrontier, arXiv:2606.06751).

Averages over ranks hide a slow rank, and the most of each stage counts one delay twice: a rank that is late makes all
others wait. Here each rank's stages are added up in one order; the frontier is the largest sum of any rank at each
boundary. Its differences add up to the time of the slowest rank exactly, and need no synchronised clocks.

Own work comes first in that order, whenever it was done: what the rank with most of it did is its stages', and waiting
has only what remains. The order of stages decides what is charged for a delay that two stages share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seatrial.record.stages import BACKWARD, FORWARD, OWN, STAGES, RankStages

WARM_UP = 2  # first steps of a generation, whose times mean nothing: compilation, memory, connections


@dataclass(frozen=True)
class Split:
    """The time of one step, or the mean of several, by stage: `seconds` of all STAGES add up to it."""

    seconds: NDArray[np.float64]
    setters: NDArray[np.int64]  # for each stage, the rank (row) whose sum is the frontier at its end
    own_s: NDArray[np.float64]  # by rank: own work, without waiting for others
    passes_s: NDArray[np.float64]  # by rank: forward and backward

    @property
    def step_s(self) -> float:
        return float(self.seconds.sum())

    @property
    def pace_rank(self) -> int:
        """The rank (row) with most own work."""
        return int(self.own_s.argmax())

    @property
    def pace_ahead_s(self) -> float:
        """Seconds by which its own work exceeds the median of the ranks'."""
        return float(self.own_s.max() - np.median(self.own_s))


def split_step(seconds: NDArray[np.float64]) -> Split:
    """The split of one step from its `seconds`, ranks x STAGES; the slowest rank's step time is their sum."""
    sums = seconds.cumsum(axis=1)
    frontier = sums.max(axis=0)
    return Split(
        np.diff(frontier, prepend=0.0),
        sums.argmax(axis=0),
        seconds[:, :OWN].sum(axis=1),
        seconds[:, [FORWARD, BACKWARD]].sum(axis=1),
    )


def excess_over_peers(own_s: NDArray[np.float64], pipeline: int) -> NDArray[np.float64]:
    """Each rank's own work in seconds minus the median of its peers: the ranks of the same one of `pipeline` stages."""
    by_stage = own_s.reshape(pipeline, -1)
    return (by_stage - np.median(by_stage, axis=1, keepdims=True)).reshape(-1)


@dataclass(frozen=True)
class Account:
    """The mean split over the steps `first_step` to `last_step`, as far as all ranks recorded them."""

    split: Split
    ranks: int
    steps: int
    first_step: int
    last_step: int
    not_separated: Mapping[str, str]  # stage -> where its time is counted instead, in some rank

    @property
    def seconds(self) -> dict[str, float]:
        """Stage -> seconds of a step, without stages that took none."""
        return {name: float(s) for name, s in zip(STAGES, self.split.seconds, strict=True) if s > 0}

    def as_dict(self) -> dict[str, object]:
        """As JSON."""
        s = self.split
        return {
            "step_s": s.step_s,
            "seconds": self.seconds,
            "frontier_ranks": {name: int(s.setters[STAGES.index(name)]) for name in self.seconds},
            "pace": {
                "rank": s.pace_rank,
                "own_s": float(s.own_s[s.pace_rank]),
                "above_median_s": s.pace_ahead_s,
            },
            "steps": self.steps,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "not_separated": dict(self.not_separated),
        }


def account(found: Mapping[int, RankStages], *, first_step: int | None = None) -> Account | None:
    """The mean split over what `found`, rank -> its record, holds; None unless all ranks have a step in common.

    Steps before `first_step` are left out, by default the first ones of the generation. A stage's rank is the one that set its frontier most often; own
    work is each rank's median over the steps, so that one slow step of a rank does not make it the pace-setter.
    """
    world_size = len(found)
    if any(each.ranks != world_size for each in found.values()):
        return None
    ranks = [found[rank] for rank in range(world_size)]
    common = ranks[0].steps if ranks else np.zeros(0, np.int64)
    for each in ranks[1:]:
        common = np.intersect1d(common, each.steps, assume_unique=True)
    if first_step is None:
        first_step = max((each.first_step for each in ranks), default=0) + WARM_UP
    common = common[common >= first_step]
    if not common.size:
        return None
    tables = np.stack([each.seconds[np.searchsorted(each.steps, common)] for each in ranks], axis=1)
    splits = [split_step(table) for table in tables]
    setters = np.stack([each.setters for each in splits])
    often = [np.bincount(setters[:, i], minlength=world_size).argmax() for i in range(len(STAGES))]
    mean = Split(
        np.mean([each.seconds for each in splits], axis=0),
        np.array(often, dtype=np.int64),
        np.median([each.own_s for each in splits], axis=0),
        np.mean([each.passes_s for each in splits], axis=0),
    )
    unclear = {stage: text for each in ranks for stage, text in each.not_separated.items()}
    return Account(mean, world_size, len(splits), int(common[0]), int(common[-1]), unclear)
