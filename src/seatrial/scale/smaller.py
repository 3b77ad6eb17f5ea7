"""A smaller model of the same shape: fewer heads and layers, narrower, with the same head size. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from seatrial.job import Job
from seatrial.job.architecture import Architecture
from seatrial.job.changed import Change
from seatrial.job.loading import job_from_text
from seatrial.job.rules_layout import EXPERT_UNIT


def smaller(model: Architecture, factor: float, *, tensor: int, stages: int) -> Architecture:
    """`model` with heads, widths and layers scaled by `factor`, 0 < factor < 1, as closely as its layout allows.

    Heads stay multiples of `tensor` and keep their number per key/value head where `tensor` allows it; hidden size stays
    in proportion to the heads. Layers stay a multiple of `stages`, the pipeline stages of all ranks, if they were, and
    at least `stages`; the first stage keeps a layer with experts. Nothing grows.
    """
    kv = _near(model.num_key_value_heads * factor, tensor, model.num_key_value_heads)
    heads = _near(model.num_attention_heads * factor, kv, model.num_attention_heads)
    hidden = model.hidden_size * heads // model.num_attention_heads
    whole = model.num_hidden_layers % stages == 0
    layers = _near(model.num_hidden_layers * factor, stages if whole else 1, model.num_hidden_layers)
    layers = max(layers, min(stages, model.num_hidden_layers))
    return replace(
        model,
        num_key_value_heads=kv,
        num_attention_heads=heads,
        hidden_size=hidden,
        intermediate_size=_near(model.intermediate_size * factor, tensor, model.intermediate_size),
        moe_intermediate_size=_near(
            model.moe_intermediate_size * factor, EXPERT_UNIT * tensor, model.moe_intermediate_size
        ),
        num_hidden_layers=layers,
        first_k_dense_replace=min(model.first_k_dense_replace, layers // stages - 1),
    )


def _near(wanted: float, unit: int, most: int) -> int:
    """The multiple of `unit` nearest to `wanted`, from `unit` to `most`; `most` if `unit` is larger."""
    if unit > most:
        return most
    return min(max(1, math.floor(wanted / unit + 0.5)), most // unit) * unit


def smaller_changes(job: Job, factor: float) -> tuple[Change, ...]:
    """The keys of [model] that differ in the smaller model."""
    layout = job.layout
    stages = layout.pipeline * layout.stages_per_rank
    less = smaller(job.architecture, factor, tensor=layout.tensor, stages=stages)
    why = f"--model-scale {factor:g}"
    old, new = job.architecture.as_dict(), asdict(less) | less.as_dict()
    found = [Change(f"model.{key}", old[key], new[key], why) for key in old if old[key] != new[key]]
    if job.model.init_from is not None:
        found.append(Change("model.init_from", job.model.init_from, None, "its weights do not fit"))
    return tuple(found)


def with_changes(job: Job, changes: Sequence[Change]) -> Job:
    """`job` with `changes` applied. Raises InputError if the result is invalid."""
    sizes = {c.key.partition(".")[2]: c.copy for c in changes if c.key != "model.init_from"}
    model = job.file.model.model_copy(update={"init_from": None})
    file = job.file.model_copy(update={"model": model})
    text = Job(file, replace(job.architecture, **sizes), job.layout, job.source).to_toml()
    return job_from_text(text, name=f"the smaller copy of {job.source}", base_folder=Path.cwd())
