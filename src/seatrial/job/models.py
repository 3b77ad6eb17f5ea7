"""Model presets (models.toml) and the defaults of a family."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

from seatrial.job.architecture import DEEPSEEK_MIXTURE, Architecture, RopeScaling
from seatrial.job.families import family_named


def family_defaults(name: str) -> dict[str, Any]:
    """What a family's published models have in common; the default where explicit sizes are not given."""
    family = family_named(name)
    return {
        "family": name,
        "max_position_embeddings": 32768,
        "rope_theta": family.rope_theta,
        "rms_norm_eps": family.rms_norm_eps,
        "tie_word_embeddings": family.tie_word_embeddings,
        **family.switches,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "norm_topk_prob": family.experts,
        "router_aux_loss_coef": 0.001 if family.experts and not family.sigmoid_router else 0.0,
        **DEEPSEEK_MIXTURE,
        "n_shared_experts": 1 if family.sigmoid_router else 0,
        "partial_rotary_factor": family.partial_rotary_factor,
        "lora": None,
    }


@functools.cache
def _read() -> dict[str, Architecture]:
    text = (resources.files("seatrial.job") / "models.toml").read_text(encoding="utf-8")
    found = {}
    for name, sizes in tomllib.loads(text).items():
        values = family_defaults(sizes["family"]) | sizes
        if values["rope_scaling"] is not None:
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        found[name] = Architecture(**values)
    return found


def model_presets() -> dict[str, Architecture]:
    """The built-in models by name, in the order of models.toml."""
    return dict(_read())
