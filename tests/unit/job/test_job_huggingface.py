"""config.json: what transformers writes is read, what we write transformers reads as the same model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seatrial.base.errors import InputError
from seatrial.job import model_presets
from seatrial.job.architecture import Architecture
from seatrial.job.huggingface import architecture_from_config, config_from_architecture, read_config

TINY = model_presets()["qwen2.5-tiny"]
MODELS = ["qwen2.5-tiny", "qwen2.5-72b", "llama3-8b", "llama3.2-1b", "qwen3-8b"]


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_through_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    architecture = model_presets()[name]
    ours = config_from_architecture(architecture, "float32")
    (tmp_path / "config.json").write_text(json.dumps(ours))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__ == ours["architectures"][0].replace("ForCausalLM", "Config")
    assert str(theirs.dtype) == "torch.float32"
    assert theirs.rope_parameters == ours["rope_parameters"]
    assert theirs.rope_parameters["rope_theta"] == architecture.rope_theta
    for key in ("vocab_size", "hidden_size", "num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(theirs, key) == getattr(architecture, key)
    assert theirs.head_dim == architecture.head_dim
    theirs.save_pretrained(tmp_path / "theirs")
    assert read_config(tmp_path / "theirs") == architecture


@pytest.mark.parametrize("name", model_presets())
def test_round_trip_of_our_own(name: str) -> None:
    architecture = model_presets()[name]
    assert architecture_from_config(config_from_architecture(architecture)) == architecture


# As published for meta-llama/Llama-3.1-8B: written by transformers 4.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
# As published for Qwen/Qwen2.5-72B: the window is there but off.
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "initializer_range": 0.02,
    "intermediate_size": 29568,
    "max_position_embeddings": 131072,
    "max_window_layers": 80,
    "model_type": "qwen2",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(("config", "preset"), [(LLAMA_31, "llama3.1-8b"), (QWEN_25, "qwen2.5-72b")])
def test_published_files_are_our_presets(config: dict[str, Any], preset: str) -> None:
    assert architecture_from_config(config) == model_presets()[preset]


def read(config: dict[str, Any], **changes: Any) -> Architecture:
    return architecture_from_config({**config, **changes})


def test_missing_keys_mean_what_transformers_means() -> None:
    small = {
        key: LLAMA_31[key]
        for key in ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                    "num_attention_heads", "max_position_embeddings")
    }  # fmt: skip
    a = architecture_from_config(small)
    assert (a.num_key_value_heads, a.head_dim, a.rope_theta, a.rms_norm_eps) == (32, 128, 10000.0, 1e-6)
    assert (a.rope_scaling, a.tie_word_embeddings) == (None, False)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN_25, {"model_type": "qwen2_moe"}, 'model_type "qwen2_moe" is not supported'),
        (QWEN_25, {"model_type": None}, "config.json has no model_type"),
        (QWEN_25, {"use_sliding_window": True, "max_window_layers": 40}, "sliding_window = 131072 is used"),
        (
            QWEN_25,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window = 131072 is used",
        ),
        (QWEN_25, {"layer_types": ["linear_attention"]}, "layer_types linear_attention"),
        (QWEN_25, {"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported'),
        (QWEN_25, {"num_experts": 8}, "models of this family have no experts"),
        (QWEN_25, {"quantization_config": {"bits": 4}}, "the weights are quantised"),
        (QWEN_25, {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        (QWEN_25, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_type "yarn" is not supported'),
        (QWEN_25, {"rope_parameters": {"rope_type": "dynamic"}}, 'rope_type "dynamic" is not supported'),
        (QWEN_25, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        (QWEN_25, {"hidden_size": "8192"}, 'hidden_size must be a positive integer, not "8192"'),
        (LLAMA_31, {"attention_bias": True}, "attention_bias = true"),
        (LLAMA_31, {"mlp_bias": True}, "mlp_bias = true"),
        (LLAMA_31, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "missing low_freq_factor"),
    ],
)
def test_what_we_would_compute_differently_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        read(config, **changes)
    assert any(message in d.message for d in caught.value.diagnostics)
    assert all(d.hint for d in caught.value.diagnostics)


def test_a_window_that_no_layer_uses_is_read() -> None:
    assert read(QWEN_25, use_sliding_window=True, max_window_layers=80) == model_presets()["qwen2.5-72b"]


def test_all_reasons_are_reported_at_once() -> None:
    with pytest.raises(InputError) as caught:
        read(LLAMA_31, mlp_bias=True, hidden_act="relu")
    assert len(caught.value.diagnostics) == 2


def test_missing_sizes_are_listed() -> None:
    config = {
        key: value for key, value in QWEN_25.items() if key not in ("hidden_size", "num_key_value_heads")
    }
    with pytest.raises(InputError, match="missing keys: hidden_size, num_key_value_heads"):
        architecture_from_config(config)


def test_a_model_of_no_published_family_is_not_written() -> None:
    mixed = Architecture.from_dict({**TINY.as_dict(), "qk_norm": True})
    with pytest.raises(InputError, match="transformers does not support it"):
        config_from_architecture(mixed)


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.sampled_from(["default", "llama3", "x"]),
    st.lists(st.sampled_from(["full_attention", 3]), max_size=2),
    st.dictionaries(st.sampled_from(["rope_type", "factor", "rope_theta", "low_freq_factor"]), st.integers(-1, 9) | st.text()),
)  # fmt: skip
KEYS = st.sampled_from(
    [*LLAMA_31, "head_dim", "rope_parameters", "layer_types", "sliding_window", "max_window_layers"]
)


@pytest.mark.cluster  # slow
@settings(deadline=None)
@given(st.sampled_from([QWEN_25, LLAMA_31]), st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_file_is_read_or_refused_in_words(config: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        architecture = read(config, **changes)
    except InputError:
        return
    assert architecture.parameters() > 0
    assert math.isfinite(architecture.rope_theta)


QWEN_MOE = {
    **{k: v for k, v in QWEN_25.items() if k not in ("model_type", "max_window_layers")},
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def test_experts_under_both_names() -> None:
    a = architecture_from_config(QWEN_MOE)
    assert (a.num_experts, a.num_experts_per_tok, a.moe_intermediate_size) == (128, 8, 768)
    # transformers 5 writes another name.
    other = {k: v for k, v in QWEN_MOE.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert architecture_from_config(other) == a
    less = {k: v for k, v in QWEN_MOE.items() if k not in ("norm_topk_prob", "router_aux_loss_coef")}
    b = architecture_from_config(less)
    assert (b.norm_topk_prob, b.router_aux_loss_coef) == (False, 0.001)  # Qwen3MoeConfig's


GLM = {
    "model_type": "glm4_moe",
    **{key: QWEN_25[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    **{
        key: QWEN_25[key] for key in ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    },
    "n_routed_experts": 64,
    "num_nextn_predict_layers": 1,
    "n_group": 8,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


def test_deepseeks_routing() -> None:
    a = architecture_from_config(GLM)
    assert (a.num_experts, a.n_group, a.topk_group, a.routed_scaling_factor) == (64, 8, 2, 2.5)
    assert (a.qkv_bias, a.qk_norm, a.sigmoid_router, a.partial_rotary_factor) == (True, False, True, 0.25)
    # What Glm4MoeConfig takes for keys that are missing.
    assert (a.n_shared_experts, a.num_experts_per_tok, a.moe_intermediate_size) == (1, 8, 1408)
    all_sparse = architecture_from_config({**GLM, "first_k_dense_replace": 0})
    assert (a.first_k_dense_replace, all_sparse.first_k_dense_replace) == (1, 0)
    assert (a.norm_topk_prob, a.rms_norm_eps, a.router_aux_loss_coef) == (True, 1e-5, 0)
    older = {k: v for k, v in GLM.items() if k != "rope_parameters"} | {"rope_theta": 1e6}
    assert architecture_from_config(older | {"partial_rotary_factor": 0.25}) == a
    assert Architecture.from_dict(a.as_dict()) == a


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be 0 or a positive integer, not -1"),
        ({"n_group": 0}, "n_group must be a positive integer, not 0"),
        ({"routed_scaling_factor": "2"}, 'routed_scaling_factor must be a positive number, not "2"'),
    ],
)
def test_what_glm_could_have_and_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        architecture_from_config({**GLM, **changes})
    assert message in caught.value.render()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 is not supported, only 1"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers = [0] is not supported, only []"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok = 129 is more than num_experts = 128"),
        ({"num_local_experts": 64}, "num_local_experts = 64 and num_experts = 128"),
        ({"num_experts": 0}, "num_experts must be a positive integer, not 0"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is null"),
        ({"router_aux_loss_coef": -1}, "router_aux_loss_coef must be a number, not negative, and is -1"),
    ],
)
def test_experts_that_we_would_compute_differently_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        architecture_from_config({**QWEN_MOE, **changes})
    assert message in caught.value.render()
