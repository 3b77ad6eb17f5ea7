"""Which positions each rank of a context-parallel group computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.bias import CausalVariant

from seatrial.job.layout import Layout
from seatrial.model.decoder import attention, document_bias
from seatrial.parallel.context import _LowerRight, in_order, lower_right, own_positions

SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("size", SIZES)
def test_gathered_positions_are_put_in_order(size: int) -> None:
    whole_BTE = torch.arange(2 * 48 * 3).view(2, 48, 3)
    parts = [own_positions(whole_BTE, 1, size=size, rank=rank) for rank in range(size)]
    assert torch.equal(in_order(torch.cat(parts, 1), size), whole_BTE)


@pytest.mark.parametrize("size", SIZES)
def test_causal_attention_is_the_same_work_on_every_rank(size: int) -> None:
    """Position p attends to p + 1 positions."""
    position_T = torch.arange(48)
    work = {int((own_positions(position_T, 0, size=size, rank=rank) + 1).sum()) for rank in range(size)}
    assert work == {48 * 49 // 2 // size}


@pytest.mark.parametrize("size", SIZES)
def test_the_document_bias_has_the_rows_of_its_positions(size: int) -> None:
    document_BT = (torch.rand(2, 48, generator=torch.Generator().manual_seed(1)) < 0.1).cumsum(1)
    whole = document_bias(document_BT, torch.float32)
    for rank in range(size):

        def own(x: torch.Tensor, dim: int, rank: int = rank) -> torch.Tensor:
            return own_positions(x, dim, size=size, rank=rank)

        assert torch.equal(document_bias(document_BT, torch.float32, own), own(whole, 2))


def test_the_mask_for_gpus_is_the_one_that_is_built() -> None:
    generator = torch.Generator().manual_seed(1)
    q_BTNH = torch.randn(2, 8, 4, 16, generator=generator)
    k_BTKH, v_BTKH = torch.randn(2, 2, 24, 2, 16, generator=generator)
    mask = _LowerRight(CausalVariant.LOWER_RIGHT, 8, 24)
    assert mask.untyped_storage().nbytes() == 0
    known, built = (attention(q_BTNH, k_BTKH, v_BTKH, m) for m in (mask, lower_right(8, 24)))
    assert torch.equal(known, built)
    whole = attention(torch.cat((torch.zeros(2, 16, 4, 16), q_BTNH), 1), k_BTKH, v_BTKH)
    torch.testing.assert_close(built, whole[:, -8:])


def test_layout_with_context() -> None:
    """Its ranks are neighbours after tensor; it shards the states with `shard`, and sees no other samples."""
    layout = Layout(pipeline=2, replicate=2, shard=6, tensor=2, context=3)
    assert (layout.world_size, layout.sample_shards, layout.data_parallel) == (48, 2, 4)
    assert str(layout) == "tensor 2 x pipeline 2 x context 3 x shard 2 x replicate 2, 1f1b"
    assert Layout.from_dict(layout.as_dict()) == layout
    older = {key: value for key, value in layout.as_dict().items() if key != "context"}
    assert Layout.from_dict(older) == replace(layout, context=1)
