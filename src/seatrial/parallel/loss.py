"""Chunked cross-entropy of the head: logits, softmax and gradients of one part of the positions at a time.

A part has `job.loss_rows` positions. Its logits are computed once, in the backward pass, and overwritten first by their
exponentials, then by their gradient. So the loss is known after the backward pass; without gradients it is computed in the forward pass.
Weight gradients are accumulated over the parts in the weight's dtype.

    c  positions of a part      R  positions of this rank (B t)      V  this rank's columns of the vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from seatrial.data.loader import NO_TARGET
from seatrial.job.loss_rows import loss_rows
from seatrial.parallel.collectives import all_gather_single, needs_grad, reduce_scatter_single


def cross_entropy(
    x_BtD: Tensor,
    weight_VD: Tensor,
    target_BT: Tensor,
    *,
    tokens: Tensor,
    group: ProcessGroup | None,
    rank: int,
) -> Tensor:
    """-log softmax(x weight^T)[target] in nats, fp64, summed over the targets that are not `NO_TARGET`.

    With gradients the sum is divided by `tokens` (an fp64 scalar whose value the backward pass reads), and is
    NaN until that has run. With a `group`, a rank holds T/n positions and V/n rows of the weight (Megatron-LM,
    arXiv:1909.08053, section 3); all return the same value.
    """
    if torch.is_grad_enabled():
        # A view: it has an autograd node of its own, which a leaf has not, see `needs_grad`.
        args = (x_BtD, weight_VD.view_as(weight_VD), target_BT, tokens, group, rank)
        return _CrossEntropy.apply(*args)
    total = x_BtD.new_zeros((), dtype=torch.float64)
    for _, rows_cD, target_c in _parts(x_BtD, target_BT, weight_VD.shape[0], group):
        total += _Softmax(rows_cD, weight_VD, target_c, group, rank).loss
    return total


class LoadBalancing:
    """Switch Transformer's loss that spreads positions over the experts (arXiv:2101.03961), as transformers computes it.

    Of a microbatch, over all layers together: experts x the sum over experts of (share of positions sent there) x (mean
    probability). It is `num_experts_per_tok` where all experts get the same. Its gradient is that of the mean over the
    microbatches of the global batch, times the coefficient; the loss that a stage returns stays the cross-entropy.
    """

    def __init__(
        self, coefficient: float, *, rows: int, ranks: int, group: ProcessGroup | None = None
    ) -> None:
        """`rows`: positions of a microbatch times layers.

        All `ranks` of a tensor group compute it, and their gradients are added. The ranks of `group` have parts of the
        positions (context parallel).
        """
        self._factor, self._rows, self._group = coefficient / ranks, rows, group
        self.share = 0.0  # of a microbatch in the global batch of this step
        # This rank's share, of the microbatches so far, of the mean over the global batch.
        self.total: Tensor | float = 0.0

    def __call__(self, x_BTD: Tensor, routed_2X: Tensor) -> Tensor:
        if self._group is not None:
            routed_2X = _OfAllPositions.apply(routed_2X, self._group)
        count_X, probability_X = routed_2X / self._rows
        loss = len(count_X) * (count_X * probability_X).sum()
        self.total = self.total + loss.detach().double() * self.share
        return _WithGradientOf.apply(x_BTD, loss * (self._factor * self.share))


class _OfAllPositions(torch.autograd.Function):
    """The sum over the group. Its gradient stays in each rank, for its own positions: all compute the same loss."""

    @staticmethod
    def forward(ctx: Any, routed_2X: Tensor, group: ProcessGroup) -> Tensor:
        whole_2X = routed_2X.clone()
        dist.all_reduce(whole_2X, group=group)
        return whole_2X

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _WithGradientOf(torch.autograd.Function):
    """Returns its first argument; in the backward pass the second, a scalar, has the gradient of a summand of the loss."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, loss: Tensor) -> Tensor:
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].new_ones((), dtype=torch.float32)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BtD: Tensor,
        weight_VD: Tensor,
        target_BT: Tensor,
        tokens: Tensor,
        group: ProcessGroup | None,
        rank: int,
    ) -> Tensor:
        ctx.save_for_backward(x_BtD, weight_VD, target_BT)
        ctx.tokens, ctx.group, ctx.rank = tokens, group, rank
        loss = x_BtD.new_full((), math.nan, dtype=torch.float64)
        ctx.loss = loss.detach()  # the same memory, which the backward pass fills
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        x_BtD, weight_VD, target_BT = ctx.saved_tensors
        of_input, of_weight = needs_grad(ctx, 0), needs_grad(ctx, 1)
        grad_RD = torch.empty_like(x_BtD).flatten(0, 1) if of_input else None
        grad_VD = None
        ctx.loss.zero_()
        for own, rows_cD, target_c in _parts(x_BtD, target_BT, weight_VD.shape[0], ctx.group):
            softmax = _Softmax(rows_cD, weight_VD, target_c, ctx.group, ctx.rank)
            ctx.loss += softmax.loss / ctx.tokens
            grad_cV = softmax.gradient(grads[0] / ctx.tokens).to(weight_VD.dtype)
            if grad_RD is not None:
                _reduce_scatter_rows(grad_cV @ weight_VD, grad_RD[own], ctx.group)
            if grad_VD is not None:
                grad_VD.addmm_(grad_cV.t(), rows_cD)
            elif of_weight:
                grad_VD = grad_cV.t() @ rows_cD
            del softmax, grad_cV  # before the next part's are allocated
        return None if grad_RD is None else grad_RD.view_as(x_BtD), grad_VD, None, None, None, None


class _Softmax:
    """Softmax of a part's logits and its loss, at least in fp32."""

    def __init__(
        self, rows_cD: Tensor, weight_VD: Tensor, target_c: Tensor, group: ProcessGroup | None, rank: int
    ) -> None:
        logits_cV = rows_cD @ weight_VD.t()
        logits_cV = logits_cV.to(torch.promote_types(logits_cV.dtype, torch.float32))
        columns = logits_cV.shape[1]
        local_c = target_c - rank * columns
        self._inside_c = (local_c >= 0) & (local_c < columns)
        self._local_c = torch.where(self._inside_c, local_c, 0)
        self._counts_c = target_c != NO_TARGET
        largest_c = logits_cV.amax(dim=-1)
        if group is not None:
            # A NaN that MAX loses on gloo is still in this rank's exponentials, and so in the sum below.
            dist.all_reduce(largest_c, op=dist.ReduceOp.MAX, group=group)
        picked_c = logits_cV.gather(1, self._local_c[:, None])[:, 0] - largest_c
        self._exp_cV = logits_cV.sub_(largest_c[:, None]).exp_()
        sums_2c = torch.stack((self._exp_cV.sum(dim=-1), torch.where(self._inside_c, picked_c, 0.0)))
        if group is not None:
            dist.all_reduce(sums_2c, group=group)
        self._sum_c = sums_2c[0]
        self.loss = torch.where(self._counts_c, (sums_2c[0].log() - sums_2c[1]).double(), 0.0).sum()

    def gradient(self, factor: Tensor) -> Tensor:
        """`factor` times the loss's gradient by the logits; overwrites the exponentials."""
        factor_c = torch.where(self._counts_c, factor.to(self._sum_c.dtype), 0.0)
        grad_cV = self._exp_cV.mul_((factor_c / self._sum_c)[:, None])
        return grad_cV.scatter_add_(
            1, self._local_c[:, None], torch.where(self._inside_c, -factor_c, 0.0)[:, None]
        )


def _parts(
    x_BtD: Tensor, target_BT: Tensor, columns: int, group: ProcessGroup | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(this rank's positions of a part, all ranks' rows of it, their targets), part by part."""
    n = 1 if group is None else group.size()
    x_RD = x_BtD.flatten(0, 1)
    B, t = x_BtD.shape[:2]
    target_nR = target_BT.view(B, n, t).transpose(0, 1).reshape(n, B * t)
    each = max(1, loss_rows(columns, n * B * t) // n)
    for begin in range(0, B * t, each):
        own = slice(begin, begin + each)
        rows_cD = x_RD[own]
        if group is not None:
            rows_cD = x_RD.new_empty(n * rows_cD.shape[0], x_RD.shape[1])
            all_gather_single(rows_cD, x_RD[own], group=group)
        yield own, rows_cD, target_nR[:, own].flatten()


def _reduce_scatter_rows(grad_cD: Tensor, own_D: Tensor, group: ProcessGroup | None) -> None:
    """Write this rank's rows of a part's gradient, summed over the group, to `own_D`."""
    if group is None:
        own_D.copy_(grad_cD)
    else:
        reduce_scatter_single(own_D, grad_cD, group=group)
