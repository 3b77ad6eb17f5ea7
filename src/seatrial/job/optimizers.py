"""Optimizers that a job file can name: what each keeps, and the class that implements it. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from seatrial.base.registry import Registry

# Kinds of tensors in a checkpoint besides an optimizer's states.
_TAKEN = {"model", "optimizer", "rng"}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer whose state is sharded as the parameters are."""

    name: str
    states: tuple[
        str, ...
    ]  # kept for every parameter, fp32 and of its shape; a checkpoint stores them under these names
    implementation: str  # "module:Class", a ShardedOptimizer of train/optimizer.py

    def __post_init__(self) -> None:
        if taken := _TAKEN.intersection(self.states):
            raise ValueError(
                f"a state of {self.name} cannot be named {min(taken)}: checkpoints use that name"
            )

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter, in addition to fp32 weights and gradients."""
        return 4 * len(self.states)


ADAMW = Optimizer("adamw", ("exp_avg", "exp_avg_sq"), "seatrial.train.optimizer:ShardedAdamW")
OPTIMIZERS = Registry("optimizer", "seatrial.optimizers", {ADAMW.name: ADAMW}, of=Optimizer)
# Cached: a search asks for every layout, and looking for other packages takes milliseconds.
optimizer_named = cache(OPTIMIZERS.named)
