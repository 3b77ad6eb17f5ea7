"""The sizes of a decoder: everything about a model that is not a weight. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from seatrial.hardware.catalogue import FLASH_HEAD_DIM
from seatrial.job.lora import Lora

# The fields of a mixture of experts.
MIXTURE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "router_aux_loss_coef",
)
# Those that only families with `sigmoid_router` have, and what they are in the others.
DEEPSEEK_MIXTURE: dict[str, Any] = {
    "first_k_dense_replace": 0,
    "n_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}


_LATER = DEEPSEEK_MIXTURE | {"sigmoid_router": False, "partial_rotary_factor": 1.0}


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

    `family` names an entry of `job/families.py`, which says how Hugging Face files are written. Differences between
    families are separate fields, so that the decoder reads fields, never the family.
    """

    family: str
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
    qkv_bias: bool  # q, k and v projections have a bias
    qk_norm: bool  # RMSNorm over head_dim of each query and key head
    rope_scaling: RopeScaling | None = None
    initializer_range: float = 0.02
    # With experts, every layer but the first `first_k_dense_replace` has a mixture of them in place of one MLP that is
    # `intermediate_size` wide. What is said here of "one layer" is said of these.
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False  # the weights of a token's experts are scaled to add up to 1
    router_aux_loss_coef: float = 0.0
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0  # further experts to which every token is sent: one MLP of their width together
    # DeepSeek-V3's routing (arXiv:2412.19437, section 2.1.2): a score is a sigmoid, and experts are chosen by score + a bias
    # that has no gradient and is not counted as a parameter (`train/router_bias.py`).
    sigmoid_router: bool = False
    n_group: int = 1  # the experts of a token are chosen from the best `topk_group` of so many groups of them
    topk_group: int = 1
    routed_scaling_factor: float = 1.0  # on the weights of a token's experts
    partial_rotary_factor: float = 1.0  # part of each head that RoPE rotates, from its begin
    lora: Lora | None = None  # adapters; then only they are trained

    # A model of another stack has other values of these four (`plan/model/other_model.py`). They are no fields: no job
    # can choose them, and recorded architectures do not have them.

    @cached_property
    def dense(self) -> Architecture:
        """A model all of whose layers are as those without experts."""
        none: dict[str, Any] = dict.fromkeys(
            ("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 0
        )
        return dataclasses.replace(self, **none, **DEEPSEEK_MIXTURE, sigmoid_router=False)

    @property
    def sparse_layers(self) -> int:
        """Layers with experts, if the model has any; all, if it has none."""
        return self.num_hidden_layers - self.first_k_dense_replace

    def _over_layers(self, of: Callable[[Architecture], int]) -> int:
        """The sum over all layers."""
        dense = self.first_k_dense_replace
        return self.sparse_layers * of(self) + (dense * of(self.dense) if dense else 0)

    @property
    def gated(self) -> bool:
        """Whether two matrices lead into the MLP (SwiGLU) rather than one."""
        return True

    @property
    def learned_positions(self) -> int:
        """Positions that have an embedding."""
        return 0

    @property
    def layer_norms(self) -> int:
        """Parameters of one layer's norms."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def layer_replicated(self) -> int:
        """Parameters of one layer that tensor parallel does not split: norms and the router."""
        return self.layer_norms + self.router_parameters

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router."""
        return self.hidden_size * self.num_experts

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def shared_width(self) -> int:
        """Width of the MLP that the shared experts are."""
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def rotary_width(self) -> int:
        """How much of a head RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_vectors(self) -> int:
        """Parameters of one layer outside matrix products: norms and biases."""
        return self.layer_norms + (self.query_width + 2 * self.kv_width if self.qkv_bias else 0)

    @property
    def flash_heads(self) -> bool:
        """Whether CUDA's flash attention takes heads of this width as they are."""
        return self.head_dim % 8 == 0 and self.head_dim <= FLASH_HEAD_DIM

    @property
    def query_width(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_key_value_heads * self.head_dim

    @property
    def ffn_in(self) -> int:
        """Columns of the products into the MLP."""
        return (2 if self.gated else 1) * self.ffn_width

    @property
    def ffn_width(self) -> int:
        """Width of the MLP that a token passes through: with experts, of all that it is sent to together, shared ones too."""
        return (
            self.num_experts_per_tok * self.moe_intermediate_size + self.shared_width
            if self.num_experts
            else self.intermediate_size
        )

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """(input width, output width) of a token's matrix products in a layer.

        qkv, attention output, into and out of the MLP; with experts, into and out of those it is sent to, and the router.
        """
        h = self.hidden_size
        products = (
            (h, self.query_width + 2 * self.kv_width),
            (self.query_width, h),
            (h, self.ffn_in),
            (self.ffn_width, h),
        )
        return (*products, (h, self.num_experts)) if self.num_experts else products

    def projections(self) -> dict[str, tuple[int, int]]:
        """(input width, output width) of a layer's linear layers by name, in the order of `lora.LORA_TARGETS`."""
        h, q, kv, f = self.hidden_size, self.query_width, self.kv_width, self.intermediate_size
        into = {"q_proj": (h, q), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        return into | {"gate_proj": (h, f), "up_proj": (h, f), "down_proj": (f, h)}

    def adapter_parameters(self, tensor: int = 1) -> int:
        """Parameters of one layer's adapters on one of `tensor` tensor-parallel ranks.

        Where the layer's outputs are split, so is B; where its inputs are, so is A. The other one is whole on each rank.
        """
        if self.lora is None:
            return 0
        total = 0
        for target in self.lora.targets:
            a, b = self.projections()[target]
            a, b = (a // tensor, b) if target in ("o_proj", "down_proj") else (a, b // tensor)
            total += self.lora.rank * (a + b)
        return total

    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer in a token's matrix products, without adapters."""
        return self._layer_matrix_parameters

    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, without adapters."""
        return self._layer_parameters

    # Cached: a search of layouts asks some hundred thousand times.

    @cached_property
    def _layer_matrix_parameters(self) -> int:
        return sum(a * b for a, b in self.matrices())

    @cached_property
    def _layer_parameters(self) -> int:
        return self._layer_matrix_parameters + self._layer_idle_parameters + self.layer_vectors

    @property
    def _layer_idle_parameters(self) -> int:
        """Parameters of the experts of one layer that a token is not sent to."""
        return (self.num_experts - self.num_experts_per_tok) * self.expert_parameters

    def hidden_matrices(self) -> tuple[tuple[int, int, int], ...]:
        """(outputs, inputs, how many) of one layer's weights that are matrices: of each expert its own; without adapters."""
        own = tuple((b, a, 1) for a, b in self.projections().values())
        if not self.num_experts:
            return own
        h, width, n = self.hidden_size, self.moe_intermediate_size, self.num_experts
        shared = ((self.shared_width, h, 2), (h, self.shared_width, 1)) if self.n_shared_experts else ()
        return (*own[:4], (width, h, 2 * n), (h, width, n), (n, h, 1), *shared)

    def hidden_matrix_parameters(self) -> int:
        """Parameters of all layers' matrices, idle experts included."""
        return self._over_layers(lambda kind: kind.layer_parameters() - kind.layer_vectors)

    def embedding_parameters(self) -> int:
        """Parameters of the embedding; those of the head are as many."""
        return self.vocab_size * self.hidden_size

    def parameters(self) -> int:
        """All parameters, adapters included; a tied embedding counts once."""
        ends = self.embedding_parameters() * (1 if self.tie_word_embeddings else 2)
        ends += self.hidden_size * (1 + self.learned_positions)
        adapters = self.num_hidden_layers * self.adapter_parameters()
        return ends + self._over_layers(Architecture.layer_parameters) + adapters

    def trained_parameters(self) -> int:
        """Parameters that have gradients and optimizer state: all, or with LoRA those of the adapters."""
        return self.parameters() if self.lora is None else self.num_hidden_layers * self.adapter_parameters()

    @property
    def base(self) -> Architecture:
        """The same model without adapters."""
        return self if self.lora is None else dataclasses.replace(self, lora=None)

    def active_parameters(self) -> int:
        """All parameters that one token uses: without the experts that it is not sent to."""
        return self.parameters() - self.sparse_layers * self._layer_idle_parameters

    def matmul_parameters(self) -> int:
        """Parameters in a token's matrix products: the input embedding and adapters excluded, the output head included."""
        return self._over_layers(Architecture.layer_matrix_parameters) + self.embedding_parameters()

    def attention_flops(self, sequence_length: int, *, causal: bool = True) -> float:
        """FLOPs of one layer's two attention products for one sequence, forward: 4 T^2 N H, half of that if causal."""
        full = 4.0 * sequence_length * sequence_length * self.query_width
        return full / 2 if causal else full

    def flops_per_token(self, sequence_length: int, *, full_attention: bool = False) -> float:
        """Model FLOPs a token costs in training, forward and backward; recomputation does not count.

        6 x parameters in matrix products + 6 x layers x heads x head_dim x sequence (causal attention: half of the
        score matrix), or 12 instead of that 6 with `full_attention`, the convention of the PaLM paper
        (arXiv:2204.02311, appendix B) that many published numbers use. With LoRA frozen parameters count 4 x instead: they
        have no weight gradients. What needs no input gradient in the first layer does not count either.
        """
        attention = self.attention_flops(sequence_length, causal=not full_attention) / sequence_length
        return (
            6.0 * self.matmul_parameters() + 3 * self.num_hidden_layers * attention - self._frozen(attention)
        )

    def _frozen(self, attention: float) -> float:
        """How much less a token costs with LoRA, FLOPs; `attention`: forward, of one layer."""
        if self.lora is None:
            return 0.0
        adapters = 6.0 * self.num_hidden_layers * self.adapter_parameters()
        unneeded = self.first_layer_unneeded()
        return 2.0 * (self.matmul_parameters() + unneeded[0]) + 2 * attention * (unneeded[1] > 1) - adapters

    def first_layer_unneeded(self) -> tuple[int, int]:
        """With LoRA: what has no input gradient in the first layer, because nothing before it is trained.

        (parameters of the matrix products, A included; how many of the four steps: q, k and v; o; gate and up; down).
        Attention has no backward pass where that is more than one.
        """
        assert self.lora is not None
        widths, unneeded = self.projections(), 0
        steps = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
        for number, names in enumerate(steps, 1):
            unneeded += sum(a * b for a, b in (widths[name] for name in names))
            if adapted := [name for name in names if name in self.lora.targets]:
                return unneeded + self.lora.rank * sum(widths[name][0] for name in adapted), number
        raise ValueError("LoRA without targets")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for plan.json and manifests; `from_dict` reads them back.

        Nothing is said of experts, adapters and later fields that a model does not have: records made before these fields
        existed stay equal.
        """
        values = dataclasses.asdict(self)
        values = {key: value for key, value in values.items() if key not in _LATER or value != _LATER[key]}
        if not self.num_experts:
            values = {key: value for key, value in values.items() if key not in MIXTURE}
        if self.lora is None:
            del values["lora"]
        else:
            values["lora"]["targets"] = list(self.lora.targets)  # as JSON and TOML have it
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Architecture:
        """The inverse of `as_dict`."""
        values = dict(values)
        if values.get("rope_scaling") is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        if values.get("lora") is not None:
            values["lora"] = Lora.of(values["lora"])
        return cls(**values)
