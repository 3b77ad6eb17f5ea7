"""The planner's model against the job's, and against parameters counted by hand."""

from __future__ import annotations

import pytest

from seatrial.job.models import model_presets
from seatrial.plan.model import Model

PRESETS = model_presets()


@pytest.mark.parametrize("name", list(PRESETS))
def test_counts_are_those_of_the_architecture(name: str) -> None:
    arch, model = PRESETS[name], Model.of(PRESETS[name])
    assert model.parameters() == arch.parameters()
    assert model.matmul_parameters() == arch.matmul_parameters()
    assert model.layer_parameters() == arch.layer_parameters()
    for length in (256, 4096, 131072):
        assert model.flops_per_token(length) == pytest.approx(arch.flops_per_token(length), rel=1e-12)
        full = arch.flops_per_token(length, full_attention=True)
        assert model.flops_per_token(length, full_attention=True) == pytest.approx(full, rel=1e-12)


def test_a_gpt_without_gate() -> None:
    """Megatron's 39.1B (arXiv:2104.04473, table 1): 12 L h^2 in matrices and V h in the tied embedding."""
    model = Model(
        48, 8192, 32768, 64, 64, 128, 51200, gated=False, tied=True, layer_vectors=13 * 8192, positions=2048
    )
    assert model.layer_matrix_parameters() == 12 * 8192**2
    assert model.parameters() == pytest.approx(39.1e9, rel=0.005)


def test_tensor_parallel_cuts_all_but_norms() -> None:
    model = Model.of(PRESETS["qwen2.5-72b"])
    assert model.layer_share(1) == model.layer_parameters()
    assert 8 * model.layer_share(8) == model.layer_parameters() + 7 * model.layer_whole
    assert model.layer_whole == 2 * model.hidden
