"""State that outlives a generation: kept in a process for the next one, or broadcast by a replica.

Only a rank that stopped between two updates may carry its state over. An interrupted update, or one with the result of
a failed collective, leaves inconsistent weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.checkpoint.memory import layout_key
from seatrial.parallel.build import ParallelModel
from seatrial.train.checkpointing import state
from seatrial.train.optimizer import ShardedOptimizer

_BUCKET_BYTES = 1 << 28  # sent in one broadcast: large enough for speed, small compared to the state


@dataclass(frozen=True)
class Carried:
    """This rank's tensors, by their snapshot keys. References no process group."""

    rank: int
    layout: str  # `layout_key`
    lasting: dict[str, Tensor]  # the trained tensors themselves, not copies
    random: dict[str, Tensor]


def carry(model: ParallelModel, optimizer: ShardedOptimizer) -> Carried:
    """The tensors of a model whose process groups are about to be torn down. Copies only the random state."""
    return Carried(
        model.mesh.rank,
        layout_key(model.mesh.layout.as_dict()),
        {piece.key: piece.tensor.detach() for piece in state.lasting_pieces(model, optimizer)},
        {piece.key: piece.tensor for piece in state.random_pieces(model.mesh.rank, model.mesh.device)},
    )


@torch.no_grad()
def restore_carried(carried: Carried, model: ParallelModel, optimizer: ShardedOptimizer) -> None:
    """Copy carried state into a new model of the same rank and layout, bit for bit; ValueError for another one."""
    own = (model.mesh.rank, layout_key(model.mesh.layout.as_dict()))
    if own != (carried.rank, carried.layout):
        raise ValueError(
            f"rank {own[0]} of {own[1]} cannot use the state of rank {carried.rank} of {carried.layout}"
        )
    pieces = {piece.key: piece.tensor for piece in state.lasting_pieces(model, optimizer)}
    if {k: t.shape for k, t in pieces.items()} != {k: t.shape for k, t in carried.lasting.items()}:
        raise ValueError("the new model has other tensors than the carried state")
    for key, values in carried.lasting.items():
        pieces[key].copy_(values)
    optimizer.set_step(int(carried.lasting[state.UPDATES]))
    state.set_random_state(carried.random, carried.rank, model.mesh.device)


@torch.no_grad()
def broadcast_state(
    model: ParallelModel, optimizer: ShardedOptimizer, group: dist.ProcessGroup, source: int
) -> None:
    """Broadcast the state of group rank `source` to all ranks of `group`, its replicas; all of them call it.

    `group` is `mesh.replicate`: its ranks have the same boxes. Afterwards weights, moments and the update count are
    bit-identical. The random state is not sent: it differs between ranks, and a rank that lost it restarts from its
    seed (`train.seed` + rank). Training does not draw from it.
    """
    # Sorted by key: replicas may have built their lists in another order.
    pieces = sorted(state.lasting_pieces(model, optimizer), key=lambda p: (str(p.tensor.dtype), p.key))
    sends = dist.get_rank(group) == source
    for bucket in _buckets([piece.tensor for piece in pieces]):
        if sends:
            flat = torch.cat([values.reshape(-1) for values in bucket])
        else:
            flat = torch.empty(sum(v.numel() for v in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        dist.broadcast(flat, group=group, group_src=source)
        if not sends:
            for values, part in zip(bucket, flat.split([v.numel() for v in bucket]), strict=True):
                values.copy_(part.view_as(values))
    optimizer.set_step(int(state.updates(optimizer)))


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Group the tensors into buckets of one dtype and at most `_BUCKET_BYTES`, or of one tensor."""
    bucket: list[Tensor] = []
    size = 0
    for values in tensors:
        if bucket and (values.dtype != bucket[0].dtype or size + values.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(values)
        size += values.nbytes
    if bucket:
        yield bucket
