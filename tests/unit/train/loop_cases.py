"""A small run under a supervisor, in one process, with faults that a test plants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rank_cases import ARCH, SETTINGS, mesh
from torch import Tensor

from seatrial.base.batches import BatchSizes
from seatrial.data.loader import Batch
from seatrial.hardware import accelerator
from seatrial.job import Job, job_from_text, preset_text
from seatrial.job.architecture import Architecture
from seatrial.model.initialise import RandomWeights
from seatrial.parallel.build import ParallelModel
from seatrial.parallel.mesh import Mesh
from seatrial.record.folder import RunFolder
from seatrial.record.messages import Leaving
from seatrial.train.loop import Loop
from seatrial.train.optimizer import ShardedOptimizer, build_optimizer
from seatrial.train.records import into_file
from seatrial.train.validation import ValidationSet

BATCH, LENGTH = 4, 16


def make_job(folder: Path, *overrides: str) -> Job:
    return job_from_text(
        preset_text("first-voyage"),
        name="run",
        base_folder=folder,
        overrides=(
            *("cluster.nodes=1", "cluster.gpus_per_node=1"),
            *("parallel.tensor=1", "parallel.pipeline=1", "parallel.shard=1"),
            *("train.steps=8", f"train.global_batch={BATCH}", "train.microbatch=2"),
            *(f"train.sequence_length={LENGTH}", "optimizer.warmup_steps=3", "checkpoint.every_steps=100"),
            *("resilience.verify_every_steps=2", "resilience.snapshot_every_steps=3"),
            *overrides,
        ),
    )


class Batches:
    """Data that the step's number determines; each row counts up from a start of its own."""

    masked = False
    batches = BatchSizes.of(BATCH)

    def samples(self, step: int) -> tuple[int, int]:
        return self.batches.samples(step)

    def batch(self, step: int, first: int, count: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(0, ARCH.vocab_size, (BATCH, 1), generator=generator)
        rows = ((start + torch.arange(LENGTH + 1)) % ARCH.vocab_size)[first : first + count]
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None)


class ValidationBatches(Batches):
    """Others, in two batches."""

    sequence_length = LENGTH

    def batch(self, step: int, first: int, count: int) -> Batch:
        return super().batch(1000 + step, first, count)


@dataclass
class Watcher:
    """A supervisor that remembers, and leave_request what it is told to want."""

    leave: dict[int, Leaving] = field(default_factory=dict)  # number of the question -> answer
    beats: list[tuple[int, bool]] = field(default_factory=list)
    findings: list[tuple[str, int, dict[str, Any], list[int]]] = field(default_factory=list)
    validated: list[tuple[int, int]] = field(default_factory=list)
    asked: int = 0

    def leave_request(self) -> Leaving | None:
        self.asked += 1
        return self.leave.get(self.asked)

    def beat(self, step: int, seconds: float, first: bool) -> None:
        self.beats.append((step, first))

    def validating(self, step: int, batch: int) -> None:
        self.validated.append((step, batch))

    def finding(
        self, signal: str, step: int, message: str, data: dict[str, Any], blamed: Sequence[int]
    ) -> None:
        self.findings.append((signal, step, data, list(blamed)))


@torch.no_grad()
def tensors(model: ParallelModel, optimizer: ShardedOptimizer) -> list[Tensor]:
    """Everything that must be equal to the last bit."""
    own = [s.local for s in model.shards] + [values for _, _, values in optimizer.state()]
    return own + optimizer.counts()


class Copies:
    """Snapshots that hold on to clones, and the way back to the newest."""

    def __init__(self, model: ParallelModel, optimizer: ShardedOptimizer, every: int = 3) -> None:
        self.model, self.optimizer, self.every = model, optimizer, every
        self.busy = False
        self.taken: dict[int, list[Tensor]] = {}
        self.after_take: Callable[[int], None] = lambda step: None

    @property
    def rollback_bound(self) -> int | None:
        return max(self.taken, default=None)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def take(self, step: int) -> bool:
        self.taken[step] = [t.clone() for t in tensors(self.model, self.optimizer)]
        self.after_take(step)
        return True

    def back(self) -> int | None:
        if not self.taken:
            return None
        step = max(self.taken)
        with torch.no_grad():
            for own, kept in zip(tensors(self.model, self.optimizer), self.taken[step], strict=True):
                own.copy_(kept)
        return step


class Run:
    """One rank's loop, and what came of it."""

    def __init__(
        self,
        root: Path,
        *overrides: str,
        watched: bool = True,
        copies: bool = False,
        keeping: Callable[[ParallelModel, ShardedOptimizer], Any] = Copies,
        late: bool = False,
        validates: bool = False,
        generation: int = 1,
        place: Mesh | None = None,
        leave: dict[int, Leaving] | None = None,
        arch: Architecture = ARCH,
    ) -> None:
        """`late`: on the test device, which must be installed: results are read a step late, as on a GPU."""
        self.folder = RunFolder(root)
        self.folder.checkpoints.mkdir(parents=True, exist_ok=True)
        self.folder.control.mkdir(exist_ok=True)
        self.folder.generation_file.write_text(str(generation))
        place = place or mesh(device=accelerator.claim("cuda", 0) if late else None)
        job = make_job(root, *overrides)
        self.model = ParallelModel(arch, place, SETTINGS, RandomWeights(arch, 0))
        self.optimizer = build_optimizer(self.model.shards, job.optimizer, place)
        self.watcher = Watcher(leave or {})
        self.copies = keeping(self.model, self.optimizer)
        batches = Batches()
        self.loop = Loop(
            job,
            self.folder,
            into_file(self.folder, generation, place.rank),
            self.model,
            self.optimizer,
            batches,  # type: ignore[arg-type]
            supervisor=self.watcher if watched else None,
            snapshots=self.copies if copies else None,
            rollback=self.copies.back if copies else None,
            validation=ValidationSet(ValidationBatches(), 2 * BATCH - 1) if validates else None,  # type: ignore[arg-type]
        )
        self.passes: list[int] = []  # the steps that were begun, in order
        start = self.loop._start

        def noting(step: int) -> None:
            self.passes.append(step)
            start(step)

        self.loop._start = noting  # type: ignore[method-assign]

    def spoil(self, step: int, times: int = 1, *, factor: float = float("nan")) -> None:
        """Multiply one gradient by `factor` after the backward pass of `step`, so many times."""
        forward_backward = self.model.forward_backward
        left = [times]

        def spoiled(*batch: Tensor | None) -> Tensor:
            loss = forward_backward(*batch)
            if self.passes[-1] == step and left[0]:
                left[0] -= 1
                grad = self.model.shards[0].grad
                assert grad is not None
                with torch.no_grad():
                    grad.mul_(factor)
            return loss

        self.model.forward_backward = spoiled  # type: ignore[method-assign]

    def wait_for_saves(self) -> None:
        """Let each checkpoint be complete before the next step begins."""
        saver = self.loop._saver
        begin = saver.begin

        def begin_and_wait(step: int) -> bool:
            begun = begin(step)
            saver._wait()
            return begun

        saver.begin = begin_and_wait  # type: ignore[method-assign]

    def train_one(self, step: int) -> None:
        """One step, and what is recorded of it."""
        self.loop._start(step)
        self.loop._read_results(leave=self.loop._max_in_flight)

    @torch.no_grad()
    def resume_from(self, other: Run) -> None:
        """Take the other's state."""
        mine, theirs = tensors(self.model, self.optimizer), tensors(other.model, other.optimizer)
        for own, kept in zip(mine, theirs, strict=True):
            own.copy_(kept)

    def state(self) -> list[Tensor]:
        return [t.clone() for t in tensors(self.model, self.optimizer)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@torch.no_grad()
def flip_bit(values: Tensor, bit: int = 3) -> None:
    values.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)
