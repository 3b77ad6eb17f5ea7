"""Optimizers that a job file can name: what each keeps, and the class that implements it. Without torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from seatrial.base.registry import Registry
from seatrial.job.architecture import Architecture

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
    matrix_states: tuple[str, ...] | None = None  # of hidden matrices, if their update is of whole matrices

    def __post_init__(self) -> None:
        if taken := _TAKEN.intersection((*self.states, *(self.matrix_states or ()))):
            raise ValueError(
                f"a state of {self.name} cannot be named {min(taken)}: checkpoints use that name"
            )

    @property
    def state_bytes(self) -> int:
        """Bytes per parameter, in addition to fp32 weights and gradients."""
        return (4 if self.state_precision == "fp32" else 2) * len(self.states)

    @property
    def matrix_saving(self) -> int:
        """Bytes per parameter of hidden matrices that they need less than others."""
        of_matrices = self.states if self.matrix_states is None else self.matrix_states
        return (4 if self.state_precision == "fp32" else 2) * (len(self.states) - len(of_matrices))

    def states_of(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The states of the parameter that files call `name`, of this whole shape."""
        if self.matrix_states is not None and is_hidden_matrix(name, shape):
            return self.matrix_states
        return self.states

    def bytes_of(self, model: Architecture) -> int:
        """Bytes of one copy of all states of `model`."""
        saved = self.matrix_saving * model.hidden_matrix_parameters() if self.matrix_saving else 0
        return self.state_bytes * model.trained_parameters() - saved


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a layer, or a stack of them (experts): neither embedding nor head."""
    return len(shape) >= 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))


ADAMW = Optimizer("adamw", ("exp_avg", "exp_avg_sq"), "seatrial.train.optimizer:ShardedAdamW")
ADAMW_BF16 = Optimizer(
    "adamw_bf16",
    ADAMW.states,
    "seatrial.train.optimizer:Bf16AdamW",
    state_precision="bf16",
    unfused_bytes=144,  # counted operator by operator: 164, of which a single kernel would need 20
)
LION = Optimizer(
    "lion",
    ("exp_avg",),
    "seatrial.train.optimizer:Lion",
    unfused_bytes=72,  # counted operator by operator: 92, of which a single kernel would need 20
)
MUON = Optimizer(
    "muon",
    ADAMW.states,
    "seatrial.train.muon:ShardedMuon",
    unfused_bytes=80,  # of matrices, counted operator by operator: 124, where AdamW's kernel with norm and clipping moves 44
    matrix_states=("momentum",),
)
OPTIMIZERS = Registry(
    "optimizer",
    "seatrial.optimizers",
    {each.name: each for each in (ADAMW, ADAMW_BF16, LION, MUON)},
    of=Optimizer,
)
# Cached: a search asks for every layout, and looking for other packages takes milliseconds.
optimizer_named = cache(OPTIMIZERS.named)
