"""The names that a job file can use, known without the model, are those of its parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from model_cases import ARCHITECTURES

from seatrial.job.lora import Lora
from seatrial.job.parameters import is_router_bias, trained_names
from seatrial.model.decoder import whole_shapes
from seatrial.model.lora import is_adapter


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_they_are_the_models(name: str) -> None:
    arch = ARCHITECTURES[name]
    frozen = filter(is_router_bias, whole_shapes(arch))
    assert sorted([*trained_names(arch), *frozen]) == sorted(whole_shapes(arch))


def test_with_lora_they_are_those_of_adapters() -> None:
    arch = replace(ARCHITECTURES["qwen2-mha"], lora=Lora(2, 4.0, ("q_proj", "down_proj")))
    assert sorted(trained_names(arch)) == sorted(filter(is_adapter, whole_shapes(arch)))
    assert next(trained_names(arch, "*")) == "model.layers.*.self_attn.q_proj.lora_A.weight"
