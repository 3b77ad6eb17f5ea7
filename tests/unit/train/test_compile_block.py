"""Which parts of a layer torch.compile gets."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rank_cases import ARCH
from torch import Tensor
from torch._dynamo.utils import counters

from seatrial.model.decoder import Block
from seatrial.parallel.build import compile_block
from seatrial.parallel.recompute import keep_products

LAYER = replace(
    ARCH,
    family="glm4_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    n_shared_experts=1,
)


def gradients(block: Block) -> list[Tensor]:
    """Of a loss of its output, and of its balance, after two uses."""
    torch.manual_seed(1)
    angle_TH = torch.randn(8, LAYER.head_dim)
    for _ in range(2):
        x_BTD = torch.randn(2, 8, LAYER.hidden_size)
        out_BTD, routed_2X = block(x_BTD, angle_TH.cos(), angle_TH.sin())
        (out_BTD.square().sum() + routed_2X[1].square().sum()).backward()
    return [p.grad for p in block.parameters() if p.grad is not None]


# torch makes an instance of the norm's autograd function while it traces a layer, against its own advice.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
# The compiler looks at `.grad` of inner tensors, whatever they are.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("recomputes", ["none", "full", "selective"])
def test_three_parts_of_a_layer_with_experts_are_compiled(recomputes: str) -> None:
    """Attention with both norms, the experts' activation, and the shared experts; with the same result."""
    torch.manual_seed(0)
    block = Block(LAYER, sparse=True)
    with torch.no_grad():
        for values in block.parameters():
            values.copy_(torch.randn(values.shape) / 8)
    expected = gradients(block)
    block.zero_grad()
    block.recompute = recomputes != "none"
    if recomputes == "selective":
        keep_products(block, [LAYER.moe_intermediate_size, LAYER.shared_width], None)
    compile_block(block, "aot_eager")
    torch.compiler.reset()
    counters.clear()
    found = gradients(block)
    assert counters["stats"]["unique_graphs"] == 3
    assert len(found) == len(expected) > 8
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
