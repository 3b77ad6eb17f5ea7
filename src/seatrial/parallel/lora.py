"""Adapters under tensor parallel: what crosses the ranks is the product with A, `rank` values a position.

Where a layer's outputs are split, A x of this rank's positions is gathered, and each rank multiplies all of it with its
rows of B. Where the inputs are split, products with this rank's columns of A are summed and scattered, and each rank
multiplies its positions with the whole B. So A, or B, has seen this rank's positions only: its gradient is summed over
the group with those of the norms (`tensor.split_dimension`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seatrial.model.decoder import Projections
from seatrial.model.lora import LoraLinear
from seatrial.parallel.collectives import (
    AllGatherPositions,
    ReduceScatterPositions,
    all_gather_positions_op,
    reduce_scatter_positions_op,
)
from seatrial.parallel.overlap_grad import Overlap, RowParallelLinear


def adapted(project: Projections, overlap: Overlap, *, in_order: bool) -> Projections:
    """`project` of `overlap`, plus the adapters of those projections that have one; `in_order`: as `project`'s results."""

    def projected(x_BtD: Tensor, *linears: nn.Module) -> list[Tensor]:
        outs = list(project(x_BtD, *linears))
        chosen = {i: linear for i, linear in enumerate(linears) if isinstance(linear, LoraLinear)}
        if not chosen:
            return outs
        # One all-gather for all of them.
        low_BtR = torch.cat([linear.lora_A(x_BtD) for linear in chosen.values()], dim=-1)
        if torch.compiler.is_compiling():
            low_BTR = all_gather_positions_op(low_BtR, overlap.name)
        else:
            low_BTR = AllGatherPositions.apply(low_BtR, overlap.group)
        if not in_order:
            cut = overlap.cut(x_BtD.shape[0], x_BtD.shape[1])
            low_BTR = cut.in_parts(low_BTR).view(low_BTR.shape)
        each = low_BTR.chunk(len(chosen), dim=-1)
        for (i, linear), low_BTr in zip(chosen.items(), each, strict=True):
            outs[i] = outs[i] + linear.scale * linear.lora_B(low_BTr)
        return outs

    return projected


def row_parallel(linear: nn.Module, overlap: Overlap, *, in_order: bool) -> RowParallelLinear:
    """The replacement of a projection with split input features; with its adapter, if it has one."""
    if isinstance(linear, LoraLinear):
        return _LoraRowParallelLinear(linear, overlap, in_order=in_order)
    return RowParallelLinear(linear.get_parameter("weight"), overlap, in_order=in_order)


class _LoraRowParallelLinear(RowParallelLinear):
    def __init__(self, linear: LoraLinear, overlap: Overlap, *, in_order: bool) -> None:
        super().__init__(linear.get_parameter("weight"), overlap, in_order=in_order)
        self.lora_A, self.lora_B, self.scale = linear.lora_A, linear.lora_B, linear.scale

    def forward(self, h_BTO: Tensor) -> Tensor:
        low_BTr = self.lora_A(h_BTO)
        overlap = self._overlap
        if not self._in_order:
            cut = overlap.cut(low_BTr.shape[0], low_BTr.shape[1] // overlap.ranks)
            low_BTr = cut.in_order(low_BTr.flatten(0, 1))
        if torch.compiler.is_compiling():
            low_Btr = reduce_scatter_positions_op(low_BTr, overlap.name)
        else:
            low_Btr = ReduceScatterPositions.apply(low_BTr, overlap.group)
        return self.scale * self.lora_B(low_Btr) + super().forward(h_BTO)  # in this order: as in `LoraLinear`
