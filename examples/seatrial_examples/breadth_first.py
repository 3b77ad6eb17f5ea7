"""A pipeline schedule: breadth-first (arXiv:2211.05953), which torch has and Seatrial has not.

All microbatches pass a stage before any passes the rank's next one. `schedule = "breadth-first"` in [parallel].
"""

from __future__ import annotations

from seatrial.job.schedules import Pass, PipelineSchedule


class BreadthFirst(PipelineSchedule):
    def order(self, ranks: int, per_rank: int, microbatches: int, rank: int) -> list[Pass]:
        stages = range(rank, ranks * per_rank, ranks)
        forward = [Pass("F", stage, i) for stage in stages for i in range(microbatches)]
        return forward + [Pass("B", p.stage, p.microbatch) for p in reversed(forward)]


BREADTH_FIRST = BreadthFirst(
    name="breadth-first",
    torch_class="torch.distributed.pipelining.schedules:ScheduleLoopedBFS",
    several_stages=True,
)
