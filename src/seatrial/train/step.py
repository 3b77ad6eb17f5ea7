"""One training step: forward and backward, the one vector that is summed over ranks, clipping, the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from seatrial.parallel.build import ParallelModel
from seatrial.train.companion import Leaving
from seatrial.train.meter import OwnTime
from seatrial.train.optimizer import ShardedAdamW

# The vector: loss, squared gradient norm; how many ranks want to yield, must leave, and are still writing their last
# snapshot; what rank 0 alone knows of checkpoints (`SaveNews`); then for each of the blocks below a number of each rank,
# to which every other rank adds 0. So the sum is exact there, and NaN survives it (gloo's MAX loses NaN).
_LOSS, _NORM, _YIELD, _PREEMPT, _BUSY, _COMMITTED, _WANTED, _INTERVAL, _AT_RISK = range(9)
_HEAD = 9
_MEMORY, _SECONDS, _NOT_FINITE, _CHANGED, _PART = range(5)
_BLOCKS = 5

INTACT, CHANGED_COPIED, CHANGED = 0, 1, 2  # codes of a rank's state at rest, see replicas.AtRest


@dataclass(frozen=True)
class SaveNews:
    """What a rank tells the others of checkpoints on their way. Attempts count from 1 in each leg, 0 is none."""

    part: int = 0  # the last attempt that this rank's part is settled of; negative: it could not be written
    committed: int = 0  # the same of the whole; what follows is rank 0's alone too
    wanted: bool = False  # save after this step, whether one is due or not
    interval: int = 0  # steps from one save to the next, where the run chooses; 0: not known yet
    at_risk_s: float = 0.0  # training that no checkpoint holds


@dataclass(frozen=True)
class StepValues:
    """The vector of one step after the sum: the same in every rank."""

    vector: tuple[float, ...]

    @property
    def _world(self) -> int:
        return (len(self.vector) - _HEAD) // _BLOCKS

    def _block(self, index: int) -> tuple[float, ...]:
        start = _HEAD + index * self._world
        return self.vector[start : start + self._world]

    @property
    def loss(self) -> float:
        """Nats a token, mean over the global batch."""
        return self.vector[_LOSS]

    @property
    def norm_squared(self) -> float:
        """Of the gradient of the whole model, before clipping."""
        return self.vector[_NORM]

    @property
    def grad_norm(self) -> float:
        return float(self.norm_squared**0.5)

    @property
    def finite(self) -> bool:
        """Whether the update was made: with a loss or a norm that is not finite it changes nothing."""
        return math.isfinite(self.loss + self.norm_squared)

    @property
    def leaving(self) -> Leaving | None:
        """What at least one rank was asked to do after this step."""
        if self.vector[_PREEMPT] > 0:
            return "preempted"
        return "yielded" if self.vector[_YIELD] > 0 else None

    @property
    def busy(self) -> bool:
        """Whether some rank could not take a snapshot now: then none does, and all have those of the same steps."""
        return self.vector[_BUSY] > 0

    @property
    def saving(self) -> SaveNews:
        """What rank 0 knows of checkpoints; `part` is 0."""
        v = self.vector
        return SaveNews(0, int(v[_COMMITTED]), v[_WANTED] > 0, int(v[_INTERVAL]), v[_AT_RISK])

    @property
    def parts(self) -> tuple[int, ...]:
        """Of each rank: the attempt whose part it has settled, see `SaveNews.part`."""
        return tuple(int(v) for v in self._block(_PART))

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Of each rank."""
        return tuple(int(v) for v in self._block(_MEMORY))

    @property
    def local_seconds(self) -> tuple[float, ...]:
        """Of each rank: time in work that waits for no other rank."""
        return self._block(_SECONDS)

    @property
    def not_finite(self) -> list[int]:
        """The ranks whose own share of loss or norm was not finite."""
        return [r for r, v in enumerate(self._block(_NOT_FINITE)) if v != 0]

    @property
    def changed(self) -> dict[int, int]:
        """rank -> code, of the ranks whose state was altered between two updates."""
        return {r: int(v) for r, v in enumerate(self._block(_CHANGED)) if v != 0}


class StepResult:
    """What a step measured, on its way from the device: nothing waits for it until it is read."""

    def __init__(self, values: Tensor) -> None:
        """`values`: the summed vector, fp64."""
        self._copied: torch.cuda.Event | None = None
        self._values = values
        if values.device.type == "cuda":
            # Pinned memory and an event: an ordinary copy would also wait for the step after this one.
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def values(self) -> StepValues:
        """All of it; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepValues(tuple(self._values.tolist()))

    def read(self) -> tuple[float, float, int]:
        """(loss, gradient norm before clipping, bytes of the rank that uses most memory); waits for the device."""
        values = self.values()
        return values.loss, values.grad_norm, max(values.memory_bytes)


@dataclass(frozen=True)
class Own:
    """What this rank puts into the vector beside loss and norm."""

    wants: Leaving | None = None
    busy: bool = False
    saving: SaveNews = SaveNews()
    clock: OwnTime | None = None
    memory_bytes: Callable[[], int] = lambda: 0  # asked after the backward pass: near the peak
    changed: Callable[[], Tensor | None] = lambda: None  # asked before the update: a code, on the device


def vector_length(world_size: int) -> int:
    return _HEAD + _BLOCKS * world_size


def local_vector(
    model: ParallelModel, optimizer: ShardedAdamW, batch: tuple[Tensor, Tensor, Tensor | None], own: Own
) -> Tensor:
    """Forward and backward over this rank's sequences; its share of the vector. Gradients are final afterwards.

    `batch`: ids, targets and the documents they are of, see `data.loader.Batch`.
    """
    mesh = model.mesh
    world = mesh.layout.world_size
    loss = model.forward_backward(*batch)
    with own.clock.running() if own.clock is not None else nullcontext():
        # Replicas along `replicate` hold the same gradients: the sum over all ranks would count them more than once.
        norm_squared = optimizer.squared_norm() / mesh.layout.replicate
        changed = own.changed()

    def place(block: int) -> int:
        return _HEAD + block * world + mesh.rank

    told = torch.zeros(vector_length(world), dtype=torch.float64)
    told[_YIELD], told[_PREEMPT] = own.wants == "yielded", own.wants == "preempted"
    told[_BUSY] = own.busy
    news = own.saving
    told[place(_PART)] = news.part
    if mesh.rank == 0:
        told[_COMMITTED], told[_WANTED] = news.committed, news.wanted
        told[_INTERVAL], told[_AT_RISK] = news.interval, news.at_risk_s
    told[place(_MEMORY)] = own.memory_bytes()
    if own.clock is not None:
        told[place(_SECONDS)] = own.clock.take()
    values = told.to(mesh.device, non_blocking=True)
    values[_LOSS] = loss
    values[_NORM] = norm_squared
    values[place(_NOT_FINITE)] = ~torch.isfinite(values[_LOSS] + values[_NORM])
    if changed is not None:
        values[place(_CHANGED)] = changed
    return values


def update(
    optimizer: ShardedAdamW, loss: Tensor, norm_squared: Tensor, *, lr: float, clip_norm: float | None
) -> None:
    """The update of a step whose loss and squared gradient norm (fp64, summed over ranks) are these.

    If one of them is not finite, weights and optimizer state stay as they are, bit for bit, and so they do in later
    steps until `optimizer.allow`.
    """
    optimizer.refuse_if(~torch.isfinite(loss + norm_squared))
    scale = None
    if clip_norm is not None:
        norm = norm_squared.sqrt()
        scale = (clip_norm / (norm + 1e-6)).clamp(max=1.0).float()
    optimizer.update(lr, scale)


def train_step(
    model: ParallelModel,
    optimizer: ShardedAdamW,
    ids_BT: Tensor,
    target_BT: Tensor,
    document_BT: Tensor | None = None,
    *,
    lr: float,
    clip_norm: float | None,
) -> StepResult:
    """Train on this rank's sequences of one global batch, with nobody watching.

    The gradient norm is that of the whole model over the whole global batch, before clipping. One exchange carries
    everything that ranks must know of each other.
    """
    values = local_vector(model, optimizer, (ids_BT, target_BT, document_BT), Own())
    model.mesh.sum_over_ranks(values)
    update(optimizer, values[_LOSS], values[_NORM], lr=lr, clip_norm=clip_norm)
    return StepResult(values)
