"""The matrix products and collectives of `overlap` as custom operators, for compiled layers.

They are opaque to the compiler, so that it cannot reorder what they launch and wait for. Groups are passed by name: a
compiled layer cannot identify them otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seatrial.parallel.collectives import resolve_group
from seatrial.parallel.float8 import Scaling, weight_gradient
from seatrial.parallel.overlap import (
    Cut,
    all_gather_matmul,
    all_gather_matmul_backward,
    matmul_reduce_scatter,
    matmul_reduce_scatter_backward,
)


def _cut(x_BtD: Tensor, in_parts: bool, group: ProcessGroup) -> Cut:
    return Cut.of(x_BtD.shape[0], x_BtD.shape[1], group.size(), in_parts=in_parts)


@torch.library.custom_op(
    "seatrial::all_gather_matmul",
    mutates_args=(),
    schema="(Tensor x, Tensor[] weights, Tensor[] biases, bool in_parts, str group, str? scaling) -> Tensor[]",
)
def all_gather_matmul_op(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    in_parts: bool,
    group: str,
    scaling: Scaling,
) -> list[Tensor]:
    members = resolve_group(group)
    return all_gather_matmul(x, weights, biases, _cut(x, in_parts, members), members, scaling)


@all_gather_matmul_op.register_fake
def _(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    in_parts: bool,
    group: str,
    scaling: Scaling,
) -> list[Tensor]:
    rows = x.shape[0] * x.shape[1] * resolve_group(group).size()
    return [x.new_empty(rows, w.shape[0]) for w in weights]


@torch.library.custom_op(
    "seatrial::all_gather_matmul_backward",
    mutates_args=(),
    schema="(Tensor[] grads, Tensor x, Tensor[] weights, bool biased, bool in_parts, str group, str? scaling) -> Tensor[]",
)
def _all_gather_matmul_backward_op(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    biased: bool,
    in_parts: bool,
    group: str,
    scaling: Scaling,
) -> list[Tensor]:
    members = resolve_group(group)
    cut = _cut(x, in_parts, members)
    whole = [grad.contiguous() for grad in grads]
    of_input, of_each, of_biases = all_gather_matmul_backward(
        whole, x, weights, cut, members, scaling, biased=biased
    )
    assert of_input is not None
    return [of_input, *of_each, *of_biases]


@_all_gather_matmul_backward_op.register_fake
def _(
    grads: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    biased: bool,
    in_parts: bool,
    group: str,
    scaling: Scaling,
) -> list[Tensor]:
    of_input = torch.empty_like(x, memory_format=torch.contiguous_format)
    of_each = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights]
    return [of_input, *of_each, *(w.new_empty(w.shape[0]) for w in weights if biased)]


def _save_for_gather(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, *ctx.how = inputs
    ctx.biased = bool(biases)
    ctx.save_for_backward(x, *weights)


def _all_gather_matmul_gradient(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    of_input, *rest = _all_gather_matmul_backward_op(grads, x, weights, ctx.biased, *ctx.how)
    return of_input, rest[: len(weights)], rest[len(weights) :], None, None, None


all_gather_matmul_op.register_autograd(_all_gather_matmul_gradient, setup_context=_save_for_gather)


@torch.library.custom_op(
    "seatrial::matmul_reduce_scatter",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, int sequences, bool in_parts, str group, str? scaling) -> Tensor",
)
def matmul_reduce_scatter_op(
    rows: Tensor, weight: Tensor, sequences: int, in_parts: bool, group: str, scaling: Scaling
) -> Tensor:
    members = resolve_group(group)
    n = members.size()
    cut = Cut.of(sequences, rows.shape[0] // (sequences * n), n, in_parts=in_parts)
    return matmul_reduce_scatter(rows.contiguous(), weight, cut, members, scaling)


@matmul_reduce_scatter_op.register_fake
def _(rows: Tensor, weight: Tensor, sequences: int, in_parts: bool, group: str, scaling: Scaling) -> Tensor:
    positions = rows.shape[0] // (sequences * resolve_group(group).size())
    return rows.new_empty(sequences, positions, weight.shape[0])


@torch.library.custom_op(
    "seatrial::matmul_reduce_scatter_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor rows, Tensor weight, bool in_parts, str group, str? scaling) -> Tensor[]",
)
def _matmul_reduce_scatter_backward_op(
    grad: Tensor, rows: Tensor, weight: Tensor, in_parts: bool, group: str, scaling: Scaling
) -> list[Tensor]:
    members = resolve_group(group)
    cut = _cut(grad, in_parts, members)
    of_rows, gathered = matmul_reduce_scatter_backward(grad, weight, cut, members, scaling)
    return [of_rows, weight_gradient(gathered, rows, scaling)]


@_matmul_reduce_scatter_backward_op.register_fake
def _(
    grad: Tensor, rows: Tensor, weight: Tensor, in_parts: bool, group: str, scaling: Scaling
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (rows, weight)]


def _save_for_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, weight, _, *ctx.how = inputs
    ctx.save_for_backward(rows, weight)


def _matmul_reduce_scatter_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, weight = ctx.saved_tensors
    return *_matmul_reduce_scatter_backward_op(grad, rows, weight, *ctx.how), None, None, None, None


matmul_reduce_scatter_op.register_autograd(_matmul_reduce_scatter_gradient, setup_context=_save_for_scatter)

# What an eager forward pass calls -> the function that implements it.
IMPLEMENTATIONS = {op._opoverload: op._init_fn for op in (all_gather_matmul_op, matmul_reduce_scatter_op)}
