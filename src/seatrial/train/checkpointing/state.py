"""The state of a run that a checkpoint contains: weights, optimizer, random state and position in the data."""

from __future__ import annotations

import torch
from torch import Tensor

from seatrial.base.box import Box
from seatrial.checkpoint.manifest import Progress
from seatrial.checkpoint.read import CheckpointWeights
from seatrial.checkpoint.write import Piece
from seatrial.hardware import accelerator
from seatrial.parallel.build import ParallelModel
from seatrial.train.optimizer import ShardedOptimizer

UPDATES = "optimizer/updates"  # the optimizer's step count; skipped steps count too


def lasting_pieces(model: ParallelModel, optimizer: ShardedOptimizer) -> list[Piece]:
    """Every tensor of this rank that training updates in place; no copies.

    Includes boxes that other ranks own, with `owner` false. Keys are unique: a second tensor of one name (a tied
    embedding in two stages of one rank) gets another key.
    """
    seen: dict[str, int] = {}

    def key(kind: str, name: str) -> str:
        n = seen[f"{kind}/{name}"] = seen.get(f"{kind}/{name}", 0) + 1
        return f"{kind}/{name}" if n == 1 else f"{kind}/{name}#{n}"

    # The counted copy first, even if another rank owns it, so that replicas give their tensors the same keys.
    weights = sorted((s for s in model.shards if s.box.numel), key=lambda s: not s.counted)
    moments = sorted(optimizer.state(), key=lambda entry: not entry[1].counted)
    at = model.mesh.at
    tensors = [(key("model", s.name), s, s.local) for s in weights]
    tensors += [(key(kind, s.name), s, values) for kind, s, values in moments]
    pieces = [Piece(k, values, s.box, s.whole, s.owner, s.first) for k, s, values in tensors]
    first = (at.pipeline, at.shard, at.tensor) == (0, 0, 0)
    pieces.append(
        Piece(UPDATES, updates(optimizer), Box.whole((1,)), (1,), first and at.replicate == 0, first)
    )
    return pieces


def random_pieces(rank: int, device: torch.device) -> list[Piece]:
    """Copies of the random state of this process, `rank`."""
    state = {"rng/cpu": torch.get_rng_state()}
    if accelerator.is_accelerator(device):
        state[f"rng/{device.type}"] = accelerator.random_state(device)
    # Each rank's is a tensor of its own, so the key contains the rank.
    return [Piece(f"{k}/{rank}", v, Box.whole(v.shape), tuple(v.shape)) for k, v in state.items()]


def set_random_state(values: dict[str, Tensor], rank: int, device: torch.device) -> None:
    """Restore what `random_pieces` returned; a missing key leaves that generator unchanged."""
    if (cpu := values.get(f"rng/cpu/{rank}")) is not None:
        torch.set_rng_state(cpu)
    own = values.get(f"rng/{device.type}/{rank}")
    if own is not None and accelerator.is_accelerator(device):
        accelerator.set_random_state(own, device)


def updates(optimizer: ShardedOptimizer) -> Tensor:
    """The optimizer's own count of its updates, fp32 [1], sharing its memory."""
    return optimizer.counts()[0].view(1)


@torch.no_grad()
def restore(model: ParallelModel, optimizer: ShardedOptimizer, checkpoint: CheckpointWeights) -> Progress:
    """Restore weights, optimizer and random state from `checkpoint`, of any layout; returns the position in the run.

    Every byte is checked against its hash while reading. Raises Damaged naming the difference; the model is then
    partly filled.
    """
    rank, device = model.mesh.rank, model.mesh.device
    for shard in model.shards:
        if shard.box.numel:
            _read(checkpoint, f"model/{shard.name}", shard.box, shard.local, device)
    for kind, s, values in optimizer.state():
        if s.box.numel:
            _read(checkpoint, f"{kind}/{s.name}", s.box, values, device)
    progress = checkpoint.manifest.progress
    made = progress.step
    if UPDATES in checkpoint.manifest.tensors:
        kind, _, name = UPDATES.partition("/")
        made = int(checkpoint.read_kind(kind, name, Box.whole((1,)), torch.float32))
    optimizer.set_step(made)
    keys = {f"rng/{kind}/{rank}" for kind in ("cpu", device.type)}
    found = {key: checkpoint.tensor(rank, key) for key in keys}
    set_random_state({key: values for key, values in found.items() if values is not None}, rank, device)
    return progress


def _read(checkpoint: CheckpointWeights, key: str, box: Box, values: Tensor, device: torch.device) -> None:
    if accelerator.is_accelerator(device):
        kind, _, name = key.partition("/")
        values.copy_(checkpoint.read_kind(kind, name, box, values.dtype))
    else:
        checkpoint.read_into(key, box, values)  # without an intermediate copy
