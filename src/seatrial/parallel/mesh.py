"""The process groups of one rank, one for each dimension of the layout that is larger than 1."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from seatrial.hardware.accelerator import is_accelerator
from seatrial.job.layout import Coordinates, Layout


@dataclass(frozen=True)
class Mesh:
    """This rank's coordinates and process groups. A group is None where its dimension has size 1."""

    layout: Layout
    rank: int
    at: Coordinates
    device: torch.device
    tensor: ProcessGroup | None
    pipeline: ProcessGroup | None
    shard: ProcessGroup | None
    replicate: ProcessGroup | None
    ends: ProcessGroup | None  # first and last pipeline rank of this column, which share a tied embedding
    context: ProcessGroup | None = None  # neighbours within `shard`
    expert: ProcessGroup | None = None  # neighbours within `shard`, which hold different experts
    expert_shard: ProcessGroup | None = None  # ranks of `shard` that hold parts of the same experts
    stage: ProcessGroup | None = None  # tensor x shard x replicate, in the order of ranks; see `build_mesh`

    @property
    def data_rank(self) -> int:
        """Index of the part of the global batch that this rank works on."""
        return self.at.replicate * self.layout.sample_shards + self.at.shard // self.layout.context

    @property
    def context_rank(self) -> int:
        """Index of the part of each sequence that this rank works on."""
        return self.at.shard % self.layout.context

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum `values` over all ranks in place; every rank gets the same bits.

        On gloo one dimension after the other: groups of two or four are far faster than one of eight. NCCL may use
        another algorithm in each group, and the last bit could differ between ranks: there a single group is used.
        """
        if is_accelerator(self.device):
            if self.layout.world_size > 1:
                dist.all_reduce(values)
            return values
        for group in (self.tensor, self.shard, self.replicate, self.pipeline):
            if group is not None:
                dist.all_reduce(values, group=group)
        return values

    def data_mesh(self, timeout: timedelta) -> DeviceMesh:
        """The mesh for sharded data parallel: [shard], or [replicate, shard]."""
        return self._mesh(self.shard, range(self.layout.shard), timeout)

    def expert_mesh(self, timeout: timedelta) -> DeviceMesh:
        """The same for the experts under expert parallel: over the ranks that hold parts of the same ones."""
        size = self.layout.expert
        return self._mesh(self.expert_shard, range(self.at.shard % size, self.layout.shard, size), timeout)

    def _mesh(self, shard: ProcessGroup | None, members: range, timeout: timedelta) -> DeviceMesh:
        kind = self.device.type
        shard = shard or _group([self.rank], timeout)
        if self.replicate is None:
            return DeviceMesh.from_group(shard, kind, mesh_dim_names=("shard",))
        ranks = [[self._rank(replicate=r, shard=s) for s in members] for r in range(self.layout.replicate)]
        return DeviceMesh.from_group(
            [self.replicate, shard],
            kind,
            mesh=torch.tensor(ranks, dtype=torch.int),
            mesh_dim_names=("replicate", "shard"),
        )

    def _rank(self, *, replicate: int, shard: int) -> int:
        at = self.at
        return self.layout.rank(Coordinates(at.pipeline, replicate, shard, at.tensor))


def _group(ranks: list[int], timeout: timedelta) -> ProcessGroup:
    # With local synchronisation only the members take part, so that 128 ranks do not wait for each other once for
    # every group. The timeout must be given to each group: torch's default for a new one is 30 minutes, regardless of
    # init_process_group's.
    group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, ProcessGroup)
    return group


def build_mesh(layout: Layout, device: torch.device, timeout: timedelta, *, with_stage: bool = False) -> Mesh:
    """Create the groups of this rank. Call it once in every rank, after init_process_group.

    `with_stage`: also one of all ranks with the same pipeline stages; if that is one of the others, it is not created again.
    """
    rank = dist.get_rank()
    if dist.get_world_size() != layout.world_size:
        raise ValueError(
            f"the layout {layout} has {layout.world_size} ranks, the world {dist.get_world_size()}"
        )
    at = layout.coordinates(rank)

    def along(dimension: str, size: int) -> list[int]:
        values = {"pipeline": at.pipeline, "replicate": at.replicate, "shard": at.shard, "tensor": at.tensor}
        return [layout.rank(Coordinates(**{**values, dimension: i})) for i in range(size)]

    groups: dict[str, ProcessGroup | None] = {}
    for dimension in ("tensor", "shard", "replicate", "pipeline"):
        size = getattr(layout, dimension)
        groups[dimension] = _group(along(dimension, size), timeout) if size > 1 else None

    column = along("shard", layout.shard)

    def neighbours(size: int) -> ProcessGroup | None:
        begin = at.shard - at.shard % size
        return _group(column[begin : begin + size], timeout) if size > 1 else None

    context, expert, expert_shard = neighbours(layout.context), neighbours(layout.expert), None
    if 1 < layout.expert < layout.shard:
        expert_shard = _group(column[at.shard % layout.expert :: layout.expert], timeout)
    ends = None
    if layout.pipeline == 2:
        ends = groups["pipeline"]
    elif layout.pipeline > 2 and at.pipeline in (0, layout.pipeline - 1):
        stages = along("pipeline", layout.pipeline)
        ends = _group([stages[0], stages[-1]], timeout)
    stage = None
    size = layout.world_size // layout.pipeline
    if with_stage and size > 1:
        same = (groups[d] for d in ("tensor", "shard", "replicate") if getattr(layout, d) == size)
        first = at.pipeline * size
        stage = next(same, None) or _group(list(range(first, first + size)), timeout)
    groups |= {
        "ends": ends,
        "context": context,
        "expert": expert,
        "expert_shard": expert_shard,
        "stage": stage,
    }
    return Mesh(layout=layout, rank=rank, at=at, device=device, **groups)
