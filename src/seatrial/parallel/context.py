"""Context parallel: each rank of a group computes two chunks of every sequence, over the keys and values of all of them.

Of 2n chunks of a sequence rank r of n has chunks r and 2n-1-r, so that causal attention is the same work on every rank
(arXiv:2407.21783, section 3.3.2). Keys and values are gathered, which with grouped-query attention are small beside
the queries; their gradients are summed and scattered.

    C  positions of a chunk (T / 2n)      t  positions of this rank (2 C)
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import causal_lower_right

from seatrial.model.decoder import Decoder, attention
from seatrial.parallel.collectives import AllGatherPositions


def own_positions(x: Tensor, dim: int, *, size: int, rank: int) -> Tensor:
    """The positions of `rank` of `size` along `dim`, which holds all T of them."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def in_order(x_BTE: Tensor, size: int) -> Tensor:
    """The positions of all ranks, one rank's after another's -> the positions in the order of the sequence."""
    chunks_B2CE = x_BTE.chunk(size, 1)
    first, second = zip(*(chunks.chunk(2, 1) for chunks in chunks_B2CE), strict=True)
    return torch.cat((*first, *reversed(second)), 1)


class ContextAttention:
    """Attention of this rank's positions over all earlier ones of the sequence."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group, self._size = group, group.size()
        self._chunks = (rank, 2 * self._size - 1 - rank)

    def __call__(
        self, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, bias_B1tT: Tensor | None = None
    ) -> Tensor:
        """As `model.decoder.attention`. A bias has the rows of this rank's positions."""
        heads = k_BtKH.shape[2:]
        both_BtE = torch.cat((k_BtKH.flatten(2), v_BtKH.flatten(2)), dim=-1)
        both_BTE = in_order(AllGatherPositions.apply(both_BtE, self._group), self._size)
        k_BTKH, v_BTKH = (x.unflatten(2, heads) for x in both_BTE.chunk(2, dim=-1))
        outs, C = [], q_BtNH.shape[1] // 2
        for i, (chunk, q_BCNH) in enumerate(zip(self._chunks, q_BtNH.split(C, 1), strict=True)):
            seen = (chunk + 1) * C
            mask: Tensor = causal_lower_right(C, seen)  # not built on GPUs: their kernels know it
            if bias_B1tT is not None:
                mask = bias_B1tT[:, :, i * C : (i + 1) * C, :seen]
            outs.append(attention(q_BCNH, k_BTKH[:, :seen], v_BTKH[:, :seen], mask))
        return torch.cat(outs, dim=1)


def apply_context_parallel(model: Decoder, group: ProcessGroup, rank: int, sequence_length: int) -> None:
    """Let `model` compute this rank's positions of sequences of `sequence_length`."""
    model.sequence_length = sequence_length
    model.own_positions = partial(own_positions, size=group.size(), rank=rank)
    for block in model.blocks:
        block.self_attn.attend = ContextAttention(group, rank)
