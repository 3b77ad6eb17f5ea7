"""Small models of each family, and the same models in transformers, which is the oracle here."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch

from seatrial.base.box import Box
from seatrial.job.architecture import DEEPSEEK_MIXTURE, MIXTURE, Architecture, RopeScaling
from seatrial.job.parameters import is_router_bias
from seatrial.model.decoder import whole_shapes

# With this context, theta and head width the wavelengths lie in all three ranges of the scaling:
# kept (below 16 positions), blended (16 to 64) and divided (above 64).
LLAMA3_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def _case(family: str, heads: int, kv_heads: int, head_dim: int, vocab: int, **changes: Any) -> Architecture:
    values: dict[str, Any] = {
        "family": family,
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "rope_theta": 10_000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "qkv_bias": family == "qwen2",
        "qk_norm": family.startswith("qwen3"),
    }
    return Architecture(**(values | changes))


# With random weights some of so many experts get no position of a microbatch, and others many.
EXPERTS: dict[str, Any] = {
    "num_experts": 24,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.05,
}

DEEPSEEK: dict[str, Any] = {
    **EXPERTS,
    "router_aux_loss_coef": 0.0,  # transformers has no such loss for them
    "sigmoid_router": True,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen2-mha": _case("qwen2", 4, 4, 12, 263),
    "qwen2-gqa2-tied": _case("qwen2", 4, 2, 16, 257, tie_word_embeddings=True, rope_theta=1e6),
    "qwen2-mqa": _case("qwen2", 6, 1, 8, 259, num_hidden_layers=3, rms_norm_eps=1e-5),
    "llama-mha-tied": _case("llama", 4, 4, 16, 263, tie_word_embeddings=True, rms_norm_eps=1e-5),
    "llama-gqa4": _case("llama", 8, 2, 8, 257, rms_norm_eps=1e-5),
    "llama3-gqa2": _case("llama", 4, 2, 16, 263, rope_scaling=LLAMA3_ROPE),
    "llama3-mqa-tied": _case("llama", 4, 1, 16, 261, rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True),
    # In Qwen3 the width of a head is a choice of its own: not hidden / heads.
    "qwen3-gqa4": _case("qwen3", 4, 1, 16, 257, hidden_size=40),
    "qwen3-gqa2-tied": _case("qwen3", 6, 3, 12, 263, hidden_size=48, tie_word_embeddings=True),
    "qwen3-mha": _case("qwen3", 2, 2, 32, 263, hidden_size=40, num_hidden_layers=3),
    "qwen3-moe-gqa2": _case("qwen3_moe", 4, 2, 16, 257, hidden_size=40, **EXPERTS),
    "qwen3-moe-tied": _case(
        "qwen3_moe", 4, 2, 16, 263, tie_word_embeddings=True, **(EXPERTS | {"norm_topk_prob": False})
    ),
    "glm4-moe-groups": _case("glm4_moe", 4, 2, 16, 257, **DEEPSEEK, qk_norm=True, n_group=6, topk_group=2),
    "glm4-moe-bias": _case(
        "glm4_moe", 4, 4, 16, 263, hidden_size=40, qkv_bias=True, **(DEEPSEEK | {"norm_topk_prob": False})
    ),
    "glm4-moe-dense-first": _case(
        "glm4_moe", 4, 2, 16, 257, **(DEEPSEEK | {"num_hidden_layers": 4, "first_k_dense_replace": 1})
    ),
    "mistral-gqa4": _case("mistral", 4, 1, 16, 257, hidden_size=40, rms_norm_eps=1e-5),  # of examples/
}


class DictWeights:
    """A weight source over tensors in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        return self.tensors[name][box.slices()].to(dtype)


def random_tensors(arch: Architecture, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights that hide nothing: biases are not 0, norms are not 1, and attention is far from uniform."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in whole_shapes(arch).items():
        noise = torch.randn(shape, generator=random)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.3 * noise
        elif name.endswith(".bias") or is_router_bias(name):
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise / shape[-1] ** 0.5
    return tensors


class Oracle:
    """The classes of transformers that the tests need, imported once (several seconds)."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            # Importing somebody else's package: what it deprecates inside is not ours to fail on.
            warnings.simplefilter("ignore")
            import transformers
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        self.auto = transformers.AutoModelForCausalLM
        self._classes = {
            "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
            "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
            "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
            "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
            "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        }

    def config(self, arch: Architecture) -> Any:
        """transformers' configuration, written here by hand: not by the code under test."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": arch.rope_theta}
        if arch.rope_scaling is not None:
            rope |= vars(arch.rope_scaling) | {"rope_type": "llama3"}
        config_class, _ = self._classes[arch.family]
        mixture = {key: getattr(arch, key) for key in MIXTURE} if arch.num_experts else {}
        if arch.family == "glm4_moe":
            rope["partial_rotary_factor"] = arch.partial_rotary_factor
            mixture |= {key: getattr(arch, key) for key in DEEPSEEK_MIXTURE}
            mixture |= {"attention_bias": arch.qkv_bias, "use_qk_norm": arch.qk_norm}
            mixture |= {"n_routed_experts": mixture.pop("num_experts"), "num_nextn_predict_layers": 0}
        return config_class(
            **mixture,
            vocab_size=arch.vocab_size,
            hidden_size=arch.hidden_size,
            intermediate_size=arch.intermediate_size,
            num_hidden_layers=arch.num_hidden_layers,
            num_attention_heads=arch.num_attention_heads,
            num_key_value_heads=arch.num_key_value_heads,
            head_dim=arch.head_dim,
            max_position_embeddings=arch.max_position_embeddings,
            rope_parameters=rope,
            rms_norm_eps=arch.rms_norm_eps,
            sliding_window=None,  # Mistral's default is one of 4096 positions
            tie_word_embeddings=arch.tie_word_embeddings,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )

    def model(
        self, arch: Architecture, tensors: dict[str, torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> Any:
        """transformers' model with these weights, with the same attention kernel as ours."""
        config = self.config(arch)
        config._attn_implementation = "sdpa"
        model = self._classes[arch.family][1](config)
        missing, unexpected = model.load_state_dict(self.joined(tensors), strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        biases = {name: b.clone() for name, b in model.named_buffers() if is_router_bias(name)}
        model = model.to(dtype)
        for name, bias in biases.items():  # as `from_pretrained` leaves them
            model.get_submodule(name.rpartition(".")[0]).e_score_correction_bias = bias
        # `to` rounds the rotary frequencies as well, which `from_pretrained(dtype=...)` leaves in fp32.
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        return model.train()

    @staticmethod
    def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The same with the experts' gate and up matrices in one parameter, as transformers has them."""
        out = dict(tensors)
        for name in tensors:
            if name.endswith(".experts.gate_proj"):
                up = name.replace("gate_proj", "up_proj")
                out[name.replace("gate_proj", "gate_up_proj")] = torch.cat((out.pop(name), out.pop(up)), 1)
        return out

    def save(self, model: Any, folder: Path, **options: Any) -> None:
        """`save_pretrained`."""
        with warnings.catch_warnings():
            # transformers 5.23 leaves the index it reads back unclosed.
            warnings.filterwarnings("ignore", message="unclosed file .*index.json", category=ResourceWarning)
            model.save_pretrained(folder, **options)

    def load(self, folder: Path) -> Any:
        """`from_pretrained` in the dtype of the files; every weight must be found, and none be left over."""
        model, report = self.auto.from_pretrained(
            folder, dtype="auto", attn_implementation="sdpa", output_loading_info=True
        )
        assert not any(report.values()), report
        return model


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit (`torch.equal` takes -0.0 for 0.0)."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    )


def _grouped_flops(one: tuple[int, ...], other: tuple[int, ...], *_: object, **__: object) -> int:
    """Of [S, D] x [X, D, F], and of the weights' gradient [D, S] x [S, F]."""
    return 2 * math.prod(one) * other[-1]


# For FlopCounterMode, which does not count it.
GROUPED = {torch.ops.aten._grouped_mm: _grouped_flops}
