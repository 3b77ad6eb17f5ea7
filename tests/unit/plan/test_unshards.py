"""How often a stage is all-gathered, against torch's lowering of the same schedule."""

from __future__ import annotations

from collections import Counter

import pytest
from torch.distributed.pipelining.schedules import UNSHARD, _Action, _add_unshard_reshard, _ComputationType

from seatrial.job.schedules import schedule_named
from seatrial.plan.cost.unshard import ACTIVE_STAGES, unshards

_TYPES = {
    "F": _ComputationType.FORWARD,
    "B": _ComputationType.FULL_BACKWARD,
    "I": _ComputationType.BACKWARD_INPUT,
    "W": _ComputationType.BACKWARD_WEIGHT,
}


def by_torch(schedule: str, ranks: int, per_rank: int, microbatches: int, rank: int) -> tuple[float, ...]:
    passes = schedule_named(schedule).order(ranks, per_rank, microbatches, rank)
    lowered = _add_unshard_reshard([_Action(p.stage, _TYPES[p.kind], p.microbatch) for p in passes])
    counts = Counter(a.stage_index for a in lowered if a.computation_type == UNSHARD)
    return tuple(float(counts[s]) for s in range(rank, ranks * per_rank, ranks))


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "zero-bubble"])
@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 2), (2, 3), (2, 4), (4, 4), (3, 6), (8, 4)])
def test_gathers_match_torchs_lowered_schedule(schedule: str, ranks: int, per_rank: int) -> None:
    for microbatches in (ranks, 3 * ranks, 5 * ranks, 11 * ranks):
        for rank in {0, ranks // 2, ranks - 1}:
            ours = unshards(schedule, ranks, per_rank, microbatches, rank)
            assert ours == by_torch(schedule, ranks, per_rank, microbatches, rank), (microbatches, rank)
            assert (per_rank > ACTIVE_STAGES) or set(ours) == {1.0}


def test_one_stage_a_rank_or_no_pipeline() -> None:
    assert unshards("1f1b", 4, 1, 64, 0) == (1.0,)
    assert unshards("1f1b", 1, 1, 64, 0) == (1.0,)


def test_more_than_three_stages_need_more_gathers() -> None:
    few, many = unshards("interleaved-1f1b", 2, 3, 64, 0), unshards("interleaved-1f1b", 2, 4, 64, 0)
    assert sum(few) == 3
    assert sum(many) > 10 * sum(few)
