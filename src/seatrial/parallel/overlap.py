"""Tensor-parallel matrix products overlapped with their collectives: one part of the positions is sent, another computed.

What Megatron-LM calls tp_comm_overlap and torchtitan asynchronous tensor parallel, with ordinary collectives instead of
symmetric memory: the same on gloo and on NCCL. Sums are those of `collectives`; parts only split rows.

    all-gather, matmul      all parts' all-gathers are launched; a part is multiplied once it is gathered
      backward              all parts' all-gathers are launched; a part's input gradient is computed, its reduce-scatter
                            is overlapped with the next part's, and with the weight gradients, which need all parts
    matmul, reduce-scatter  a part is multiplied; its reduce-scatter is overlapped with the next part's product
      backward              all parts' all-gathers are launched; a part's input gradient is computed once it is gathered

Between the two, rows are in the order of parts: [part, rank, sequence, position]. Row-wise operations (the MLP) keep
that order; attention needs [sequence, position] (`Cut.in_order`, `Cut.in_parts`). A single part, as in plain tensor
parallel, is put into that order after its all-gather.

Gathered activations are not kept for the weight gradients but gathered again, which needs n times less memory
(arXiv:2205.05198, section 4.2).

    R  rows: all positions of a microbatch      O  output features of a rank      t  positions of one rank
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from seatrial.job.parts import parts, sequence_parts
from seatrial.parallel.collectives import all_gather_single, reduce_scatter_single, wait
from seatrial.parallel.float8 import Scaling, left, multiply, right


@dataclass(frozen=True)
class Cut:
    """How the positions of one microbatch are split, over n ranks and into parts of sequences or of positions."""

    ranks: int
    sequences: int  # B
    positions: int  # t
    sequence_parts: int
    position_parts: int

    @classmethod
    def of(cls, sequences: int, positions: int, ranks: int, *, in_parts: bool) -> Cut:
        """The split of `sequences` per microbatch and `positions` of each per rank; without `in_parts`: one part."""
        if not in_parts:
            return cls(ranks, sequences, positions, 1, 1)
        between = sequence_parts(sequences, positions)
        return cls(ranks, sequences, positions, between, parts(sequences, positions) // between)

    @property
    def parts(self) -> int:
        return self.sequence_parts * self.position_parts

    @property
    def rows(self) -> int:
        return self.ranks * self.sequences * self.positions

    def in_order(self, rows_RO: Tensor) -> Tensor:
        """Rows in the order of parts -> [B, T, O]; a view where parts are single sequences, or there is one part."""
        if self.parts == 1:
            return rows_RO.reshape(self.sequences, self.ranks * self.positions, -1)
        P, Q = self.sequence_parts, self.position_parts
        b, s = self.sequences // P, self.positions // Q
        split = rows_RO.reshape(P, Q, self.ranks, b, s, -1)
        return split.permute(0, 3, 2, 1, 4, 5).reshape(self.sequences, self.ranks * self.positions, -1)

    def in_parts(self, x_BTO: Tensor) -> Tensor:
        """[B, T, O] -> rows in the order of parts [R, O]."""
        if self.parts == 1:
            return x_BTO.reshape(self.rows, -1)
        P, Q = self.sequence_parts, self.position_parts
        b, s = self.sequences // P, self.positions // Q
        split = x_BTO.reshape(P, b, self.ranks, Q, s, -1)
        return split.permute(0, 3, 2, 1, 4, 5).reshape(self.rows, -1)

    def after_gather(self, rows_RD: Tensor) -> Tensor:
        """A part's rows as gathered, rank by rank -> in the order that they have between the two products."""
        return self._swapped(rows_RD, self.ranks, self.sequences) if self.parts == 1 else rows_RD

    def before_scatter(self, rows_RD: Tensor) -> Tensor:
        """The inverse of `after_gather`."""
        return self._swapped(rows_RD, self.sequences, self.ranks) if self.parts == 1 else rows_RD

    def _swapped(self, rows_RD: Tensor, outer: int, inner: int) -> Tensor:
        split = rows_RD.view(outer, inner, self.positions, -1)
        return split.transpose(0, 1).reshape(self.rows, -1)

    def local_parts(self, x_BtD: Tensor) -> Iterator[Tensor]:
        """This rank's positions, part by part [B/P, t/Q, D]: views."""
        for sequences in x_BtD.chunk(self.sequence_parts):
            yield from sequences.chunk(self.position_parts, dim=1)


class _AllGathers:
    """All-gathers of the parts of [B, t, D], all launched at once; rows [R, D] are complete once each was waited for."""

    def __init__(self, x_BtD: Tensor, cut: Cut, group: ProcessGroup) -> None:
        self.rows_RD = x_BtD.new_empty(cut.rows, x_BtD.shape[-1])
        self._after_gather = cut.after_gather
        # Kept here until the all-gathers are done: there may be no other reference to these buffers.
        self._sent = [piece.contiguous() for piece in cut.local_parts(x_BtD)]
        self._in_flight = [
            all_gather_single(into, sent.flatten(0, 1), group=group, async_op=True)
            for into, sent in zip(self.rows_RD.chunk(cut.parts), self._sent, strict=True)
        ]

    def __iter__(self) -> Iterator[Tensor]:
        """Each part's rows, once gathered."""
        parts = self.rows_RD.chunk(len(self._in_flight))
        for work, rows in zip(self._in_flight, parts, strict=True):
            wait(work)
            if len(parts) == 1:
                rows = self.rows_RD = self._after_gather(rows)
            yield rows

    def finish(self) -> Tensor:
        """All rows, once all are gathered."""
        for _ in self:
            pass
        return self.rows_RD


class _ReduceScatters:
    """Reduce-scatters of parts into [B, t, D], each started by `launch`."""

    def __init__(self, like: Tensor, width: int, cut: Cut, group: ProcessGroup) -> None:
        self._out_BtD = like.new_empty(cut.sequences, cut.positions, width)
        self._targets = cut.local_parts(self._out_BtD)
        self._before_scatter = cut.before_scatter
        self._group = group
        self._in_flight: list[tuple[Any, Tensor, Tensor, Tensor]] = []

    def launch(self, rows_RD: Tensor) -> None:
        """Sum the next part over the group; each rank gets its own positions."""
        target = next(self._targets)
        rows_RD = self._before_scatter(rows_RD)
        into = target if target.is_contiguous() else torch.empty_like(target)
        work = reduce_scatter_single(into.flatten(0, 1), rows_RD, group=self._group, async_op=True)
        self._in_flight.append((work, rows_RD, into, target))

    def finish(self) -> Tensor:
        """Wait for all parts; returns [B, t, D]."""
        for work, _, into, target in self._in_flight:
            wait(work)
            if into is not target:
                target.copy_(into)
        return self._out_BtD


def all_gather_matmul(
    x_BtD: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    cut: Cut,
    group: ProcessGroup,
    scaling: Scaling = None,
) -> list[Tensor]:
    """The product of the gathered rows with each weight [O, D], plus its bias if there are any: [R, O] each."""
    gathering = _AllGathers(x_BtD, cut, group)
    outs = [x_BtD.new_empty(cut.rows, weight.shape[0]) for weight in weights]
    sides = [right(weight.t(), scaling) for weight in weights]
    into = zip(*(out.chunk(cut.parts) for out in outs), strict=True)
    for rows, targets in zip(gathering, into, strict=True):
        of_rows = left(rows, scaling)
        for i, (side, target) in enumerate(zip(sides, targets, strict=True)):
            if biases and scaling is None:
                torch.addmm(biases[i], rows, side.values, out=target)
                continue
            multiply(of_rows, side, out=target)
            if biases:
                target += biases[i]
    return outs


def all_gather_matmul_backward(
    grads_RO: Sequence[Tensor],
    x_BtD: Tensor,
    weights: Sequence[Tensor],
    cut: Cut,
    group: ProcessGroup,
    scaling: Scaling = None,
    *,
    of_input: bool = True,
    of_weights: bool = True,
    biased: bool = False,
) -> tuple[Tensor | None, list[Tensor], list[Tensor]]:
    """Gradients of x [B, t, D], and of the weights and biases, as far as they are requested."""
    gathering = _AllGathers(x_BtD, cut, group) if of_weights else None
    scattering = _ReduceScatters(x_BtD, x_BtD.shape[2], cut, group)
    if of_input:
        sides = [right(weight, scaling) for weight in weights]
        for grads in zip(*(g.chunk(cut.parts) for g in grads_RO), strict=True):
            # In the order in which autograd would add them up, last product first, so that the sums have the same bits.
            of_each_grad = (left(grad, scaling, of_gradient=True) for grad in grads[::-1])
            products = map(multiply, of_each_grad, sides[::-1])
            total = next(products)
            for product in products:
                total += product
            scattering.launch(total)
    of_each = []
    if gathering is not None:
        of_rows = right(gathering.finish(), scaling)
        of_each = [multiply(left(grad.t(), scaling, of_gradient=True), of_rows) for grad in grads_RO]
    of_biases = [grad.sum(0) for grad in grads_RO] if of_weights and biased else []
    return scattering.finish() if of_input else None, of_each, of_biases


def matmul_reduce_scatter(
    rows_RO: Tensor, weight: Tensor, cut: Cut, group: ProcessGroup, scaling: Scaling = None
) -> Tensor:
    """The product of rows with a weight [D, O], summed over the group: this rank's positions [B, t, D]."""
    scattering = _ReduceScatters(rows_RO, weight.shape[0], cut, group)
    side = right(weight.t(), scaling)
    for rows in rows_RO.chunk(cut.parts):
        scattering.launch(multiply(left(rows, scaling), side))
    return scattering.finish()


def matmul_reduce_scatter_backward(
    grad_BtD: Tensor, weight: Tensor, cut: Cut, group: ProcessGroup, scaling: Scaling = None
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows [R, O] and of the product [R, D], from which `weight_gradient` computes the weight's."""
    gathering = _AllGathers(grad_BtD, cut, group)
    grad_RO = grad_BtD.new_empty(cut.rows, weight.shape[1])
    side = right(weight, scaling)
    for grad, target in zip(gathering, grad_RO.chunk(cut.parts), strict=True):
        multiply(left(grad, scaling, of_gradient=True), side, out=target)
    return grad_RO, gathering.rows_RD
