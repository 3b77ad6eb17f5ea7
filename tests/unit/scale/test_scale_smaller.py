"""--model-scale: the smaller model keeps its shape and fits the layout."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from presets import preset_job
from seatrial.job.models import model_presets
from seatrial.scale.smaller import smaller, smaller_changes

QWEN = model_presets()["qwen2.5-72b"]


def test_a_quarter_of_qwen() -> None:
    less = smaller(QWEN, 0.25, tensor=2, stages=4)
    assert (less.num_attention_heads, less.num_key_value_heads, less.head_dim) == (16, 2, QWEN.head_dim)
    assert (less.hidden_size, less.num_hidden_layers) == (QWEN.hidden_size // 4, QWEN.num_hidden_layers // 4)
    assert less.intermediate_size == QWEN.intermediate_size // 4
    assert less.vocab_size == QWEN.vocab_size


def test_a_quarter_of_a_model_with_experts() -> None:
    whole = model_presets()["qwen3-30b-a3b"]
    less = smaller(whole, 0.25, tensor=2, stages=4)
    assert less.moe_intermediate_size == whole.moe_intermediate_size // 4
    assert (less.num_experts, less.num_experts_per_tok) == (128, 8)
    assert smaller(QWEN, 0.25, tensor=2, stages=4).moe_intermediate_size == 0


def test_each_stage_keeps_a_layer_with_experts() -> None:
    whole = model_presets()["glm-4.5"]
    assert smaller(whole, 0.25, tensor=2, stages=4).first_k_dense_replace == 3
    assert smaller(whole, 0.05, tensor=2, stages=4).first_k_dense_replace == 0
    layout = ("parallel.pipeline=4", "parallel.shard=2", "train.compile=false")
    job = preset_job("qwen2.5-7b-h200", "model.preset=glm-4.5", *layout)
    changes = {change.key: (change.job, change.copy) for change in smaller_changes(job, 0.05)}
    assert changes["model.first_k_dense_replace"] == (3, 0)


@given(
    factor=st.floats(0.001, 0.999),
    tensor=st.sampled_from([1, 2, 4, 8]),
    stages=st.integers(1, 16),
    kv=st.integers(1, 8),
    ratio=st.integers(1, 8),
    layers=st.integers(16, 100),
    width=st.integers(1, 3000),
)
def test_it_fits_the_layout_and_nothing_grows(
    factor: float, tensor: int, stages: int, kv: int, ratio: int, layers: int, width: int
) -> None:
    kv_heads = kv * tensor
    model = replace(
        QWEN,
        num_key_value_heads=kv_heads,
        num_attention_heads=kv_heads * ratio,
        hidden_size=kv_heads * ratio * QWEN.head_dim,
        intermediate_size=width * tensor,
        num_hidden_layers=layers,
    )
    less = smaller(model, factor, tensor=tensor, stages=stages)
    assert less.num_key_value_heads % tensor == less.intermediate_size % tensor == 0
    assert less.num_attention_heads % less.num_key_value_heads == 0
    assert less.hidden_size == less.num_attention_heads * model.head_dim
    assert less.num_hidden_layers >= stages
    assert layers % stages or less.num_hidden_layers % stages == 0
    old, new = model.as_dict(), less.as_dict()
    assert all(old[k] == new[k] or 0 < new[k] < old[k] for k in old)
