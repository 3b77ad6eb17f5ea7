"""Optimizers that a job file can name: what each keeps, and the class that implements it. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from seatrial.base.registry import Registry

# Kinds of tensors in a checkpoint besides an optimizer's states.
_TAKEN = {"model", "optimizer", "rng"}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose state is sharded as the parameters are."""

    name: str
    states: tuple[str, ...]  # per parameter, of its shape; their names in a checkpoint
    implementation: str  # "module:Class", a ShardedOptimizer of train/optimizer.py
    state_precision: Literal["fp32", "bf16"] = "fp32"
    unfused_bytes: int = 0  # that an update reads and writes per parameter, beyond those of a single kernel

    def __post_init__(self) -> None:
        if taken := _TAKEN.intersection(self.states):
            raise ValueError(
                f"a state of {self.name} cannot be named {min(taken)}: checkpoints use that name"
            )

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter, in addition to fp32 weights and gradients."""
        return (4 if self.state_precision == "fp32" else 2) * len(self.states)


ADAMW = Optimizer("adamw", ("exp_avg", "exp_avg_sq"), "seatrial.train.optimizer:ShardedAdamW")
ADAMW_BF16 = Optimizer(
    "adamw_bf16",
    ADAMW.states,
    "seatrial.train.optimizer:Bf16AdamW",
    state_precision="bf16",
    unfused_bytes=144,  # counted operator by operator: 164, of which a single kernel would need 20
)
OPTIMIZERS = Registry(
    "optimizer", "seatrial.optimizers", {each.name: each for each in (ADAMW, ADAMW_BF16)}, of=Optimizer
)
# Cached: a search asks for every layout, and looking for other packages takes milliseconds.
optimizer_named = cache(OPTIMIZERS.named)
