"""Parameters and FLOPs of a model, against formulas and models of other stacks counted by hand."""

from __future__ import annotations

import pytest
from plan_cases import OtherModel

from seatrial.job.models import model_presets
from seatrial.plan.cost.memory import layer_share

PRESETS = model_presets()


@pytest.mark.parametrize("name", list(PRESETS))
def test_flops_match_the_formula(name: str) -> None:
    model = PRESETS[name]
    width = model.num_hidden_layers * model.num_attention_heads * model.head_dim
    for length in (256, 3000, 4096, 131072):
        for full, factor in ((False, 6), (True, 12)):
            flops = 6.0 * model.matmul_parameters() + factor * width * length
            assert model.flops_per_token(length, full_attention=full) == flops


def test_a_gpt_without_gate() -> None:
    """Megatron's 39.1B (arXiv:2104.04473, table 1): 12 L h^2 in matrices and V h in the tied embedding."""
    model = OtherModel(
        num_hidden_layers=48,
        hidden_size=8192,
        intermediate_size=32768,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
        vocab_size=51200,
        gated=False,
        tie_word_embeddings=True,
        layer_vectors=13 * 8192,
        learned_positions=2048,
    )
    assert model.layer_matrix_parameters() == 12 * 8192**2
    assert model.parameters() == pytest.approx(39.1e9, rel=0.005)


def test_tensor_parallel_splits_all_but_norms() -> None:
    model = PRESETS["qwen2.5-72b"]
    assert layer_share(model, 1) == model.layer_parameters()
    assert 8 * layer_share(model, 8) == model.layer_parameters() + 7 * model.layer_norms
    assert model.layer_norms == 2 * model.hidden_size
