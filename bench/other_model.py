"""A model that our trainer cannot build, for predicting published results of other stacks."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.job.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class OtherModel(Architecture):
    """Sizes, and how its layers differ from ours; fields that predictions do not use have defaults."""

    family: str = "llama"
    max_position_embeddings: int = 0
    rope_theta: float = 0.0
    rms_norm_eps: float = 0.0
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    gated: bool = True
    learned_positions: int = 0
    layer_vectors: int = 0
    layer_norms: int = 0
