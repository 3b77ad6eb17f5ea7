"""Records of the runs of one size, and the figures derived from them to find causes. Pure.

A collective ends for all members at about the same time, so the member that arrives last waits least: its wait is the
duration of the collective, and longer waits are due to late members. No synchronised clocks are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from seatrial.hardware.counters import PortFault
from seatrial.job.layout import Layout
from seatrial.record.stages import (
    BACKWARD,
    CONTEXT,
    DATA,
    EXPERT,
    FORWARD,
    HOST,
    OPTIMIZER,
    PIPELINE,
    REPLICATE,
    SAVE,
    SHARD,
    STAGES,
    STEP_SUM,
    TENSOR,
    RankStages,
)

_KEPT = 0.9  # share of the steps that is used, without the slowest: in any run a few are disturbed
NORMAL = 1.4826  # standard deviation / median absolute deviation of a normal distribution
OWN_WORK = {"compute": (FORWARD, BACKWARD, OPTIMIZER), "data": (DATA,), "host": (HOST,)}
# Of steps x pipeline x replicate x outer shards x context or expert x tensor: these two are not combined, and states are
# sharded over their ranks too.
_AXES = {
    "pipeline": (1,),
    "replicate": (2,),
    "shard": (3, 4),
    "context": (4,),
    "expert": (4,),
    "tensor": (5,),
    "step_sum": (1, 2, 3, 4, 5),
}
_STAGE = {
    "pipeline": PIPELINE,
    "replicate": REPLICATE,
    "shard": SHARD,
    "context": CONTEXT,
    "expert": EXPERT,
    "tensor": TENSOR,
    "step_sum": STEP_SUM,
}


@dataclass(frozen=True)
class Groups:
    """The groups of one dimension. Groups of a row have equal work.

    A row has the groups of one pipeline rank. Along the pipeline, groups are those of one tensor group: others
    may be delayed by a slow rank of their own.
    """

    seconds: NDArray[np.float64]  # rows x groups: mean over steps of the shortest wait of any member
    ranks: NDArray[np.int64]  # rows x groups x members


@dataclass(frozen=True)
class Observed:
    """One size: its steady steps, and other measurements."""

    seconds: NDArray[np.float64]  # steps x ranks x STAGES
    layout: Layout
    gpus_per_node: int
    tokens: float  # per step, all ranks
    microbatches: int | None = None  # per pipeline and step
    # dimension -> mean size of one collective.
    message_bytes: Mapping[str, float] = field(default_factory=dict)
    calls: Mapping[str, float] = field(default_factory=dict)  # dimension -> collectives per rank and step
    faults: Mapping[int, Sequence[PortFault]] | None = None  # node -> counter faults; None: not read
    clocks_mhz: NDArray[np.float64] | None = None  # clock of each rank's device
    not_separated: Mapping[str, str] = field(default_factory=dict)  # as in RankStages

    def __post_init__(self) -> None:
        _, ranks, stages = self.seconds.shape
        if ranks != self.layout.world_size or stages != len(STAGES):
            raise ValueError(
                f"{ranks} ranks and {stages} stages; the layout has {self.layout.world_size} ranks"
            )

    @property
    def tokens_per_rank(self) -> float:
        return self.tokens / self.layout.world_size

    @cached_property
    def _kept(self) -> NDArray[np.bool_]:
        return self._without_save <= np.quantile(self._without_save, _KEPT)

    @cached_property
    def _without_save(self) -> NDArray[np.float64]:
        """Seconds of each step, without saves."""
        return np.asarray(self.seconds.sum(axis=2).max(axis=1) - self._save)

    @property
    def _save(self) -> NDArray[np.float64]:
        return np.asarray(self.seconds[:, :, SAVE].max(axis=1))

    @property
    def save_s(self) -> float:
        """Mean save time per step, over all steps, most of which save nothing."""
        return float(self._save.mean())

    @cached_property
    def step_s(self) -> float:
        """Mean step time without the slowest steps."""
        return float(self._without_save[self._kept].mean()) + self.save_s

    @property
    def step_error_s(self) -> float:
        """Standard error of `step_s`, without steps that stalled."""
        kept = self._without_save[self._kept]
        return NORMAL * float(lower_median(np.abs(kept - lower_median(kept)))[0]) / float(np.sqrt(len(kept)))

    def work(self, name: str) -> NDArray[np.float64]:
        """Seconds of own work of this kind (OWN_WORK), shape (pipeline ranks, ranks of each)."""
        own = self.seconds[self._kept][:, :, OWN_WORK[name]].sum(axis=2).mean(axis=0)
        return np.asarray(own.reshape(self.layout.pipeline, -1))

    @property
    def variation_s(self) -> float:
        """Time lost to variation between ranks: mean of the per-step maximum minus the maximum of the means."""
        own = self.seconds[self._kept][:, :, : SAVE + 1].sum(axis=2) - self.seconds[self._kept][:, :, SAVE]
        return float(own.max(axis=1).mean() - own.mean(axis=0).max())

    @property
    def idle_s(self) -> float:
        """Seconds that the least idle rank waits for other pipeline stages, or for the end of the step.

        The last stage is idle before its first pass, and after its last one, where it waits in the step's sum.
        """
        idle = self.seconds[self._kept][:, :, [PIPELINE, STEP_SUM]].sum(axis=2)
        return float(idle.min(axis=1).mean())

    def dimensions(self) -> list[str]:
        """Dimensions with more than one rank."""
        names = ("tensor", "expert", "context", "shard", "replicate", "pipeline")
        found = [name for name in names if getattr(self.layout, name) > 1]
        if self._merged and "replicate" in found:
            found.remove("replicate")
        return found + (["step_sum"] if self.layout.world_size > 1 else [])

    @property
    def _merged(self) -> bool:
        """Whether waiting for sums over replicas is counted with that for shards."""
        return "replicate" in self.not_separated and self.layout.shard > 1

    def groups(self, dimension: str) -> Groups:
        """The groups along `dimension`."""
        layout = self.layout
        inner = max(layout.context, layout.expert)
        shape = (layout.pipeline, layout.replicate, layout.shard // inner, inner, layout.tensor)
        axes = (2, 3, 4) if dimension == "shard" and self._merged else _AXES[dimension]
        wait = self.seconds[self._kept][:, :, _STAGE[dimension]].reshape(-1, *shape)
        least = wait.min(axis=axes, keepdims=True).mean(axis=0)
        ranks = np.arange(layout.world_size).reshape(shape)
        inside = tuple(a - 1 for a in axes)
        outside = tuple(a for a in range(len(shape)) if a not in inside)
        rows = (
            layout.pipeline if 0 not in inside else layout.replicate * layout.shard if inside == (0,) else 1
        )
        members = int(np.prod([shape[a] for a in inside]))
        return Groups(least.reshape(rows, -1), ranks.transpose(*outside, *inside).reshape(rows, -1, members))

    def members(self, dimension: str) -> int:
        """Ranks per group."""
        return int(self.groups(dimension).ranks.shape[2])


def steady_steps(found: Mapping[int, RankStages], warm_up: int) -> NDArray[np.float64] | None:
    """Steps x ranks x STAGES of a generation without its first `warm_up` steps; None if the ranks have no step in common.

    `found`: rank -> its record (`record.stages.read_generation`). Runs of one size can be joined along the steps.
    """
    ranks = [found[rank] for rank in sorted(found)]
    if not ranks or any(each.ranks != len(ranks) for each in ranks):
        return None
    common = reduce(np.intersect1d, (each.steps for each in ranks))
    common = common[common >= max(each.first_step for each in ranks) + warm_up]
    if not common.size:
        return None
    return np.stack([each.seconds[np.searchsorted(each.steps, common)] for each in ranks], axis=1)


def lower_median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Median along the last axis; of an even number the lower of the two in the middle, so that one of two can stand out."""
    return np.asarray(np.quantile(values, 0.5, axis=-1, method="lower", keepdims=True))
