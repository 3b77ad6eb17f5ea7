"""AdamW over the tensors that this rank holds, with the true gradient norm of the whole model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from seatrial.job.schema import OptimizerSection
from seatrial.parallel.build import Shard

# torch's AdamW keeps these for each parameter; a checkpoint stores them under these names.
STATE = ("exp_avg", "exp_avg_sq")


@dataclass
class _Slot:
    shard: Shard
    parameter: nn.Parameter  # the shard's values as an ordinary parameter, sharing its memory


class ShardedAdamW:
    """Fused AdamW on local shards (arXiv:1711.05101).

    Working on the shards' local tensors, not on DTensors, saves the sharding propagation of every optimizer operation:
    seconds in the first step. Weight decay applies to matrices (embeddings included), not to norms and biases.
    """

    def __init__(self, shards: list[Shard], settings: OptimizerSection) -> None:
        self._slots = [_Slot(s, nn.Parameter(s.local)) for s in shards if s.local.numel()]
        decayed = [s.parameter for s in self._slots if len(s.shard.whole) >= 2]
        plain = [s.parameter for s in self._slots if len(s.shard.whole) < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}]
        groups.append({"params": plain, "weight_decay": 0.0})
        self._adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        self._shards = shards
        self._make_state()
        # torch's fused AdamW leaves weights, moments and step counters alone where this is 1, without asking the
        # host. Sticky: on a GPU the next step is under way before anybody has seen that this one was not finite.
        self._refused = torch.zeros((), dtype=torch.float32, device=shards[0].local.device)
        self._adamw.found_inf = self._refused  # type: ignore[attr-defined]  # what torch.amp.GradScaler sets

    def _make_state(self) -> None:
        # At once and not in the first step, so that a checkpoint can be read straight into it.
        for slot in self._slots:
            p = slot.parameter
            self._adamw.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                **{key: torch.zeros_like(p) for key in STATE},
            }

    def state(self) -> list[tuple[str, Shard, Tensor]]:
        """(name of the state, shard it belongs to, local values): what a checkpoint saves and fills."""
        return [
            (key, slot.shard, self._adamw.state[slot.parameter][key]) for slot in self._slots for key in STATE
        ]

    def set_step(self, step: int) -> None:
        """Say that `step` updates have been made (bias correction depends on it)."""
        for slot in self._slots:
            self._adamw.state[slot.parameter]["step"].fill_(step)

    @torch.no_grad()
    def squared_norm(self) -> Tensor:
        """This rank's share of the squared gradient norm, fp32; summed over all ranks it is the true one.

        A parameter that several ranks hold counts as the fraction 1/holders in each of them.
        """
        device = self._slots[0].parameter.device
        total = torch.zeros((), dtype=torch.float32, device=device)
        by_holders: dict[int, list[Tensor]] = {}
        for shard in self._shards:
            grad = shard.grad
            if shard.counted and grad is not None and grad.numel():
                by_holders.setdefault(shard.holders, []).append(grad)
        for holders, grads in sorted(by_holders.items()):
            norm = torch.nn.utils.get_total_norm(grads)
            total += norm.float() ** 2 / holders
        return total

    def refuse_if(self, bad: Tensor) -> None:
        """Where the scalar `bad` is not zero, this update and all later ones change nothing, until `allow`."""
        self._refused.copy_(torch.maximum(self._refused, (bad != 0).to(self._refused)))

    def allow(self) -> None:
        """Make updates again."""
        self._refused.zero_()

    def clear_gradients(self) -> None:
        """Forget gradients, also those of a step that broke off."""
        for slot in self._slots:
            slot.parameter.grad = None
        for shard in self._shards:
            shard.parameter.grad = None

    @torch.no_grad()
    def update(self, lr: float, scale: Tensor | None) -> None:
        """One AdamW update with the gradients times `scale`, unless it is refused; clears the gradients.

        It waits for no other rank, so that a rank either has a step's update or does not have it.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for slot in self._slots:
            slot.parameter.grad = slot.shard.grad
        grads = [s.parameter.grad for s in self._slots if s.parameter.grad is not None]
        if scale is not None and grads:
            torch._foreach_mul_(grads, scale)
        self._adamw.step()
        self.clear_gradients()
