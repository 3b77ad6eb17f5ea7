"""Cross-entropy of whole logits or of logits split over the vocabulary: summed for training, by token for validation."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


class _SplitCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target], each rank holding V/n columns (Megatron-LM, arXiv:1909.08053, section 3)."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, target_n: Tensor, first_id: int, group: ProcessGroup) -> Tensor:
        exp_nv, local_n, inside_n, sums_2n = _split_sums(logits_nv, target_n, first_id, group)
        ctx.save_for_backward(exp_nv.div_(sums_2n[0, :, None]), local_n, inside_n)
        return (sums_2n[0].log() - sums_2n[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        softmax_nv, local_n, inside_n = ctx.saved_tensors
        grad_nv = softmax_nv * grads[0]
        grad_nv.scatter_add_(1, local_n[:, None], torch.where(inside_n, -grads[0], 0.0)[:, None])
        return grad_nv, None, None, None


def _split_sums(
    logits_nv: Tensor, target_n: Tensor, first_id: int, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(exponentials, targets among this rank's columns, whether they are, [sum of exponentials, target's logit])."""
    largest_n = logits_nv.amax(dim=-1)
    # A NaN that MAX loses on gloo is still in this rank's exponentials, and so in the sum below.
    dist.all_reduce(largest_n, op=dist.ReduceOp.MAX, group=group)
    exp_nv = (logits_nv - largest_n[:, None]).exp_()
    local_n = target_n - first_id
    inside_n = (local_n >= 0) & (local_n < logits_nv.shape[-1])
    local_n = torch.where(inside_n, local_n, 0)
    picked_n = logits_nv.gather(1, local_n[:, None])[:, 0] - largest_n
    sums_2n = torch.stack((exp_nv.sum(dim=-1), torch.where(inside_n, picked_n, 0.0)))
    dist.all_reduce(sums_2n, group=group)
    return exp_nv, local_n, inside_n, sums_2n


def token_loss(logits_BTV: Tensor, target_BT: Tensor, group: ProcessGroup | None, rank: int) -> Tensor:
    """Sum over tokens of the cross-entropy in nats, fp32; the same value in every rank of the tensor group.

    With a `group`, `logits_BTV` holds this rank's V/n columns.
    """
    logits_nv = logits_BTV.flatten(0, 1).float()
    target_n = target_BT.flatten()
    if group is None:
        return F.cross_entropy(logits_nv, target_n, reduction="sum")
    return _SplitCrossEntropy.apply(logits_nv, target_n, rank * logits_nv.shape[-1], group)


NO_TARGET = -1  # a position that does not count in a validation


def validation_loss(logits_BTV: Tensor, target_BT: Tensor, group: ProcessGroup | None, rank: int) -> Tensor:
    """As `token_loss` over the targets that are not `NO_TARGET`, added up in fp64; without gradients."""
    logits_nv = logits_BTV.flatten(0, 1).float()
    target_n = target_BT.flatten()
    if group is None:
        loss_n = F.cross_entropy(logits_nv, target_n, reduction="none", ignore_index=NO_TARGET)
    else:
        _, _, _, sums_2n = _split_sums(logits_nv, target_n, rank * logits_nv.shape[-1], group)
        loss_n = sums_2n[0].log() - sums_2n[1]
    return torch.where(target_n == NO_TARGET, 0.0, loss_n.double()).sum()
