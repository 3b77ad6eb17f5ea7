"""A model family whose files have names of their own: EXAONE 3.0 and 3.5 compute what Llama does. `family = "exaone"` in [model].

As in https://huggingface.co/LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct.
"""

from __future__ import annotations

from seatrial.job.families import ModelFamily

_LAYER = {
    "input_layernorm": "ln_1",
    "self_attn.q_proj": "attn.attention.q_proj",
    "self_attn.k_proj": "attn.attention.k_proj",
    "self_attn.v_proj": "attn.attention.v_proj",
    "self_attn.o_proj": "attn.attention.out_proj",
    "post_attention_layernorm": "ln_2",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}

EXAONE = ModelFamily(
    "ExaoneForCausalLM",
    rms_norm_eps=1e-5,
    config={"embed_dropout": 0.0},
    config_defaults={"rms_norm_eps": 1e-5},
    kv_heads_optional=True,
    config_names={
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    tensor_names={
        "model.embed_tokens.weight": "transformer.wte.weight",
        "model.norm.weight": "transformer.ln_f.weight",
        **{f"model.layers.*.{k}.weight": f"transformer.h.*.{v}.weight" for k, v in _LAYER.items()},
    },
)
