"""The number of ranks and the part of the work that each one has. Arithmetic only.

Ranks are numbered with tensor parallel innermost, so that a tensor-parallel group is neighbouring ranks of one
node, then sharded data parallel, then replicated data parallel, and pipeline outermost:

    rank = ((pipeline * replicate_size + replicate) * shard_size + shard) * tensor_size + tensor

Context parallel divides the ranks of `shard` into groups of neighbours: weights and optimizer state are sharded over all
of them, and those of a group see the same samples, each its positions.

Expert parallel divides them likewise: the ranks of a group hold different experts of a layer, each all those of its rank
within the group, sharded over the ranks with the same ones in other groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from seatrial.job.schedules import schedule_named


@dataclass(frozen=True)
class Coordinates:
    """The position of one rank in the mesh."""

    pipeline: int
    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh dimensions. The product of the first four is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1  # ranks that states are sharded over: parallel.shard x parallel.context of the job file
    tensor: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    context: int = 1  # ranks of `shard` that split each sequence
    expert: int = 1  # ranks of `shard` among which each layer's experts are divided

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Layout:
        """The inverse of `as_dict`; other keys are ignored. Older versions had no `context` and no `expert`."""
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})

    @property
    def world_size(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.tensor

    @property
    def splits_backward(self) -> bool:
        """Whether a pipeline computes the gradients of weights apart from those of their inputs."""
        return self.pipeline > 1 and schedule_named(self.schedule).split_backward

    @property
    def data_parallel(self) -> int:
        """Number of ranks, or groups of `context` ranks, that see different samples."""
        return self.replicate * self.sample_shards

    @property
    def sample_shards(self) -> int:
        """The job file's parallel.shard: `shard` without context parallel."""
        return self.shard // self.context

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pipeline * self.stages_per_rank

    def coordinates(self, rank: int) -> Coordinates:
        """The position of `rank` in the mesh."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Coordinates(pipeline, replicate, shard, tensor)

    def rank(self, at: Coordinates) -> int:
        """The inverse of `coordinates`."""
        rest = at.pipeline * self.replicate + at.replicate
        return (rest * self.shard + at.shard) * self.tensor + at.tensor

    def first_replica(self, rank: int) -> int:
        """The lowest of `replicas`: the same for all of them."""
        return self.rank(replace(self.coordinates(rank), replicate=0))

    def replicas(self, rank: int) -> list[int]:
        """The ranks with the same weights and optimizer state as `rank`, itself first."""
        at = self.coordinates(rank)
        all_ = (self.rank(replace(at, replicate=n)) for n in range(self.replicate))
        return sorted(all_, key=lambda other: other != rank)

    def survives_a_node(self, ranks_per_node: int) -> bool:
        """Whether every rank has a replica on another node, with ranks assigned to nodes in order."""
        # The distance of rank 0 and its last replica, which is the same for every rank of the first replica.
        return (self.replicate - 1) * self.shard * self.tensor >= ranks_per_node

    def stage_indices(self, pipeline_rank: int) -> list[int]:
        """The stages that one pipeline rank holds: r, r + pp, r + 2 pp, ... (a loop, as interleaved 1F1B needs)."""
        return [pipeline_rank + i * self.pipeline for i in range(self.stages_per_rank)]

    def stage_layers(self, stage: int, layers: int) -> range:
        """The decoder layers of `stage`."""
        counts = self.layer_counts(layers)
        start = sum(counts[:stage])
        return range(start, start + counts[stage])

    def layer_counts(self, layers: int) -> tuple[int, ...]:
        """How many decoder layers each stage has."""
        return _layer_counts(self.stages, layers)

    def rank_layers(self, pipeline_rank: int, layers: int) -> tuple[int, ...]:
        """How many decoder layers each stage of one pipeline rank has."""
        return self.layer_counts(layers)[pipeline_rank :: self.pipeline]

    def expert_shard(self, shard: int) -> int:
        """Which of the `shard` parts of each layer's experts rank `shard` holds; its own number without expert parallel."""
        group, within = divmod(shard, self.expert)
        return within * (self.shard // self.expert) + group

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for plan.json."""
        return {**vars(self), "world_size": self.world_size}

    def __str__(self) -> str:
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        if self.context > 1:
            parts.append(f"context {self.context}")
        parts.append(f"shard {self.sample_shards}")
        if self.expert > 1:
            parts[-1] += f" (expert {self.expert})"
        if self.replicate > 1:
            parts.append(f"replicate {self.replicate}")
        text = " x ".join(parts)
        if self.pipeline > 1:
            text += f", {self.schedule}"
            if self.stages_per_rank > 1:
                text += f" with {self.stages_per_rank} stages a rank"
        return text


@cache
def _layer_counts(stages: int, layers: int) -> tuple[int, ...]:
    """Layers of each stage: as even as possible, the larger parts in the middle of the pipeline.

    The first stage also holds the embedding and the last one the output head, so where layers cannot be divided evenly
    the spare ones go to the stages between them.
    """
    base, spare = divmod(layers, stages)
    order = sorted(range(stages), key=lambda s: (s in (0, stages - 1), s == stages - 1, s))
    larger = set(order[:spare])
    return tuple(base + (s in larger) for s in range(stages))
