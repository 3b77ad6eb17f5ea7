"""Software stacks as data (stacks.toml): their fusion, overlap and memory."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from seatrial.plan.model.recipe import Recipe


@dataclass(frozen=True)
class Stack:
    """A software stack; the head of stacks.toml describes each field and its unit."""

    name: str
    attention: str
    hidden_forward: float
    hidden_backward: float
    ffn_forward: float
    ffn_backward: float
    loss: float
    logits: tuple[int, int]
    optimizer: float
    accumulate: float
    gradient_bytes: int
    reduce: str
    reduce_once: bool
    layer_states: str
    state_bytes: tuple[int, int, int]
    context_gib: float
    source: str
    metrics: float = 0.0
    hide_tensor: float = 0.0
    hide_pipeline: float = 0.0
    hide_data: float = 0.0
    contention: float = 0.0
    gap_s: float = 0.0
    bucket_bytes: float = 0.0
    groups: int = 0
    context_parallel: bool = False
    matrix_saving: int = (
        0  # not in stacks.toml: bytes of optimizer state less for a parameter of a matrix (muon)
    )

    def reduces_once(self, recipe: Recipe) -> bool:
        """Whether full sharding reduces gradients in the last microbatch only; torch's pipeline always does."""
        return recipe.accumulate == "whole" and (self.reduce_once or recipe.layout.pipeline > 1)


@cache
def stacks() -> dict[str, Stack]:
    """Every stack by name; an entry with `like` inherits the values that it does not set."""
    text = files("seatrial.plan.cost").joinpath("stacks.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: Stack(name=name, **_values(table, name)) for name in table}


def _values(table: dict[str, Any], name: str) -> dict[str, Any]:
    own = dict(table[name])
    like = own.pop("like", None)
    merged = (_values(table, like) if like is not None else {}) | own
    merged["logits"] = tuple(merged["logits"])
    merged["state_bytes"] = tuple(merged["state_bytes"])
    return merged
