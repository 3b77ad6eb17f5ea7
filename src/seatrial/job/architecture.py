"""The sizes of a decoder: everything about a model that is not a weight. No torch here."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["qwen2", "llama", "qwen3"]


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency-dependent RoPE scaling (`rope_type = "llama3"` in config.json)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """One decoder-only transformer. Names follow Hugging Face's config.json.

    `family` says which published model it is, and so how config.json is written. What differs between them
    stands in fields of its own, so that the decoder reads fields, never the family.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool  # Qwen2: q, k and v projections have a bias
    qk_norm: bool  # Qwen3: RMSNorm over head_dim of each query and key head
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02

    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        return self.layer_matrix_parameters() + self._layer_vector_parameters()

    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer that stand in matrix products."""
        h, d = self.hidden_size, self.head_dim
        heads, kv = self.num_attention_heads, self.num_key_value_heads
        return h * heads * d * 2 + h * kv * d * 2 + 3 * h * self.intermediate_size

    def _layer_vector_parameters(self) -> int:
        d = self.head_dim
        n = 2 * self.hidden_size
        if self.qkv_bias:
            n += (self.num_attention_heads + 2 * self.num_key_value_heads) * d
        if self.qk_norm:
            n += 2 * d
        return n

    def parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * self.layer_parameters() + self.hidden_size

    def matmul_parameters(self) -> int:
        """Parameters in matrix products: the input embedding excluded, the output head included."""
        return self.num_hidden_layers * self.layer_matrix_parameters() + self.vocab_size * self.hidden_size

    def flops_per_token(self, sequence_length: int, *, full_attention: bool = False) -> float:
        """Model FLOPs a token costs in training, forward and backward; recomputation does not count.

        6 x parameters in matrix products + 6 x layers x heads x head_dim x sequence (causal attention: half of the
        score matrix), or 12 instead of that 6 with `full_attention`, the convention of the PaLM paper
        (arXiv:2204.02311, appendix B) that many published numbers use.
        """
        attention = 12 if full_attention else 6
        return (
            6.0 * self.matmul_parameters()
            + attention * self.num_hidden_layers * self.num_attention_heads * self.head_dim * sequence_length
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for plan.json and manifests; `from_dict` reads them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Architecture:
        """The inverse of `as_dict`."""
        values = dict(values)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        return cls(**values)
