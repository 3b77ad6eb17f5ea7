"""Model presets (models.toml) and the defaults of a family."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any

from seatrial.job.architecture import Architecture, RopeScaling


def family_defaults(family: str) -> dict[str, Any]:
    """What a family's published models have in common; the default where explicit sizes are not given."""
    llama = family == "llama"
    return {
        "family": family,
        "max_position_embeddings": 32768,
        "rope_theta": 5e5 if llama else 1e6,
        "rms_norm_eps": 1e-5 if llama else 1e-6,
        "tie_word_embeddings": False,
        "qkv_bias": family == "qwen2",
        "qk_norm": family == "qwen3",
        "rope_scaling": None,
        "initializer_range": 0.02,
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
