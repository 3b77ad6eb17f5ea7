"""Optimizers over this rank's shards, with the gradient norm of the whole model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seatrial.job.optimizers import ADAMW, OPTIMIZERS, optimizer_named
from seatrial.job.schema import OptimizerSection
from seatrial.parallel.build import Shard
from seatrial.parallel.mesh import Mesh
from seatrial.train.router_bias import RouterBiases

_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PART = 1 << 23  # values that an elementwise rule gets at once: its temporaries are 32 MiB each
_ALIGNMENT = 512  # bytes, of torch's allocator on GPUs


@dataclass
class _Slot:
    shard: Shard
    parameter: nn.Parameter  # the shard's values as an ordinary parameter, sharing its memory
    state: dict[str, Tensor]
    lr_factor: float  # on the learning rate of the schedule
    weight_decay: float


def _rates(shard: Shard, settings: OptimizerSection) -> tuple[float, float]:
    """(factor on the learning rate, weight decay) of a parameter.

    Weight decay applies to matrices (embeddings included), not to norms and biases, unless their group has its own.
    """
    group = settings.group_of(shard.name)
    usual = settings.weight_decay if len(shard.whole) >= 2 else 0.0
    if group is None:
        return 1.0, usual
    return group.lr_factor, usual if group.weight_decay is None else group.weight_decay


def _zeros(
    shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """One buffer, which one kernel can read, and tensors of `shapes` in it, placed as torch would allocate them."""
    rounded = _ALIGNMENT // dtype.itemsize
    spans = [-(-shape.numel() // rounded) * rounded for shape in shapes]
    buffer = torch.zeros(sum(spans), dtype=dtype, device=device)
    parts = zip(buffer.split(spans), shapes, strict=True)
    return buffer, [part[: shape.numel()].view(shape) for part, shape in parts]


def build_optimizer(
    shards: list[Shard], settings: OptimizerSection, mesh: Mesh | None = None
) -> ShardedOptimizer:
    """The optimizer that the job file names; only one of whole matrices (muon) needs the mesh.

    Raises InputError if it cannot be imported.
    """
    known = optimizer_named(settings.name)
    cls = OPTIMIZERS.imported(settings.name, known.implementation)
    optimizer: ShardedOptimizer = (
        cls(shards, settings) if known.matrix_states is None else cls(shards, settings, mesh)
    )
    return optimizer


class ShardedOptimizer(ABC):
    """Base of optimizers: state per shard, gradient norm, updates that can be rejected.

    They work on local tensors, not on DTensors, which saves the sharding propagation of every operation: seconds in the
    first step.
    """

    prepares = False  # whether `prepare` is needed

    def __init__(self, shards: list[Shard], settings: OptimizerSection) -> None:
        # State is created now, not in the first step, so that a checkpoint can be read straight into it.
        known = optimizer_named(settings.name)
        trained = [s for s in shards if s.local.numel() and s.trained]
        keys = [known.states_of(s.name, s.whole) for s in trained]
        # `buffer` is the memory of all state.
        self.buffer, states = _zeros(
            [s.local.shape for s, own in zip(trained, keys, strict=True) for _ in own],
            _STATE_DTYPES[known.state_precision],
            shards[0].local.device,
        )
        left = iter(states)
        self._slots = [
            _Slot(s, nn.Parameter(s.local), {key: next(left) for key in own}, *_rates(s, settings))
            for s, own in zip(trained, keys, strict=True)
        ]
        self._shards = shards
        self._router_biases = RouterBiases(shards, settings.router_bias_update_rate)
        # Sticky: on a GPU the next step is in flight before the host sees that this one was not finite.
        self._refused = torch.zeros((), dtype=torch.float32, device=shards[0].local.device)

    @abstractmethod
    def counts(self) -> list[Tensor]:
        """One or several counts of the updates made, all equal, fp32 scalars."""

    @abstractmethod
    def _apply(self, lr: float) -> None:
        """Update every slot with its parameter's gradient; change nothing, counts included, where `_refused` is 1.

        `lr`: the schedule's; a slot has its factor on it and its weight decay.
        """

    def state(self) -> list[tuple[str, Shard, Tensor]]:
        """(name of the state, its shard, local values): what a checkpoint saves and restores."""
        return [(key, slot.shard, values) for slot in self._slots for key, values in slot.state.items()]

    def set_step(self, step: int) -> None:
        """Set the count of updates made to `step` (bias correction depends on it)."""
        for count in self.counts():
            count.fill_(step)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, fp32; the sum over all ranks is the whole model's.

        A parameter on several ranks counts 1/holders in each.
        """
        total = torch.zeros((), dtype=torch.float32, device=self._refused.device)
        by_holders: dict[int, list[Tensor]] = {}
        for shard in self._shards:
            grad = shard.grad
            if shard.counted and grad is not None and grad.numel():
                by_holders.setdefault(shard.holders, []).append(grad)
        for holders, grads in sorted(by_holders.items()):
            norm = torch.nn.utils.get_total_norm(grads)
            total += norm.float() ** 2 / holders
        return total

    def prepare(self, scale: Tensor | None) -> None:  # noqa: B027  most need nothing
        """Do what `update` needs other ranks for, with the final gradients times `scale`; changes no state.

        Before the step's sum: once that has succeeded in one rank, every rank can make the update alone.
        """

    def prepare_routers(self, count_LX: Tensor) -> None:
        """As `prepare`, with the positions of the step that all ranks together sent to each expert of each layer, [L, X]."""
        self._router_biases.prepare(count_LX)

    def refuse_if(self, bad: Tensor) -> None:
        """If the scalar `bad` is not zero, this update and all later ones are no-ops until `allow`."""
        self._refused.copy_(torch.maximum(self._refused, (bad != 0).to(self._refused)))

    def allow(self) -> None:
        """Stop refusing updates."""
        self._refused.zero_()

    def clear_gradients(self) -> None:
        """Free all gradients, also those of an interrupted step."""
        for slot in self._slots:
            slot.parameter.grad = None
        for shard in self._shards:
            shard.parameter.grad = None

    @torch.no_grad()
    def update(self, lr: float, scale: Tensor | None) -> None:
        """One update with the gradients times `scale`, unless it is refused; clears the gradients.

        Without communication, so that the loss of a peer cannot leave it incomplete.
        """
        for slot in self._slots:
            slot.parameter.grad = slot.shard.grad
        grads = [s.parameter.grad for s in self._slots if s.parameter.grad is not None]
        if scale is not None and grads:
            torch._foreach_mul_(grads, scale)
        self._apply(lr)
        self._router_biases.update(self._refused)
        self.clear_gradients()


class ShardedAdamW(ShardedOptimizer):
    """Fused AdamW (arXiv:1711.05101)."""

    def __init__(self, shards: list[Shard], settings: OptimizerSection) -> None:
        super().__init__(shards, settings)
        own = [s for s in self._slots if s.state.keys() == set(ADAMW.states)]
        alike: dict[tuple[float, float], list[nn.Parameter]] = {}
        for slot in own:
            alike.setdefault((slot.lr_factor, slot.weight_decay), []).append(slot.parameter)
        self._adamw = torch.optim.AdamW(
            [{"params": p, "lr_factor": f, "weight_decay": decay} for (f, decay), p in alike.items()],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        for slot in own:
            count = torch.zeros((), dtype=torch.float32, device=slot.parameter.device)
            self._adamw.state[slot.parameter] = {"step": count, **slot.state}
        # torch's fused AdamW leaves weights, moments and step counters unchanged where this is 1, without a host sync.
        self._adamw.found_inf = self._refused  # type: ignore[attr-defined]  # what torch.amp.GradScaler sets

    def counts(self) -> list[Tensor]:
        return [state["step"] for state in self._adamw.state.values()]

    def _apply(self, lr: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr * group["lr_factor"]
        self._adamw.step()


class ElementwiseOptimizer(ShardedOptimizer):
    """An optimizer that is a function of each value, its gradient and its states: the base for other packages.

    A rule that depends on a whole matrix would give other results on shards than in one process.
    """

    def __init__(self, shards: list[Shard], settings: OptimizerSection) -> None:
        super().__init__(shards, settings)
        self.settings = settings
        self._count = torch.zeros_like(self._refused)

    @abstractmethod
    def rule(
        self,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        count: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The new values and states, of any precision. Leaves its arguments unchanged. `count`: of this update, from 1.

        It may get a part of a parameter, with the same part of its gradient and states. `lr` and `decay` are those of the
        parameter's group.
        """

    def counts(self) -> list[Tensor]:
        return [self._count]

    def _apply(self, lr: float) -> None:
        refused = self._refused > 0
        count = self._count + 1
        for slot in self._slots:
            gradient = slot.parameter.grad
            if gradient is None:
                continue
            own_lr = lr * slot.lr_factor
            rows = max(1, _PART * len(gradient) // gradient.numel())
            tensors = (slot.parameter, gradient, *slot.state.values())
            for values, part, *states in zip(*(t.split(rows) for t in tensors), strict=True):
                kept = dict(zip(slot.state, states, strict=True))
                new = self.rule(values, part, kept, lr=own_lr, decay=slot.weight_decay, count=count)
                # Selected on the device, without a host sync; a refused update may contain NaN.
                values.copy_(torch.where(refused, values, new[0]))
                for key, state in kept.items():
                    state.copy_(torch.where(refused, state, new[1][key]))
        self._count.copy_(torch.where(refused, self._count, count))


class Bf16AdamW(ElementwiseOptimizer):
    """AdamW whose moments are stored in bf16 and updated in fp32 (arXiv:2412.19437, section 3.3.3)."""

    def rule(
        self,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        count: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        beta1, beta2 = self.settings.beta1, self.settings.beta2
        mean = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = square.div(1 - beta2**count).sqrt_().add_(self.settings.eps)
        step = mean.div(scale).mul_(lr / (1 - beta1**count))
        return torch.sub(values * (1 - lr * decay), step), {"exp_avg": mean, "exp_avg_sq": square}


class Lion(ElementwiseOptimizer):
    """Lion (arXiv:2302.06675, algorithm 2): the sign of a mean of gradient and momentum."""

    def rule(
        self,
        values: Tensor,
        gradient: Tensor,
        state: Mapping[str, Tensor],
        *,
        lr: float,
        decay: float,
        count: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mean = state["exp_avg"]
        direction = mean.lerp(gradient, 1 - self.settings.beta1).sign_()
        new = torch.add(values * (1 - lr * decay), direction, alpha=-lr)
        return new, {"exp_avg": mean.lerp(gradient, 1 - self.settings.beta2)}
