"""Hugging Face's config.json <-> Architecture. What we would compute differently is refused, never ignored."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from seatrial.base.errors import Diagnostic, InputError
from seatrial.base.files import parse_json, read_text
from seatrial.job.architecture import DEEPSEEK_MIXTURE, MIXTURE, Architecture, RopeScaling
from seatrial.job.families import FAMILIES, ModelFamily, family_named

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
_DTYPES = ("float32", "bfloat16", "float16")


def read_config(path: Path) -> Architecture:
    """The architecture of a config.json, or of the folder that holds one; InputError if it cannot be used."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        config = parse_json(read_text(file, links=True))
    except FileNotFoundError:
        raise InputError(
            Diagnostic("no such file", str(file), hint="give a config.json, or the folder that contains one")
        ) from None
    except OSError as error:
        raise InputError(
            Diagnostic(f"cannot be read: {error.strerror}", str(file), hint="check its permissions")
        ) from None
    except ValueError as error:
        line, column = (
            (error.lineno, error.colno) if isinstance(error, json.JSONDecodeError) else (None, None)
        )
        raise InputError(
            Diagnostic(f"not valid JSON: {error}", str(file), line, column, hint="copy the file again")
        ) from None
    if not isinstance(config, dict):
        raise InputError(Diagnostic("not a model's config.json: not a JSON object", str(file)))
    return architecture_from_config(config, file=str(file))


def architecture_from_config(config: dict[str, Any], *, file: str = "config.json") -> Architecture:
    """The architecture that a config.json describes.

    Reads transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`). Raises InputError with all
    reasons where the model is one that the decoder does not compute.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES.names():
        raise InputError(
            Diagnostic(
                f'model_type "{kind}" is not supported' if kind else "config.json has no model_type",
                file,
                hint=f"supported are {', '.join(FAMILIES.names())}: text decoders; no image input",
            )
        )
    try:
        family = family_named(kind)
    except InputError as error:  # its package is broken
        raise InputError([replace(d, file=file) for d in error.diagnostics]) from error
    if "num_local_experts" in config:  # as transformers 5 writes it
        config = {"num_experts": config["num_local_experts"], **config}
    config = {**family.config_defaults, **config}
    config |= {key: config[theirs] for key, theirs in family.config_names.items() if theirs in config}
    refusals = _malformed(config)
    if not refusals:
        missing = [key for key in _SIZES if config.get(key) is None]
        if not family.kv_heads_optional and config.get("num_key_value_heads") is None:
            missing.append("num_key_value_heads")
        refusals = [*_refusals(config, family), *(_expert_refusals(config) if family.experts else [])]
        if missing:
            refusals.append(f"missing keys: {', '.join(missing)}")
    if refusals:
        hint = "Seatrial's decoder does not support this model; choose another one"
        raise InputError([Diagnostic(reason, file, hint=hint) for reason in refusals])
    heads = config["num_attention_heads"]
    rope = _rope(config)

    def value(key: str, otherwise: Any) -> Any:
        """A key that is missing or null takes the default of transformers' own configuration classes."""
        return config.get(key) or family.config_defaults.get(key) or otherwise

    return Architecture(
        family=kind,
        **{key: config[key] for key in _SIZES},
        num_key_value_heads=value("num_key_value_heads", heads),
        head_dim=value("head_dim", config["hidden_size"] // heads),
        rope_theta=float(rope.get("rope_theta") or value("rope_theta", 10000.0)),
        rms_norm_eps=float(value("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        **family.fixed_switches,
        **{key: bool(config.get(key, family.switches[key])) for key in family.free_switches},
        rope_scaling=_rope_scaling(rope),
        partial_rotary_factor=float(_partial_rotary(config) or 1.0),
        initializer_range=float(value("initializer_range", 0.02)),
        **(_experts(config, family) if family.experts else {}),
        lora=None,
    )


def _experts(config: dict[str, Any], family: ModelFamily) -> dict[str, Any]:
    coefficient = config.get("router_aux_loss_coef")
    found = {
        **{key: config[key] for key in _EXPERTS},
        "norm_topk_prob": bool(config.get("norm_topk_prob", False)),
        "router_aux_loss_coef": float(coefficient or 0.0),
    }
    if family.sigmoid_router:
        found |= {key: type(usual)(config.get(key) or usual) for key, usual in DEEPSEEK_MIXTURE.items()}
    return found


def _expert_refusals(config: dict[str, Any]) -> list[str]:
    found = [f"{key} is null" for key in _EXPERTS if config[key] is None]
    if not found and config["num_experts_per_tok"] > config["num_experts"]:
        found.append(
            f"num_experts_per_tok = {config['num_experts_per_tok']} is more than num_experts = {config['num_experts']}"
        )
    both = config.get("num_local_experts", config["num_experts"]), config["num_experts"]
    if both[0] != both[1]:
        found.append(f"num_local_experts = {both[0]} and num_experts = {both[1]} are two names of one size")
    return found


_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_INTEGERS = (
    *_SIZES,
    *_EXPERTS,
    *(key for key, usual in DEEPSEEK_MIXTURE.items() if type(usual) is int),
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "max_window_layers",
)
_MAY_BE_0 = ("max_window_layers", "first_k_dense_replace")
_NUMBERS = (
    "rope_theta",
    "rms_norm_eps",
    "initializer_range",
    "routed_scaling_factor",
    "partial_rotary_factor",
)
_ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _malformed(config: dict[str, Any]) -> list[str]:
    """Values that are not even of the right kind."""
    found = [
        f"{key} must be {'0 or a positive integer,' if key in _MAY_BE_0 else 'a positive integer,'} not {json.dumps(config[key])}"
        for key in _INTEGERS
        if config.get(key) is not None
        and (type(config[key]) is not int or config[key] < (key not in _MAY_BE_0))
    ]
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) is not None and not isinstance(config[key], dict):
            return [*found, f"{key} must be an object, not {json.dumps(config[key])}"]
    if config.get("layer_types") is not None and not isinstance(config["layer_types"], list):
        found.append("layer_types must be an array")
    rope = _rope(config)
    numbers = [(config, key) for key in _NUMBERS]
    numbers += [(rope, key) for key in ("rope_theta", "partial_rotary_factor", *_ROPE_SCALING)]
    found += [
        f"{key} must be a positive number, not {json.dumps(table[key])}"
        for table, key in numbers
        if table.get(key) is not None and not _is_positive(table[key])
    ]
    coefficient = config.get("router_aux_loss_coef")
    if coefficient is not None and coefficient != 0 and not _is_positive(coefficient):
        found.append(f"router_aux_loss_coef must be a number, not negative, and is {json.dumps(coefficient)}")
    return found


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it, or as version 4 did."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    if _rope_type(rope) == "default":
        return None
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position_embeddings=int(rope["original_max_position_embeddings"]),
    )


def _rope_type(rope: dict[str, Any]) -> Any:
    return rope.get("rope_type") or rope.get("type") or "default"


def _partial_rotary(config: dict[str, Any]) -> Any:
    return _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _rope_refusals(config: dict[str, Any], family: ModelFamily) -> list[str]:
    rope, found = _rope(config), []
    partial = _partial_rotary(config)
    if partial not in (None, 1) and family.partial_rotary_factor == 1:
        found.append(f"partial_rotary_factor = {partial} is not supported in this family, only 1")
    kind = _rope_type(rope)
    if kind not in ("default", "llama3"):
        found.append(f'rope_type "{kind}" is not supported, only "default" and "llama3"')
    elif kind == "llama3":
        missing = [key for key in _ROPE_SCALING if rope.get(key) is None]
        if missing:
            found.append(f"the llama3 RoPE scaling is missing {', '.join(missing)}")
    return found


def _refusals(config: dict[str, Any], family: ModelFamily) -> list[str]:
    """Everything in a config.json of the family that the decoder does not support."""
    found = []
    if config.get("hidden_act", "silu") != "silu":
        found.append(f'hidden_act "{config["hidden_act"]}" is not supported, only "silu"')
    for key, only in family.config.items():
        if key not in (*_WINDOW, _BEYOND) and config.get(key) not in (None, only):
            found.append(f"{key} = {json.dumps(config[key])} is not supported, only {json.dumps(only)}")
    if config.get("attention_dropout"):
        found.append(f"attention_dropout = {config['attention_dropout']} is not supported, only 0")
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(key) and not family.experts:
            found.append(f"{key} = {config[key]}: models of this family have no experts")
    if config.get("quantization_config"):
        found.append("quantization_config: the weights are quantised; training needs the original ones")
    if _slides(config):
        found.append(f"sliding_window = {config['sliding_window']} is used: only full attention is supported")
    strange = sorted(set(map(str, config.get("layer_types") or [])) - {"full_attention", "sliding_attention"})
    if strange:
        found.append(f"layer_types {', '.join(strange)}: only full attention is supported")
    return found + _rope_refusals(config, family)


_WINDOW = ("use_sliding_window", "sliding_window")  # judged together
_BEYOND = "num_nextn_predict_layers"  # any number: see `ModelFamily.layers_beyond`


def _slides(config: dict[str, Any]) -> bool:
    """Whether a layer uses sliding-window attention; Qwen's files contain the window even when it is off."""
    if config.get("layer_types"):
        return "sliding_attention" in config["layer_types"] and config.get("sliding_window") is not None
    if not config.get("use_sliding_window") or config.get("sliding_window") is None:
        return False
    first = config.get("max_window_layers")
    return bool((28 if first is None else first) < (config.get("num_hidden_layers") or 0))


def config_from_architecture(architecture: Architecture, dtype: str = "bfloat16") -> dict[str, Any]:
    """The config.json of an architecture, for weights saved as `dtype` ("float32", "bfloat16", "float16").

    Readable by transformers 4 and 5. Token ids belong to the tokenizer: they are null here. Raises InputError
    for a model that no published family has.
    """
    a = architecture
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {_DTYPES}, not {dtype!r}")
    family = family_named(a.family)
    if other := [key for key, usual in family.fixed_switches.items() if getattr(a, key) != usual]:
        raise InputError(
            f'a model of family "{a.family}" with {" and ".join(f"{key} = {getattr(a, key)}" for key in other)} has no '
            "config.json: transformers does not support it",
            hint=f"models of this family have {' and '.join(f'{key} = {family.switches[key]}' for key in other)}",
        )
    scaling: dict[str, Any] | None = None
    if a.rope_scaling is not None:
        scaling = {
            "rope_type": "llama3",
            "factor": a.rope_scaling.factor,
            "low_freq_factor": a.rope_scaling.low_freq_factor,
            "high_freq_factor": a.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": a.rope_scaling.original_max_position_embeddings,
        }
    partial = {} if family.partial_rotary_factor == 1 else {"partial_rotary_factor": a.partial_rotary_factor}
    config: dict[str, Any] = {
        "architectures": [family.causal_lm],
        "model_type": a.family,
        **{key: getattr(a, key) for key in _SIZES},
        "num_key_value_heads": a.num_key_value_heads,
        "head_dim": a.head_dim,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "rms_norm_eps": a.rms_norm_eps,
        "initializer_range": a.initializer_range,
        "tie_word_embeddings": a.tie_word_embeddings,
        # transformers 5 reads rope_parameters, version 4 and most servers the other two.
        "rope_parameters": {"rope_theta": a.rope_theta, **(scaling or {"rope_type": "default"}), **partial},
        "rope_theta": a.rope_theta,
        "rope_scaling": scaling,
        "use_cache": True,
        # Explicit, because LlamaConfig would otherwise fill in Llama 2's 1 and 2.
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": dtype,
        "torch_dtype": dtype,
        **({key: getattr(a, key) for key in MIXTURE} if family.experts else {}),
        **({key: getattr(a, key) for key in DEEPSEEK_MIXTURE} if family.sigmoid_router else {}),
        **{key: getattr(a, key) for key in family.free_switches},
        **partial,
        **family.config,
    }
    return {family.config_names.get(key, key): value for key, value in config.items()}
