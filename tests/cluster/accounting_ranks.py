"""Trains small jobs with delays planted in one rank, and leaves the run folders of their stages.

    python accounting_ranks.py CASES.json OUT_FOLDER

A case is {"name", "layout", "tied", "delay": null or "data" | "forward" | "backward" | "collective", "recorded", "steps"}.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from typing import Any

import parity_ranks
from parity_ranks import SEQUENCES, NoisyWeights, batch
from torch._C._distributed_c10d import Work

from seatrial.base.batches import BatchSizes
from seatrial.data.loader import Batch
from seatrial.job import loss_rows
from seatrial.parallel.mesh import Mesh
from seatrial.train.loop import Loop
from seatrial.train.optimizer import build_optimizer
from seatrial.train.records import into_file

STEPS = 18
# However long the delay is, a stage's own work differs from step to step by up to 0.05 s on a slow machine, all of a step's
# waiting for collectives by up to 0.15, and the median of a stage that is not delayed by up to 0.27.
DELAY_S = {"data": 1.6, "forward": 1.6, "backward": 1.6, "collective": 2.0}
SLOW_RANK = 1
IN_STEP = (
    4  # the delayed collective: at a step's first one a rank waits for the other, which would hide some of it
)
# The usual size: with the small parts of other tests the last stage waits so long that it hides half of a delay of the first.
LOGITS = loss_rows.LOGITS


def is_delayed(step: int) -> bool:
    return step > 4 and step % 2 == 0


class Batches:
    """The batches of `parity_ranks`; `step` is the one that was asked for last."""

    masked = False
    batches = BatchSizes.of(SEQUENCES)

    def __init__(self) -> None:
        self.step = 0
        self.before: Any = lambda: None

    def samples(self, step: int) -> tuple[int, int]:
        return self.batches.samples(step)

    def batch(self, step: int, first: int, count: int) -> Batch:
        self.step = step
        self.before()
        rows = batch(step)[first : first + count]
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None)


def work(case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    loss_rows.LOGITS = LOGITS
    steps = case.get("steps", STEPS)
    job, folder = parity_ranks.job_and_folder(case, mesh, f"train.steps={steps}", "optimizer.warmup_steps=2")
    model = parity_ranks.build(case, mesh, NoisyWeights(parity_ranks.arch_of(case), seed=1))
    optimizer = build_optimizer(model.shards, job.optimizer)
    batches = Batches()
    loop = Loop(job, folder, into_file(folder, 1, mesh.rank), model, optimizer, batches)  # type: ignore[arg-type]
    if not case.get("recorded", True):
        loop._accounting._blocked.install = lambda: None  # type: ignore[method-assign]
        loop._accounting._clock.start = lambda: None  # type: ignore[method-assign]
    if mesh.rank == SLOW_RANK:
        plant(case.get("delay"), loop, batches)
    loop.run(1)
    return {"weights": [(s.name, s.box.offsets, s.local.clone()) for s in model.shards]}


def plant(what: str | None, loop: Loop, batches: Batches) -> None:
    """Delay this rank once in each delayed step."""
    last = [0]

    def delay(*_: Any) -> None:
        if is_delayed(batches.step) and last[0] != batches.step:
            last[0] = batches.step
            time.sleep(DELAY_S[str(what)])

    if what == "data":
        batches.before = delay
    elif what == "forward":
        loop.model.stages[0].blocks[0].mlp.register_forward_pre_hook(delay)
    elif what == "backward":
        loop.model.stages[0].blocks[0].mlp.register_full_backward_pre_hook(delay)
    elif what == "collective":
        wait, waits = Work.wait, Counter[int]()

        def slow(work: Work, *args: Any) -> Any:
            waits[batches.step] += 1
            if waits[batches.step] == IN_STEP:
                delay()
            return wait(work, *args)

        Work.wait = slow  # type: ignore[method-assign]
    elif what is not None:
        raise ValueError(what)


if __name__ == "__main__":
    with contextlib.suppress(
        PermissionError
    ):  # where it is allowed, tests beside this one do not disturb its timings
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    sys.exit(parity_ranks.main(work))
