"""Differentiable collectives over plain local tensors.

Tensor parallel here computes on local tensors with explicit communication, instead of sending every operation through
DTensor's dispatch: the same results, several times less overhead on small models, and no sharding propagation in the
first step.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

# torch 2.13 renamed these two and deprecates the old names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def wait(work: Any) -> None:
    """Wait for a collective in flight. A separate function, by which `supervision.flight` recognises such a wait."""
    work.wait()


class _BroadcastsInFlight(dist.Work):
    """A gloo all-gather in flight: each rank broadcasts its part of the output.

    A subclass of torch's `Work`, because FSDP2 waits for nothing else, and a zero-bubble schedule gathers asynchronously.
    """

    def __init__(self, output: Tensor, input: Tensor, group: ProcessGroup) -> None:
        super().__init__()
        parts = output.chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input.data_ptr():  # FSDP2's is in its place
            own.copy_(input)
        self._works = [
            dist.broadcast(part, group=group, group_src=rank, async_op=True)
            for rank, part in enumerate(parts)
        ]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True


class _SumInFlight:
    """A gloo reduce-scatter in flight: all ranks' rows for this rank are on their way, and are added up once they are waited for."""

    def __init__(self, output: Tensor, input: Tensor, group: ProcessGroup) -> None:
        self._output, self._received, self._sent = output, torch.empty_like(input), input
        self._work = dist.all_to_all_single(self._received, input, group=group, async_op=True)
        self._ranks = group.size()

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._received.view(self._ranks, *self._output.shape), 0, out=self._output)


def all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
    """Put each rank's `input` into its part of the first dimension of `output`.

    gloo's own passes the parts around a ring, a step after the other: on CPUs broadcasts at the same time are faster.
    """
    if dist.get_backend(group) != "gloo":
        return _all_gather_single(output, input, group=group, async_op=async_op)
    return _finished_unless(async_op, _BroadcastsInFlight(output, input, group=group))


def reduce_scatter_single(output: Tensor, input: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
    """Sum `input` over the group; each rank gets its part of the first dimension in `output`.

    gloo's own sums all parts in every rank: on CPUs that takes three times as long as sending each part to its rank.
    """
    if dist.get_backend(group) != "gloo":
        return _reduce_scatter_single(output, input, group=group, async_op=async_op)
    return _finished_unless(async_op, _SumInFlight(output, input, group=group))


def _finished_unless(async_op: bool, work: Any) -> Any:
    """`work` if it is `async_op`; otherwise wait for it."""
    if async_op:
        return work
    work.wait()
    return None


def needs_grad(ctx: Any, index: int) -> bool:
    """Whether the current backward pass needs the gradient of tensor argument `index`.

    `needs_input_grad` is true if any pass might. torch does not know it for a leaf, so a leaf's is always computed.
    """
    if not ctx.needs_input_grad[index] or torch.compiler.is_compiling():
        return bool(ctx.needs_input_grad[index])  # compiled: all gradients come from one backward pass
    node = ctx.next_functions[index][0]
    return hasattr(node, "variable") or torch._C._will_engine_execute_node(node)


def all_gather_positions(x_BtD: Tensor, group: ProcessGroup) -> Tensor:
    """Each rank's part of the positions [B, T/n, D] -> all of them [B, T, D]. No gradient."""
    n = group.size()
    B, t, D = x_BtD.shape
    out_nBtD = x_BtD.new_empty(n, B, t, D)
    all_gather_single(out_nBtD.view(n * B, t, D), x_BtD.contiguous(), group=group)
    return out_nBtD.transpose(0, 1).reshape(B, n * t, D)


def reduce_scatter_positions(x_BTD: Tensor, group: ProcessGroup) -> Tensor:
    """Sum [B, T, D] over the group; each rank keeps its part of the positions [B, T/n, D]. No gradient."""
    n = group.size()
    B, T, D = x_BTD.shape
    parts_nBtD = x_BTD.view(B, n, T // n, D).transpose(0, 1).contiguous()
    out_BtD = x_BTD.new_empty(B, T // n, D)
    reduce_scatter_single(out_BtD, parts_nBtD.view(n * B, T // n, D), group=group)
    return out_BtD


class AllGatherPositions(torch.autograd.Function):
    """Forward all-gather, backward reduce-scatter: enters a region where each rank holds part of the weights."""

    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_positions(x_BtD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_positions(grads[0].contiguous(), ctx.group), None


class ReduceScatterPositions(torch.autograd.Function):
    """Forward reduce-scatter, backward all-gather: leaves a region where each rank holds part of the weights."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_positions(x_BTD.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather_positions(grads[0], ctx.group), None


def resolve_group(name: str) -> ProcessGroup:
    """The group of this name: a compiled layer cannot identify it otherwise."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type]


@torch.library.custom_op(
    "seatrial::all_gather_positions", mutates_args=(), schema="(Tensor x, str group) -> Tensor"
)
def all_gather_positions_op(x: Tensor, group: str) -> Tensor:
    """`AllGatherPositions` as an operator, for compiled layers."""
    return all_gather_positions(x, resolve_group(group))


@all_gather_positions_op.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] * resolve_group(group).size(), x.shape[2])


@torch.library.custom_op(
    "seatrial::reduce_scatter_positions", mutates_args=(), schema="(Tensor x, str group) -> Tensor"
)
def reduce_scatter_positions_op(x: Tensor, group: str) -> Tensor:
    """`ReduceScatterPositions` as an operator, for compiled layers."""
    return reduce_scatter_positions(x.contiguous(), resolve_group(group))


@reduce_scatter_positions_op.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // resolve_group(group).size(), x.shape[2])


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group = inputs[1]


def _scattered(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return reduce_scatter_positions_op(grad, ctx.group), None


def _gathered(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return all_gather_positions_op(grad, ctx.group), None


all_gather_positions_op.register_autograd(_scattered, setup_context=_keep_group)
reduce_scatter_positions_op.register_autograd(_gathered, setup_context=_keep_group)
