"""One training step: forward and backward, one all-reduced vector of values, clipping, the update."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from seatrial.hardware import accelerator
from seatrial.parallel.build import ParallelModel
from seatrial.record.messages import Leaving
from seatrial.record.stages import OPTIMIZER, STEP_SUM
from seatrial.train.meter import OwnWorkTimer
from seatrial.train.optimizer import ShardedOptimizer

# The vector: loss, squared gradient norm; how many ranks are to yield, are preempted, and are still writing their last
# snapshot; rank 0's checkpoint status (`SaveStatus`); the experts' load-balancing loss; how many targets counted in the
# loss; rank 0's `expert_load`; then, for each block below, one number per rank, to which all other ranks add 0.
# So the sum is exact there and preserves NaN (gloo's MAX loses NaN).
_LOSS, _NORM, _YIELD, _PREEMPT, _BUSY, _COMMITTED, _REQUESTED, _INTERVAL, _AT_RISK, _BALANCE, _COUNTED = (
    range(11)
)
_LARGEST, _SMALLEST, _IDLE = range(11, 14)
_HEAD = 14
_MEMORY, _SECONDS, _NOT_FINITE, _CHANGED, _PART = range(5)
_BLOCKS = 5

INTACT, CHANGED_COPIED, CHANGED = 0, 1, 2  # codes of a rank's state at rest, see replicas.AtRest


@dataclass(frozen=True)
class SaveStatus:
    """A rank's status of the checkpoint in flight. Attempts are numbered from 1 in each generation; 0: none."""

    part: int = 0  # the last attempt whose part this rank has finished; negative: it could not be written
    committed: int = 0  # the same for the whole checkpoint; this and the fields below come from rank 0 only
    requested: bool = False  # save after this step, even if no save is due
    interval: int = 0  # steps between saves, where the run chooses; 0: not known yet
    at_risk_s: float = 0.0  # seconds of training that no checkpoint has


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
        """Mean over the targets of the global batch that count, in nats per token; 0 if none does."""
        return self.vector[_LOSS]

    @property
    def counted(self) -> int:
        """Number of these targets."""
        return int(self.vector[_COUNTED])

    @property
    def balance_loss(self) -> float:
        """The experts' load-balancing loss, without its coefficient: mean over the microbatches of all ranks; 0: no experts."""
        return self.vector[_BALANCE]

    @property
    def expert_load(self) -> tuple[float, float, int]:
        """What `expert_load` returns; zeros without experts."""
        return self.vector[_LARGEST], self.vector[_SMALLEST], int(self.vector[_IDLE])

    @property
    def norm_squared(self) -> float:
        """Squared norm of the whole model's gradient, before clipping."""
        return self.vector[_NORM]

    @property
    def grad_norm(self) -> float:
        return float(self.norm_squared**0.5)

    @property
    def finite(self) -> bool:
        """Whether the update was applied: with a non-finite loss or norm it changes nothing."""
        return math.isfinite(self.loss + self.norm_squared)

    @property
    def leaving(self) -> Leaving | None:
        """What at least one rank was asked to do at the end of this step."""
        if self.vector[_PREEMPT] > 0:
            return "preempted"
        return "yielded" if self.vector[_YIELD] > 0 else None

    @property
    def busy(self) -> bool:
        """Whether some rank cannot take a snapshot now: then none does, so that all have snapshots of the same steps."""
        return self.vector[_BUSY] > 0

    @property
    def saving(self) -> SaveStatus:
        """Rank 0's checkpoint status; `part` is 0."""
        v = self.vector
        return SaveStatus(0, int(v[_COMMITTED]), v[_REQUESTED] > 0, int(v[_INTERVAL]), v[_AT_RISK])

    @property
    def parts(self) -> tuple[int, ...]:
        """For each rank, the last attempt whose part it has finished, see `SaveStatus.part`."""
        return tuple(int(v) for v in self._block(_PART))

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """Memory use of each rank, see `meter.memory_bytes`."""
        return tuple(int(v) for v in self._block(_MEMORY))

    @property
    def local_seconds(self) -> tuple[float, ...]:
        """For each rank, seconds of its own work (data loading, computation), without communication."""
        return self._block(_SECONDS)

    @property
    def not_finite(self) -> list[int]:
        """The ranks whose local share of loss or norm was not finite."""
        return [r for r, v in enumerate(self._block(_NOT_FINITE)) if v != 0]

    @property
    def changed(self) -> dict[int, int]:
        """Rank -> code, for the ranks whose state changed between two updates."""
        return {r: int(v) for r, v in enumerate(self._block(_CHANGED)) if v != 0}


class StepResult:
    """The values of a step, copied from the device asynchronously: only reading them synchronises."""

    def __init__(self, values: Tensor, device: torch.device) -> None:
        """`values`: the summed vector, fp64, on `device`."""
        self._copied: torch.Event | None = None
        self._values = values
        if accelerator.is_accelerator(device):
            # Pinned memory and an event: a synchronous copy would also wait for the next step.
            self._values = accelerator.host_memory(values.shape, values.dtype, device)
            self._values.copy_(values, non_blocking=True)
            self._copied = accelerator.record()

    def values(self) -> StepValues:
        """All values; waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return StepValues(tuple(self._values.tolist()))

    def read(self) -> tuple[float, float, int]:
        """(loss, gradient norm before clipping, bytes of the rank that uses most memory); waits for the device."""
        values = self.values()
        return values.loss, values.grad_norm, max(values.memory_bytes)


@dataclass(frozen=True)
class Contribution:
    """This rank's entries of the vector besides loss and norm."""

    leave_request: Leaving | None = None
    busy: bool = False
    saving: SaveStatus = SaveStatus()
    clock: OwnWorkTimer | None = None
    memory_bytes: Callable[[], int] = lambda: 0  # called after the backward pass, near the peak
    changed: Callable[[], Tensor | None] = lambda: None  # called before the update: a code, on the device


def vector_length(world_size: int) -> int:
    return _HEAD + _BLOCKS * world_size


def local_vector(
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    batch: tuple[Tensor, Tensor, Tensor | None],
    own: Contribution,
    clip_norm: float | None,
) -> Tensor:
    """Run forward and backward over this rank's sequences; return its share of the vector. Gradients are then final.

    What an update communicates (`optimizer.prepare`) is done too: what follows the sum of the vector needs no other rank.
    `batch`: ids, targets and document numbers, see `data.loader.Batch`.
    """
    mesh = model.mesh
    world = mesh.layout.world_size
    loss = model.forward_backward(*batch)
    with model.clock.during(OPTIMIZER), own.clock.running() if own.clock is not None else nullcontext():
        # Replicas have the same gradients: the sum over all ranks would count them more than once.
        norm_squared = optimizer.squared_norm() / mesh.layout.replicate
        changed = own.changed()
    if optimizer.prepares:
        norm = norm_squared.double()
        if clip_norm is not None:
            with model.clock.during(STEP_SUM):
                mesh.sum_over_ranks(norm)
        with model.clock.during(OPTIMIZER):
            optimizer.prepare(clip_factor(norm, clip_norm))

    # Before the vector: once that is summed in one rank, every rank can make the update alone.
    count_LX = model.take_expert_counts()
    if count_LX is not None:
        with model.clock.during(STEP_SUM):
            mesh.sum_over_ranks(count_LX)
        optimizer.prepare_routers(count_LX)

    def index(block: int) -> int:
        return _HEAD + block * world + mesh.rank

    on_host = torch.zeros(vector_length(world), dtype=torch.float64)
    on_host[_YIELD], on_host[_PREEMPT] = own.leave_request == "yielded", own.leave_request == "preempted"
    on_host[_BUSY] = own.busy
    status = own.saving
    on_host[index(_PART)] = status.part
    if mesh.rank == 0:
        on_host[_COMMITTED], on_host[_REQUESTED] = status.committed, status.requested
        on_host[_INTERVAL], on_host[_AT_RISK] = status.interval, status.at_risk_s
    on_host[index(_MEMORY)] = own.memory_bytes()
    if own.clock is not None:
        on_host[index(_SECONDS)] = own.clock.read()
    values = accelerator.upload(on_host, mesh.device)
    values[_LOSS] = loss
    # A number that is assigned is copied, and the host waits for all work before that: `fill_` passes it to a kernel.
    values[_BALANCE].fill_(model.take_balance_loss())
    if mesh.rank == 0:
        values[_COUNTED].fill_(model.counted)
        if count_LX is not None:
            values[_LARGEST : _IDLE + 1] = expert_load(count_LX[model.arch.first_k_dense_replace :])
    values[_NORM] = norm_squared
    values[index(_NOT_FINITE)] = ~torch.isfinite(values[_LOSS] + values[_NORM])
    if changed is not None:
        values[index(_CHANGED)] = changed
    return values


def expert_load(count_LX: Tensor) -> Tensor:
    """How evenly positions were sent to the experts of each layer, [3], from their counts.

    The largest and the smallest count of any layer over the mean of its experts, and how many experts of all layers got
    none. The largest less 1 is MaxVio of arXiv:2408.15664.
    """
    load_LX = count_LX / count_LX.mean(1, keepdim=True)
    return torch.stack((load_LX.max(), load_LX.min(), (count_LX == 0).sum(dtype=torch.float64)))


def update(
    optimizer: ShardedOptimizer, loss: Tensor, norm_squared: Tensor, *, lr: float, clip_norm: float | None
) -> None:
    """Apply the update of a step with this loss and squared gradient norm (fp64, summed over ranks).

    If one of them is not finite, weights and optimizer state stay unchanged, bit for bit, also in later steps until
    `optimizer.allow`.
    """
    optimizer.refuse_if(~torch.isfinite(loss + norm_squared))
    optimizer.update(lr, clip_factor(norm_squared, clip_norm))


def clip_factor(norm_squared: Tensor, clip_norm: float | None) -> Tensor | None:
    """The factor, fp32, on gradients whose squared norm is this; None: no clipping."""
    if clip_norm is None:
        return None
    return (clip_norm / (norm_squared.sqrt() + 1e-6)).clamp(max=1.0).float()


def train_step(
    model: ParallelModel,
    optimizer: ShardedOptimizer,
    ids_BT: Tensor,
    target_BT: Tensor,
    document_BT: Tensor | None = None,
    *,
    lr: float,
    clip_norm: float | None,
) -> StepResult:
    """Train on this rank's sequences of one global batch, unsupervised.

    The gradient norm is that of the whole model over the whole global batch, before clipping. One all-reduce carries
    all values that ranks exchange.
    """
    values = local_vector(model, optimizer, (ids_BT, target_BT, document_BT), Contribution(), clip_norm)
    model.mesh.sum_over_ranks(values)
    update(optimizer, values[_LOSS], values[_NORM], lr=lr, clip_norm=clip_norm)
    return StepResult(values, model.mesh.device)
