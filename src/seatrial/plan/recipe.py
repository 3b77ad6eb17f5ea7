"""How a model is trained: layout, batch, precision, what is sharded and what is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from seatrial.job.job import Job
from seatrial.job.layout import Layout

Sharding = Literal["none", "optimizer", "gradients", "full"]
"""What data parallel cuts: nothing; optimizer state (ZeRO-1); gradients too (ZeRO-2); weights too (ZeRO-3, FSDP)."""

Recompute = Literal["none", "attention", "operators", "alternate", "full"]
"""What the backward pass computes again: nothing; the attention core (arXiv:2205.05198); cheap operators and half of the
matrix products (torchtitan's per-operator choice); every second layer; every layer."""

Precision = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class Recipe:
    """Sizes of the mesh (rank order: tensor, context, shard, replicate, pipeline), and the rest. Sequences, tokens."""

    sequence: int
    global_batch: int
    microbatch: int = 1
    tensor: int = 1
    context: int = 1
    shard: int = 1
    replicate: int = 1
    pipeline: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    precision: Precision = "bf16"
    sharding: Sharding = "full"
    reshard: bool = True  # full sharding: gather weights anew for the backward pass
    recompute: Recompute = "none"
    sequence_parallel: bool = True
    compiled: bool = False
    async_tensor: bool = (
        False  # our trainer: gathers and scatters behind products, part by part (`overlap.py`)
    )

    @classmethod
    def of(cls, job: Job, layout: Layout | None = None) -> Recipe:
        """The recipe of a job as our trainer carries it out, under its own or another layout."""
        at, train = layout or job.layout, job.train
        return cls(
            sequence=train.sequence_length,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            tensor=at.tensor,
            shard=at.shard,
            replicate=at.replicate,
            pipeline=at.pipeline,
            stages_per_rank=at.stages_per_rank,
            schedule=at.schedule,
            precision=train.precision,
            reshard=job.parallel.reshards,
            recompute="full" if train.activation_checkpointing == "full" else "none",
            compiled=train.compile,
            async_tensor=job.parallel.async_tensor,
        )

    @property
    def world(self) -> int:
        return self.tensor * self.context * self.shard * self.replicate * self.pipeline

    @property
    def data_parallel(self) -> int:
        return self.shard * self.replicate

    @property
    def cut(self) -> int:
        """Ranks that share out states where they are sharded: context-parallel ranks hold the same weights too."""
        return self.shard * self.context

    @property
    def microbatches(self) -> int:
        """A step and data-parallel rank; at least one."""
        return max(1, round(self.global_batch / (self.data_parallel * self.microbatch)))

    @property
    def tokens(self) -> int:
        """Of one microbatch on one context-parallel rank."""
        return self.microbatch * self.sequence // self.context

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank

    def stage_layers(self, layers: int) -> tuple[int, ...]:
        """Layers of each stage, as our trainer cuts them."""
        return _stage_layers(self.pipeline, self.stages_per_rank, layers)


@cache
def _stage_layers(pipeline: int, stages_per_rank: int, layers: int) -> tuple[int, ...]:
    layout = Layout(pipeline=pipeline, stages_per_rank=stages_per_rank)
    return tuple(len(layout.stage_layers(s, layers)) for s in range(layout.stages))
