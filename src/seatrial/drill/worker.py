"""The ordinary worker with planted faults: `seatrial.train.worker` with functions that fail once, as planned by a drill.

The environment variable SEATRIAL_DRILL names a JSON file: {"faults": [Planted, ...]}. Each fault fires once in a run,
however often ranks are restarted: only the process that creates its marker file fires it; that file records the time.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seatrial.checkpoint.staging import AsyncWriter
from seatrial.drill.injection import Injection, Planted
from seatrial.job import Job
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import Mesh
from seatrial.train import generation, worker
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedOptimizer

PLAN = "SEATRIAL_DRILL"

_MANTISSA_BIT = 20  # of 23: changes a weight by 1/8 of itself, which no range check would notice


@dataclass
class _Now:
    """This rank and its current step."""

    rank: int = -1
    step: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Train as one rank, like `seatrial.train.worker`, with the planted faults."""
    plan = os.environ.get(PLAN)
    if plan is not None:
        faults = json.loads(Path(plan).read_text(encoding="utf-8"))["faults"]
        plant([Planted(**fault) for fault in faults])
    return worker.main(argv)


def plant(faults: Sequence[Planted]) -> None:
    """Wrap the functions of this process in which `faults` occur."""
    now = _Now()
    _around(Loop, "_start", partial(_noting, now=now))
    for fault in faults:
        owner, name, wrapper = _SEAMS[fault.kind]
        _around(owner, name, partial(wrapper, fault=fault, now=now))


def _around(owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    setattr(owner, name, wrapper(getattr(owner, name)))  # AttributeError if the function no longer exists


def _noting(call: Any, *, now: _Now) -> Any:
    @wraps(call)
    def start(self: Loop, step: int, *more: Any, **keys: Any) -> Any:
        now.rank, now.step = self.model.mesh.rank, step
        return call(self, step, *more, **keys)

    return start


def _fires(fault: Planted, now: _Now, *, or_later: bool = False) -> bool:
    """Whether this is the rank and the step, for the first time in this run; then the marker file records when."""
    due = now.step >= fault.step if or_later else now.step == fault.step
    if now.rank != fault.rank or not due:
        return False
    fired = Injection(time.time(), fault.kind, fault.message, now.step, rank=fault.rank)
    try:
        fd = os.open(fault.marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with open(fd, "w", encoding="utf-8") as file:
        json.dump(vars(fired), file)
    return True


# -- faults of a rank


def _hangs(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def sum_over_ranks(self: Mesh, values: Tensor) -> Any:
        if _fires(fault, now):
            while True:  # the peers wait in the collective that this rank never enters
                signal.pause()
        return call(self, values)

    return sum_over_ranks


def _holds_the_gil(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def sum_over_ranks(self: Mesh, values: Tensor) -> Any:
        if _fires(fault, now):
            # A call through PyDLL keeps the GIL. Locking a mutex twice blocks forever, whatever signals arrive;
            # the first signal would end a sleep.
            library = ctypes.PyDLL(None)
            mutex = ctypes.create_string_buffer(64)
            library.pthread_mutex_lock(mutex)
            library.pthread_mutex_lock(mutex)
        return call(self, values)

    return sum_over_ranks


def _spoils_a_gradient(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def forward_backward(self: ParallelModel, *batch: Tensor | None) -> Any:
        loss = call(self, *batch)
        if _fires(fault, now):
            shard = next(s for s in self.shards if s.grad is not None and s.grad.numel() and s.counted)
            assert shard.grad is not None
            with torch.no_grad():
                shard.grad.flatten()[0] = float("nan")  # a view: the gradient is contiguous
        return loss

    return forward_backward


def _flips_at_rest(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def forward_backward(self: ParallelModel, *batch: Tensor | None) -> Any:
        if _fires(fault, now):
            flip_bit(next(s.local for s in self.shards if s.local.numel()))
        return call(self, *batch)

    return forward_backward


def _flips_in_update(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def update(self: ShardedOptimizer, *arguments: Any, **keys: Any) -> Any:
        result = call(self, *arguments, **keys)
        if _fires(fault, now):
            flip_bit(next(s.local for s in self._shards if s.local.numel()))
        return result

    return update


@torch.no_grad()
def flip_bit(values: Tensor) -> None:
    """Invert one mantissa bit of the largest of `values` (fp32), in place."""
    flat = values.view(-1)
    at = int(flat.abs().argmax())
    flat[at : at + 1].view(torch.int32).bitwise_xor_(1 << _MANTISSA_BIT)


def _has_no_space(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def order_part(self: AsyncWriter, *arguments: Any, **keys: Any) -> Any:
        if self.pid is not None:
            # RLIMIT_FSIZE 0: the kernel refuses every byte that the writer process writes to a file. Lifted next time.
            _, most = resource.prlimit(self.pid, resource.RLIMIT_FSIZE)
            limit = 0 if _fires(fault, now, or_later=True) else most
            resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, most))
        return call(self, *arguments, **keys)

    return order_part


def _dies(call: Any, *, fault: Planted, now: _Now) -> Any:
    @wraps(call)
    def order_part(self: AsyncWriter, *arguments: Any, **keys: Any) -> Any:
        call(self, *arguments, **keys)
        if _fires(fault, now, or_later=True):
            # Its checkpoint writer, which has just started, is killed with it.
            os.kill(os.getpid(), signal.SIGKILL)

    return order_part


def _ends_early(call: Any, *, fault: Planted, now: _Now) -> Any:
    """Not a shorter train.steps in the job file: a warm-up may be longer than that."""

    @wraps(call)
    def job_of(*arguments: Any) -> Job:
        job: Job = call(*arguments)
        train = job.file.train.model_copy(update={"steps": fault.step})
        return replace(job, file=job.file.model_copy(update={"train": train}))

    return job_of


# kind -> (owner, name, wrapper of the function). Narrow: the rest of the rank is the production code.
_SEAMS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "hang": (Mesh, "sum_over_ranks", _hangs),
    "gil": (Mesh, "sum_over_ranks", _holds_the_gil),
    "nan": (ParallelModel, "forward_backward", _spoils_a_gradient),
    "flip": (ParallelModel, "forward_backward", _flips_at_rest),
    "miscount": (ShardedOptimizer, "update", _flips_in_update),
    "enospc": (AsyncWriter, "order_part", _has_no_space),
    "die": (AsyncWriter, "order_part", _dies),
    "stop": (generation, "job_of", _ends_early),
}


if __name__ == "__main__":
    sys.exit(main())
