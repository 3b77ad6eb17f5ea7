"""Resolve the [model] section to an Architecture: a preset or a config.json, with explicit sizes that override it."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import Any, cast

from seatrial.base.errors import InputError
from seatrial.job.architecture import DEEPSEEK_MIXTURE, Architecture, RopeScaling
from seatrial.job.families import family_named
from seatrial.job.finding import RuleViolation
from seatrial.job.huggingface import read_config
from seatrial.job.lora import Lora
from seatrial.job.models import family_defaults, model_presets
from seatrial.job.numbers import next_multiple
from seatrial.job.partial import Partial, UnreadableError
from seatrial.job.schema import LoraSection, ModelSection, RopeScalingSection

SIZES = tuple(field.name for field in dataclasses.fields(Architecture))
# Without these there is no model; the others have a default.
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def resolve_architecture(model: ModelSection) -> tuple[Architecture, list[RuleViolation]]:
    """The architecture of a [model] section whose paths are absolute.

    With findings, the architecture is a Partial: its readable sizes are available to the other rules.
    """
    findings: list[RuleViolation] = []
    explicit, unreadable = _explicit(model)
    base = _base(model, explicit, findings)
    if base is None:
        return cast(Architecture, Partial(explicit)), findings
    values = {**base, **explicit}
    family = values.get("family")
    if family is not None and family != base.get("family"):
        # The base's biases and norms would not make a model of this family, and its routing would be none.
        own = family_defaults(family)
        keys = (
            *family_named(family).switches,
            *("norm_topk_prob", "router_aux_loss_coef", "partial_rotary_factor"),
            *DEEPSEEK_MIXTURE,
        )
        values |= {key: explicit.get(key, own[key]) for key in keys}
    for key in unreadable:
        values.pop(key, None)
    heads = values.get("num_attention_heads")
    if heads is not None and "num_key_value_heads" not in unreadable:
        values.setdefault("num_key_value_heads", heads)
    if (
        heads is not None
        and "hidden_size" in values
        and "head_dim" not in values
        and "head_dim" not in unreadable
    ):
        if values["hidden_size"] % heads:
            findings.append(
                RuleViolation(
                    ("model.hidden_size", "model.num_attention_heads"),
                    f"hidden_size {values['hidden_size']} is not divisible by num_attention_heads {heads}, and "
                    "head_dim is not given",
                    f"use hidden_size = {next_multiple(values['hidden_size'], heads)}, or set head_dim",
                )
            )
        else:
            values["head_dim"] = values["hidden_size"] // heads
    if set(SIZES) - set(values):
        return cast(Architecture, Partial(values)), findings
    return Architecture(**values), findings


def _explicit(model: ModelSection) -> tuple[dict[str, Any], set[str]]:
    """The sizes given in the section, and those given but unreadable."""
    explicit: dict[str, Any] = {}
    unreadable: set[str] = set()
    for key in SIZES:
        try:
            value = getattr(model, key)
        except UnreadableError:
            unreadable.add(key)
            continue
        if isinstance(value, RopeScalingSection):
            value = RopeScaling(**value.model_dump())
        if isinstance(value, LoraSection):
            value = Lora.of(value.model_dump())
        if value is not None:
            explicit[key] = value
    return explicit, unreadable


def _base(
    model: ModelSection, explicit: dict[str, Any], findings: list[RuleViolation]
) -> dict[str, Any] | None:
    """The values that explicit sizes override; None if they cannot be known."""
    try:
        preset, hf = model.preset, model.hf
    except UnreadableError:
        return None
    if preset is not None and hf is not None:
        findings.append(
            RuleViolation(("model.hf",), "[model] has both `preset` and `hf`", "keep one of them")
        )
        return None
    if preset is not None:
        known = model_presets()
        if preset not in known:
            close = difflib.get_close_matches(preset.lower(), known, n=1)
            hint = f'did you mean "{close[0]}"? ' if close else ""
            findings.append(
                RuleViolation(
                    ("model.preset",), f'no built-in model "{preset}"', f"{hint}known: {', '.join(known)}"
                )
            )
            return None
        return _fields(known[preset])
    if hf is not None:
        try:
            return _fields(read_config(Path(hf)))
        except InputError as error:
            findings += [
                RuleViolation(("model.hf",), f"{d.file}: {d.message}", d.hint or "choose another model")
                for d in error.diagnostics
            ]
            return None
    missing = [key for key in REQUIRED if key not in explicit and _is_missing(model, key)]
    if missing:
        if len(missing) == len(REQUIRED):
            message = "[model] does not specify a model"
            hint = 'give preset = "qwen2.5-7b", or hf = "path/to/config.json", or the sizes ' + ", ".join(
                REQUIRED
            )
            if _is_given(model, "init_from"):
                hint = f'read the model sizes from the same folder: hf = "{model.init_from}"'
        else:
            message = f"missing in [model]: {', '.join(missing)}"
            hint = "a model given by explicit sizes needs all of " + ", ".join(REQUIRED)
        findings.append(RuleViolation(("model",), message, hint))
    return family_defaults(explicit.get("family", "qwen2"))


def _is_missing(model: ModelSection, key: str) -> bool:
    try:
        return getattr(model, key) is None
    except UnreadableError:
        return False


def _is_given(model: ModelSection, key: str) -> bool:
    try:
        return getattr(model, key) is not None
    except UnreadableError:
        return False


def _fields(architecture: Architecture) -> dict[str, Any]:
    return {key: getattr(architecture, key) for key in SIZES}
