"""Expert parallel: each rank of a group holds X/n of every layer's experts, and slots are sent to the rank of their expert.

Every layer exchanges slots before and after its experts, by all-to-all, without a limit on how many a rank may get
(arXiv:2006.16668, without its capacity; "dropless": arXiv:2211.15841). The gradients go the same ways back, so the gradient of an
expert is complete on its rank, for the positions of all ranks of the group.

    n  ranks of the group      x  experts of this rank, X / n
    Q  slots of all ranks for them, sorted by expert
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from seatrial.model.decoder import Decoder, FromSlots, SparseMLP, ToSlots

Sizes = list[int]  # rows for, or from, each rank of the group


def exchange(x: Tensor, sent: Sizes, received: Sizes, group: ProcessGroup) -> Tensor:
    """The first rows of `x` to the first rank, the next to the next; returns the rows from all of them. No gradient."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _Exchange(torch.autograd.Function):
    """`exchange`. Its gradient is that of the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sizes, received: Sizes, group: ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        return exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(grads[0], *ctx.back), None, None, None


def split_sizes(sent_nx: Tensor, received_nx: Tensor, rows: int) -> tuple[Sizes, Sizes]:
    """How many rows are sent to, and received from, each rank; `rows` are sent in all. Waits for the device.

    A dry run, which has no numbers, replaces it (`train.dryrun.kernels`).
    """
    sent, received = torch.stack((sent_nx.sum(1), received_nx.sum(1))).tolist()
    return sent, received


class SpreadExperts:
    """Applies a layer's experts, which are on all ranks of the group, to the slots of this rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, experts: nn.Module, x_SD: Tensor, weight_S: Tensor, end_X: Tensor) -> Tensor:
        """As `Experts.forward`, of which `experts` has those of this rank; the other arguments are of all."""
        n = self._group.size()
        sent_nx = end_X.diff(prepend=end_X.new_zeros(1)).view(n, -1)
        received_nx = torch.empty_like(sent_nx)
        dist.all_to_all_single(received_nx, sent_nx, group=self._group)
        sent, received = split_sizes(sent_nx, received_nx, len(x_SD))
        way = sent, received, self._group
        x_QD, weight_Q = _Exchange.apply(x_SD, *way), _Exchange.apply(weight_S, *way)
        # They arrive by rank, and of each rank by expert.
        expert_nx = torch.arange(received_nx.shape[1], device=x_SD.device).expand_as(received_nx)
        expert_Q = expert_nx.flatten().repeat_interleave(received_nx.flatten(), output_size=len(x_QD))
        order_Q = expert_Q.argsort(stable=True)
        slot_Q1 = order_Q.argsort()[:, None]
        end_x = received_nx.sum(0).cumsum(0).int()
        y_QD = experts(ToSlots.apply(x_QD, order_Q, slot_Q1), weight_Q.gather(0, order_Q), end_x)
        return _Exchange.apply(FromSlots.apply(y_QD, order_Q, slot_Q1), received, sent, self._group)


def apply_expert_parallel(model: Decoder, group: ProcessGroup) -> None:
    """Leave `model` (on the meta device) this rank's number of experts in each layer, and spread the slots over the group."""
    for block in model.blocks:
        if not isinstance(block.mlp, SparseMLP):
            continue
        experts = block.mlp.experts
        for name, whole in list(experts.named_parameters()):
            own = nn.Parameter(whole.detach()[: len(whole) // group.size()].clone())
            setattr(experts, name, own)
        block.mlp.spread = SpreadExperts(group)
