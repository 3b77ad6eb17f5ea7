"""Autograd for the matrix products and collectives of `overlap`, as layers call them.

Two routes to the same functions. Uncompiled: autograd functions that know which gradients are requested, since a
zero-bubble pipeline requests those of the weights later. Compiled: operators opaque to the compiler, which could
otherwise move a collective behind the product that it must overlap with (`overlap_ops`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seatrial.parallel.collectives import needs_grad
from seatrial.parallel.float8 import Scaling, weight_gradient
from seatrial.parallel.overlap import (
    Cut,
    all_gather_matmul,
    all_gather_matmul_backward,
    matmul_reduce_scatter,
    matmul_reduce_scatter_backward,
)
from seatrial.parallel.overlap_ops import all_gather_matmul_op, matmul_reduce_scatter_op


class Overlap:
    """Replacement for a layer's projections: all-gather and project, or project and reduce-scatter, in one operation.

    `in_parts`: communication is overlapped with products, part by part. `opaque`: forward passes are single operators for
    dispatch modes, so that selective activation checkpointing keeps their results instead of each buffer inside.
    `scaling`: the products are in FP8 (`float8`).
    """

    def __init__(
        self, group: ProcessGroup, *, in_parts: bool, opaque: bool = False, scaling: Scaling = None
    ) -> None:
        self.group = group
        self.in_parts = in_parts
        self.opaque = opaque
        self.scaling = scaling
        self.ranks = group.size()
        self.name = group.group_name  # how a compiled layer names the group

    def cut(self, sequences: int, positions: int) -> Cut:
        """The split of a microbatch's positions, of each sequence `positions` on this rank."""
        return Cut.of(sequences, positions, self.ranks, in_parts=self.in_parts)

    def gathered_products(
        self, x_BtD: Tensor, weights: list[Tensor], biases: list[Tensor], cut: Cut
    ) -> list[Tensor]:
        """`all_gather_matmul`, without autograd."""
        if self.opaque:
            return all_gather_matmul_op(x_BtD, weights, biases, self.in_parts, self.name, self.scaling)
        return all_gather_matmul(x_BtD, weights, biases, cut, self.group, self.scaling)

    def scattered_product(self, rows_RO: Tensor, weight: Tensor, cut: Cut) -> Tensor:
        """`matmul_reduce_scatter`, without autograd."""
        if self.opaque:
            return matmul_reduce_scatter_op(
                rows_RO, weight, cut.sequences, self.in_parts, self.name, self.scaling
            )
        return matmul_reduce_scatter(rows_RO, weight, cut, self.group, self.scaling)

    def project(self, x_BtD: Tensor, *linears: nn.Module) -> list[Tensor]:
        """This rank's positions -> products of all positions with this rank's weights, rows in the order of parts.

        Each has the shape [B, T, O]; `Cut.in_order` puts its positions in order.
        """
        weights = [linear.get_parameter("weight") for linear in linears]
        biases = [linear.bias for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(weights))
        if torch.compiler.is_compiling():
            outs = all_gather_matmul_op(x_BtD, weights, biases, self.in_parts, self.name, self.scaling)
        else:
            cut = self.cut(x_BtD.shape[0], x_BtD.shape[1])
            # Transposed, as the products use them: a view of a weight has its own autograd node, see `needs_grad`.
            views = [weight.t() for weight in weights]
            outs = _AllGatherMatmul.apply(x_BtD, *views, *biases, cut, self, len(views))
        shape = (x_BtD.shape[0], x_BtD.shape[1] * self.ranks, -1)
        return [out.view(shape) for out in outs]

    def project_in_order(self, x_BtD: Tensor, *linears: nn.Module) -> list[Tensor]:
        """`project`, with the positions put in order."""
        cut = self.cut(x_BtD.shape[0], x_BtD.shape[1])
        return [cut.in_order(out) for out in self.project(x_BtD, *linears)]


class RowParallelLinear(nn.Module):
    """A projection with split input features: the products of all ranks are summed, each rank keeps its positions."""

    def __init__(self, weight: nn.Parameter, overlap: Overlap, *, in_order: bool) -> None:
        """`in_order`: the input's positions are in order; otherwise they are in the order of parts."""
        super().__init__()
        self.weight = weight
        self._overlap, self._in_order = overlap, in_order

    def forward(self, h_BTO: Tensor) -> Tensor:
        B, T, width = h_BTO.shape
        cut = self._overlap.cut(B, T // self._overlap.ranks)
        rows_RO = cut.in_parts(h_BTO) if self._in_order else h_BTO.reshape(B * T, width)
        if torch.compiler.is_compiling():
            o = self._overlap
            return matmul_reduce_scatter_op(rows_RO, self.weight, B, o.in_parts, o.name, o.scaling)
        view = self.weight.t()
        marker = _SaveForGradients.apply(rows_RO, view, cut, self._overlap)
        return _MatmulReduceScatter.apply(marker, rows_RO.detach(), view.detach(), cut, self._overlap)


class _AllGatherMatmul(torch.autograd.Function):
    """`all_gather_matmul`. Arguments: x, each weight transposed [D, O], each bias; then non-tensors."""

    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *tensors, ctx.cut, overlap, ctx.weights = rest
        views, biases = tensors[: ctx.weights], tensors[ctx.weights :]
        ctx.biased, ctx.group, ctx.scaling = bool(biases), overlap.group, overlap.scaling
        ctx.save_for_backward(x_BtD, *views)
        return tuple(overlap.gathered_products(x_BtD, [v.t() for v in views], biases, ctx.cut))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BtD, *views = ctx.saved_tensors
        of_weights = needs_grad(ctx, 1)
        of_input, of_each, of_biases = all_gather_matmul_backward(
            [grad.contiguous() for grad in grads],
            x_BtD,
            [view.t() for view in views],
            ctx.cut,
            ctx.group,
            ctx.scaling,
            of_input=needs_grad(ctx, 0),
            of_weights=of_weights,
            biased=ctx.biased,
        )
        nothing = [None] * (1 + ctx.biased) * ctx.weights
        of_tensors = [*(g.t() for g in of_each), *of_biases] if of_weights else nothing
        return of_input, *of_tensors, None, None, None


class _SaveForGradients(torch.autograd.Function):
    """Saves the tensors that the gradients of `matmul_reduce_scatter` need, and computes them; its forward is empty.

    Activation recomputation stops at the last tensor that the layer's backward pass needs. If that were saved with the
    product, the product and its reduce-scatter would be recomputed in vain.
    """

    @staticmethod
    def forward(ctx: Any, rows_RO: Tensor, view_OD: Tensor, cut: Cut, overlap: Overlap) -> Tensor:
        ctx.cut, ctx.group, ctx.scaling, ctx.gathered = cut, overlap.group, overlap.scaling, None
        ctx.save_for_backward(rows_RO, view_OD)
        # Has the result's shape without its memory: the gradient of the result flows back through it.
        return rows_RO.new_empty(()).expand(cut.sequences, cut.positions, view_OD.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows_RO, view_OD = ctx.saved_tensors
        of_rows, of_weight = needs_grad(ctx, 0), needs_grad(ctx, 1)
        grad_RO, gathered, ctx.gathered = None, ctx.gathered, None
        if of_rows or gathered is None:
            grad_RO, gathered = matmul_reduce_scatter_backward(
                grads[0], view_OD.t(), ctx.cut, ctx.group, ctx.scaling
            )
        if not of_weight:
            if ctx.needs_input_grad[1]:
                ctx.gathered = gathered  # for the later pass for the weights
            return grad_RO, None, None, None
        of_view = weight_gradient(gathered, rows_RO, ctx.scaling).t()
        return grad_RO if of_rows else None, of_view, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    """`matmul_reduce_scatter`, whose gradients `_SaveForGradients` computes."""

    @staticmethod
    def forward(
        ctx: Any, marker: Tensor, rows_RO: Tensor, view_OD: Tensor, cut: Cut, overlap: Overlap
    ) -> Tensor:
        return overlap.scattered_product(rows_RO, view_OD.t(), cut)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return grads[0], None, None, None, None
