"""How often torch's pipeline all-gathers a stage's weights in a step, with more than three stages a rank.

The schedule is lowered with at most three stages gathered at a time (`max_active_stages` of `_add_unshard_reshard`,
torch/distributed/pipelining/schedules.py): before each pass the next three stages to compute are gathered, and any
other is freed, whatever `reshard_after_forward` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from seatrial.job.schedules import schedule_named

# torch's default; our trainer does not change it.
ACTIVE_STAGES = 3


@cache
def unshards(schedule: str, ranks: int, per_rank: int, microbatches: int, rank: int) -> tuple[float, ...]:
    """Gathers of each of the rank's stages in a step, in the order of its stages. 1 each for up to three of them."""
    if ranks == 1 or per_rank <= ACTIVE_STAGES:
        return (1.0,) * per_rank
    # In steady state a schedule repeats every `ranks` microbatches: two short ones determine any longer one.
    first, second = 4 * ranks, 5 * ranks
    if microbatches <= second:
        return _counted(schedule, ranks, per_rank, microbatches, rank)
    a = _counted(schedule, ranks, per_rank, first, rank)
    b = _counted(schedule, ranks, per_rank, second, rank)
    times = (microbatches - first) / ranks
    return tuple(x + (y - x) * times for x, y in zip(a, b, strict=True))


@cache
def _counted(schedule: str, ranks: int, per_rank: int, microbatches: int, rank: int) -> tuple[float, ...]:
    stages = [p.stage for p in schedule_named(schedule).order(ranks, per_rank, microbatches, rank)]
    active: set[int] = set()
    counts = dict.fromkeys(range(rank, ranks * per_rank, ranks), 0)
    for wanted in _next(stages):
        for stage in wanted:
            if stage not in active:
                counts[stage] += 1
        active = set(wanted)
    return tuple(float(n) for n in counts.values())


def _next(stages: Sequence[int]) -> list[tuple[int, ...]]:
    """For each pass the next distinct stages, its own first."""
    ahead: list[tuple[int, ...]] = []
    wanted: tuple[int, ...] = ()
    for stage in reversed(stages):
        wanted = (stage, *(s for s in wanted if s != stage))[:ACTIVE_STAGES]
        ahead.append(wanted)
    return ahead[::-1]
