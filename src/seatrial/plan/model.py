"""What a model is to the planner: the sizes that its work and memory follow from. No weight, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from seatrial.job.architecture import Architecture


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer. It also describes models of other stacks: MLPs without a gate, learned positions."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True  # SwiGLU: two matrices into the MLP; otherwise one
    tied: bool = False
    layer_vectors: int = 0  # parameters of one layer outside matrix products: norms, biases
    layer_whole: int = 0  # those of them that tensor parallel does not cut: norms
    positions: int = 0  # learned position embeddings

    @classmethod
    def of(cls, arch: Architecture) -> Model:
        """The model of a job."""
        return cls(
            layers=arch.num_hidden_layers,
            hidden=arch.hidden_size,
            ffn=arch.intermediate_size,
            heads=arch.num_attention_heads,
            kv_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            vocab=arch.vocab_size,
            tied=arch.tie_word_embeddings,
            layer_vectors=arch.layer_parameters() - arch.layer_matrix_parameters(),
            layer_whole=2 * arch.hidden_size + (2 * arch.head_dim if arch.qk_norm else 0),
        )

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def ffn_in(self) -> int:
        """Columns of the products into the MLP."""
        return (2 if self.gated else 1) * self.ffn

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(input width, output width) of one layer's matrix products: qkv, attention output, into and out of the MLP."""
        h = self.hidden
        return (
            (h, self.query_width + 2 * self.kv_width),
            (self.query_width, h),
            (h, self.ffn_in),
            (self.ffn, h),
        )

    def layer_matrix_parameters(self) -> int:
        return self._layer_matrix_parameters

    @cached_property
    def _layer_matrix_parameters(self) -> int:
        return sum(a * b for a, b in self.matrices())

    def layer_parameters(self) -> int:
        return self.layer_matrix_parameters() + self.layer_vectors

    def layer_share(self, tensor: int) -> float:
        """Parameters of one layer on a tensor-parallel rank."""
        return (self.layer_parameters() - self.layer_whole) / tensor + self.layer_whole

    def embedding_parameters(self) -> int:
        """Of one of embedding and head."""
        return self.vocab * self.hidden

    def parameters(self) -> int:
        """All of them; a tied embedding counts once. As `Architecture.parameters`, with learned positions."""
        ends = self.embedding_parameters() * (1 if self.tied else 2) + self.hidden * (1 + self.positions)
        return ends + self.layers * self.layer_parameters()

    def matmul_parameters(self) -> int:
        """Parameters in matrix products: the input embedding excluded, the output head included."""
        return self.layers * self.layer_matrix_parameters() + self.embedding_parameters()

    def attention_flops(self, sequence: int, *, causal: bool = True) -> float:
        """FLOPs of one layer's two attention products for one sequence, forward: 4 T^2 N H, half of that if causal."""
        full = 4.0 * sequence * sequence * self.query_width
        return full / 2 if causal else full

    def flops_per_token(self, sequence: int, *, full_attention: bool = False) -> float:
        """Model FLOPs a token, forward and backward, without recomputation; as `Architecture.flops_per_token`."""
        attention = self.attention_flops(sequence, causal=not full_attention) / sequence
        return 6.0 * self.matmul_parameters() + 3 * self.layers * attention
