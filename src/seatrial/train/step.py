"""One training step: forward and backward, the sum over ranks, clipping, the update."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seatrial.parallel.build import ParallelModel
from seatrial.train.optimizer import ShardedAdamW


class StepResult:
    """What a step measured, on its way from the device: nothing waits for it until `read`."""

    def __init__(self, values: Tensor) -> None:
        """`values`: fp64 [2 + world]: loss, squared gradient norm, memory in bytes of each rank."""
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            # Pinned memory and an event: an ordinary copy would also wait for the step after this one.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[float, float, int]:
        """(loss, gradient norm before clipping, bytes of the rank that uses most memory)."""
        if self._copied is not None:
            self._copied.synchronize()
        values = self._values
        return float(values[0]), float(values[1]) ** 0.5, int(values[2:].max())


def train_step(
    model: ParallelModel,
    optimizer: ShardedAdamW,
    ids_BT: Tensor,
    target_BT: Tensor,
    *,
    lr: float,
    clip_norm: float | None,
    memory_bytes: Callable[[], int] = lambda: 0,
) -> StepResult:
    """Train on this rank's sequences of one global batch.

    The gradient norm is that of the whole model over the whole global batch, before clipping. One exchange carries
    loss, norm and memory of every rank.
    """
    mesh = model.mesh
    loss = model.forward_backward(ids_BT, target_BT)
    values = torch.zeros(2 + mesh.layout.world_size, dtype=torch.float64, device=mesh.device)
    values[0] = loss
    # Replicas along `replicate` hold the same gradients: the sum over all ranks would count them more than once.
    values[1] = optimizer.squared_norm() / mesh.layout.replicate
    values[2 + mesh.rank] = memory_bytes()  # after the backward pass: near the peak
    mesh.sum_over_ranks(values)
    scale = None
    if clip_norm is not None:
        norm = values[1].sqrt()
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
    optimizer.update(lr, scale)
    return StepResult(values)
