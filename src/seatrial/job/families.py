"""Families of models: how published families differ; the built-in ones and those of other packages. Without torch.

All are decoders as `model/decoder.py` computes them. A family chooses among that decoder's switches, gives defaults,
and says how its Hugging Face files name things. What tensor parallel cuts belongs to the decoder's parameters, and so
is the same in every family.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from seatrial.base.registry import Registry


@dataclass(frozen=True, eq=False)  # equal if it is the same, so that its tables need not be hashed
class ModelFamily:
    """A family of models. The name under which it is registered is `model_type` in its config.json."""

    causal_lm: str  # "Qwen2ForCausalLM", in `architectures` of config.json
    qkv_bias: bool = False  # q, k and v projections have a bias
    qk_norm: bool = False  # RMSNorm over head_dim of each query and key head
    experts: bool = False  # each layer has a mixture of experts in place of one MLP
    sigmoid_router: bool = False  # its experts are chosen as in DeepSeek-V3
    # Defaults of keys in [model], for a model by explicit sizes.
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    partial_rotary_factor: float = 1.0  # another value than 1: its models may have any
    # Further keys of its config.json with the only value that the decoder computes; a file with another is refused.
    config: Mapping[str, Any] = field(default_factory=dict)
    # What its configuration class takes for a key that a file lacks, where that is not what `huggingface.py` takes.
    config_defaults: Mapping[str, Any] = field(default_factory=dict)
    # Files may have layers beyond num_hidden_layers, which predict tokens further ahead: they are not read, nor written.
    layers_beyond: bool = False
    kv_heads_optional: bool = False  # a file without num_key_value_heads means: as many as query heads
    # Names in its files, where they differ. Key of config.json -> its own (a switch with one here is not the same in all
    # models of the family: above is what a file without the key means); parameter -> its own, with `*` for the layer:
    # "model.layers.*.mlp.up_proj.weight" -> "transformer.h.*.mlp.c_fc_1.weight".
    config_names: Mapping[str, str] = field(default_factory=dict)
    tensor_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def switches(self) -> dict[str, bool]:
        """The fields of Architecture that a family decides; a model may, too, where `config_names` has one."""
        return {"qkv_bias": self.qkv_bias, "qk_norm": self.qk_norm, "sigmoid_router": self.sigmoid_router}

    @property
    def fixed_switches(self) -> dict[str, bool]:
        """Those that are the same in all models of the family."""
        return {key: value for key, value in self.switches.items() if key not in self.config_names}

    @property
    def free_switches(self) -> list[str]:
        """Those that a model's config.json says."""
        return [key for key in self.switches if key in self.config_names]

    def tensor_name(self, name: str) -> str:
        """The name in the family's files of the decoder's parameter `name`."""
        layer = re.search(r"(?<=\.)\d+(?=\.)", name)
        if layer is None:
            return self.tensor_names.get(name, name)
        any_layer = f"{name[: layer.start()]}*{name[layer.end() :]}"
        return self.tensor_names.get(any_layer, any_layer).replace("*", layer[0])


FAMILIES = Registry(
    "model family",
    "seatrial.model_families",
    {
        "qwen2": ModelFamily(
            "Qwen2ForCausalLM",
            qkv_bias=True,
            config={"use_sliding_window": False, "sliding_window": None},
        ),
        "llama": ModelFamily(
            "LlamaForCausalLM",
            rope_theta=5e5,
            rms_norm_eps=1e-5,
            config={"attention_bias": False, "mlp_bias": False},
            kv_heads_optional=True,
        ),
        "qwen3": ModelFamily(
            "Qwen3ForCausalLM",
            qk_norm=True,
            config={"attention_bias": False, "use_sliding_window": False, "sliding_window": None},
            config_defaults={"head_dim": 128},
        ),
        "qwen3_moe": ModelFamily(
            "Qwen3MoeForCausalLM",
            qk_norm=True,
            experts=True,
            config={
                "attention_bias": False,
                "use_sliding_window": False,
                "sliding_window": None,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            config_defaults={
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "router_aux_loss_coef": 0.001,
            },
        ),
        "glm4_moe": ModelFamily(
            "Glm4MoeForCausalLM",
            experts=True,
            sigmoid_router=True,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            config={"num_nextn_predict_layers": 0},
            layers_beyond=True,
            config_defaults={
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 1408,
                "norm_topk_prob": True,
                "n_shared_experts": 1,
                "first_k_dense_replace": 1,
                "rms_norm_eps": 1e-5,
            },
            config_names={
                "num_experts": "n_routed_experts",
                "qkv_bias": "attention_bias",
                "qk_norm": "use_qk_norm",
            },
        ),
    },
    of=ModelFamily,
)
# Cached: a search asks for every layout, and looking for other packages takes milliseconds.
family_named = cache(FAMILIES.named)
