"""A model family: Mistral 7B from version 0.2 on, and other models with `model_type = "mistral"`. `family = "mistral"` in [model]."""

from __future__ import annotations

from seatrial.job.families import ModelFamily

MISTRAL = ModelFamily(
    "MistralForCausalLM",
    rms_norm_eps=1e-5,
    config={"sliding_window": None},
    # All layers use the window unless the file has `"sliding_window": null`.
    config_defaults={"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 0},
)
