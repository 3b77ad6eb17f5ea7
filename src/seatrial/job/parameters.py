"""The names of a model's parameters, without the model: no torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from seatrial.job.architecture import Architecture
from seatrial.job.lora import LORA_TARGETS

_ATTENTION, _MLP = LORA_TARGETS[:4], LORA_TARGETS[4:]
_ROUTER_BIAS = ".mlp.gate.e_score_correction_bias"


def is_router_bias(name: str) -> bool:
    """Whether a parameter's name is that of a router's bias: kept in fp32, whole on every rank, without a gradient."""
    return name.endswith(_ROUTER_BIAS)


def trained_names(arch: Architecture, layers: Iterable[object] | None = None) -> Iterator[str]:
    """The names of all parameters that are trained, as `model/decoder.py` has them: with LoRA those of the adapters.

    `layers`: what stands for the numbers of the layers, if not all of them.
    """
    if arch.lora is None:
        yield from ("model.embed_tokens.weight", "model.norm.weight")
        if not arch.tie_word_embeddings:
            yield "lm_head.weight"
    own, dense = _of_layer(arch), _of_layer(arch.dense)
    for number in range(arch.num_hidden_layers) if layers is None else layers:
        of_this = dense if number in range(arch.first_k_dense_replace) else own
        yield from (f"model.layers.{number}.{name}" for name in of_this)


def _of_layer(arch: Architecture) -> list[str]:
    linear = [f"self_attn.{name}" for name in _ATTENTION]
    linear += [] if arch.num_experts else [f"mlp.{name}" for name in _MLP]
    if arch.lora is not None:
        adapted = [name for name in linear if name.partition(".")[2] in arch.lora.targets]
        return [f"{name}.lora_{matrix}.weight" for name in adapted for matrix in "AB"]
    names = [f"{name}.weight" for name in (*linear, "input_layernorm", "post_attention_layernorm")]
    names += [f"self_attn.{name}.bias" for name in _ATTENTION[:3] if arch.qkv_bias]
    names += [f"self_attn.{name}.weight" for name in ("q_norm", "k_norm") if arch.qk_norm]
    if arch.num_experts:
        names += ["mlp.gate.weight", *(f"mlp.experts.{name}" for name in _MLP)]
    if arch.n_shared_experts:
        names += [f"mlp.shared_experts.{name}.weight" for name in _MLP]
    return names
