"""Low-rank adapters (LoRA, arXiv:2106.09685): which linear layers have one, of which rank. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# The linear layers of a decoder layer, in the order in which they are computed.
LORA_TARGETS: tuple[LoraTarget, ...] = get_args(LoraTarget)


@dataclass(frozen=True)
class Lora:
    """Adapters of a model whose own weights are frozen: y = W x + (alpha / rank) B A x."""

    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Lora:
        """From plain values: keys of the job file, or recorded ones. The order of the targets does not matter."""
        given = values["targets"]
        return cls(values["rank"], values["alpha"], tuple(t for t in LORA_TARGETS if t in given))

    @property
    def scale(self) -> float:
        """Factor of B A x."""
        return self.alpha / self.rank
