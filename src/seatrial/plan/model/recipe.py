"""Training configuration of a model: layout, batch, precision, sharding, activation checkpointing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from seatrial.hardware.catalogue import AttentionKernel, Precision
from seatrial.job.architecture import Architecture
from seatrial.job.job import Job
from seatrial.job.layout import Layout
from seatrial.job.optimizers import ADAMW
from seatrial.job.ring import NEVER, RingRule
from seatrial.job.schema import Accumulate

Sharding = Literal["none", "optimizer", "gradients", "full"]
"""Data-parallel sharding: none; optimizer state (ZeRO-1); also gradients (ZeRO-2); also weights (ZeRO-3, FSDP)."""

Recompute = Literal["none", "attention", "operators", "alternate", "selective", "full"]
"""What the backward pass recomputes: nothing; the attention core (arXiv:2205.05198); cheap operators and half of the
matrix products (torchtitan's per-operator choice); every second layer; cheap operators (ours, `parallel/recompute.py`);
every layer."""


@dataclass(frozen=True)
class Recipe:
    """A layout and the settings that it leaves open; units: sequences, tokens. Rank order: tensor, context, shard.

    `layout` is without context parallel: its `shard` is the job file's.
    """

    sequence: int
    global_batch: int
    microbatch: int = 1
    layout: Layout = field(default_factory=Layout)
    context: int = 1
    ring: RingRule = NEVER  # our trainer: where keys and values are not gathered
    optimizer: str = ADAMW.name
    precision: Precision = "bf16"
    attention: AttentionKernel = "auto"  # our trainer
    sharding: Sharding = "full"
    reshard: bool = True  # full sharding: gather weights again for the backward pass
    recompute: Recompute = "none"
    recompute_every: int = 1  # ours: of the layers of a stage, only the first and every n-th after it
    # Our trainer: inputs of fully recomputed layers are in host memory (`parallel/offload.py`).
    offload: bool = False
    sequence_parallel: bool = True
    compiled: bool = False
    # Our trainer: overlaps all-gathers and reduce-scatters with matrix products (`overlap.py`).
    async_tensor: bool = False
    # Our trainer, full sharding: "sharded" reduces gradients in every microbatch.
    accumulate: Accumulate = "whole"

    @classmethod
    def of(cls, job: Job) -> Recipe:
        """The recipe of a job as our trainer runs it; `accumulate = "auto"` is "whole" here, see `plan.cost.accumulate`."""
        train = job.train
        return cls(
            sequence=train.sequence_length,
            global_batch=train.global_batch,
            microbatch=train.microbatch,
            layout=replace(job.layout, shard=job.layout.sample_shards, context=1),
            context=job.layout.context,
            ring=job.ring_rule,
            optimizer=job.optimizer.name,
            precision=train.precision,
            attention=train.attention,
            reshard=job.parallel.reshards,
            recompute=train.activation_checkpointing,
            recompute_every=train.recompute_every_layers,
            offload=train.offload_activations,
            compiled=job.compiles(job.cluster.device),
            async_tensor=job.parallel.async_tensor,
            accumulate="sharded" if train.accumulate == "sharded" else "whole",
        )

    @property
    def job_layout(self) -> Layout:
        """The layout of a job with this recipe: with context parallel."""
        return replace(self.layout, shard=self.shard_ranks, context=self.context)

    @property
    def parallel(self) -> dict[str, Any]:
        """Its keys of [parallel] in a job file."""
        settings = {
            "reshard_after_forward": self.reshard,
            "async_tensor": self.async_tensor,
            "ring_attention": self.rings if self.context > 1 else None,
        }
        return {**vars(self.layout), "context": self.context, **settings}

    @property
    def train(self) -> dict[str, Any]:
        """Its keys of [train] in a job file, of those that a search chooses."""
        none = self.activation_checkpointing == "none"
        return {
            "microbatch": self.microbatch,
            "activation_checkpointing": self.activation_checkpointing,
            "recompute_every_layers": 1 if none else self.recompute_every,
            "offload_activations": self.offloads,
            "accumulate": self.accumulate,
        }

    @property
    def activation_checkpointing(self) -> str:
        """The value of that key of [train]: our trainer's kind of recomputation."""
        return self.recompute if self.recompute in ("selective", "full") else "none"

    @property
    def recomputation(self) -> str:
        """In words: "full recomputation in 1 of 2 layers"."""
        some = f" in 1 of {self.recompute_every} layers" if self.recompute_every > 1 else ""
        if self.recompute == "none":
            return "no recomputation"
        behind = ", inputs in host memory" if self.offloads else ""
        return f"{self.recompute} recomputation{some}{behind}"

    @property
    def offloads(self) -> bool:
        """Whether inputs of layers are in host memory: of those that are recomputed, all but a stage's last."""
        return self.offload and self.recompute == "full"

    def recomputed_of(self, counts: Sequence[int]) -> int:
        """How many layers are recomputed of stages with `counts` layers."""
        if self.recompute == "none":
            return 0
        return (
            sum(counts) if self.recompute_every == 1 else sum(-(-n // self.recompute_every) for n in counts)
        )

    @property
    def rings(self) -> bool:
        """Whether keys and values go around a ring of the context-parallel ranks."""
        return self.ring.holds(self.sequence, self.layout.tensor, self.context)

    @property
    def width(self) -> int:
        """Bytes of a value outside fp8 GEMMs."""
        return 4 if self.precision == "fp32" else 2

    @property
    def world(self) -> int:
        return self.layout.world_size * self.context

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that states are sharded over, context-parallel ones included."""
        return self.layout.shard * self.context

    @property
    def microbatches(self) -> int:
        """Microbatches per step and data-parallel rank; at least one."""
        return max(1, round(self.global_batch / (self.layout.data_parallel * self.microbatch)))

    @property
    def tokens(self) -> int:
        """Tokens of one microbatch on one context-parallel rank."""
        return self.microbatch * self.sequence // self.context


class LayerKind(NamedTuple):
    """Layers of one kind on a pipeline rank."""

    model: Architecture  # all of whose layers are of this kind
    layers: int
    recomputed: int  # of these


def layer_kinds(model: Architecture, recipe: Recipe, rank: int) -> tuple[LayerKind, ...]:
    """The layers of a pipeline rank: those with experts, if the model has any, then the first stage's without."""
    counts = recipe.layout.rank_layers(rank, model.num_hidden_layers)
    layers, recomputed = sum(counts), recipe.recomputed_of(counts)
    dense = model.first_k_dense_replace if rank == 0 else 0
    if not dense:
        return (LayerKind(model, layers, recomputed),)
    first = recipe.recomputed_of((dense,))
    return LayerKind(model, layers - dense, recomputed - first), LayerKind(model.dense, dense, first)
