"""Context parallel: each rank of a group computes two chunks of every sequence, over the keys and values of all of them.

Of 2n chunks of a sequence rank r of n has chunks r and 2n-1-r, so that causal attention is the same work on every rank
(arXiv:2407.21783, section 3.3.2). Keys and values are gathered, which with grouped-query attention are small beside
the queries; their gradients are summed and scattered. Or they go around a ring (`ring`), which gathers nothing.

    C  positions of a chunk (T / 2n)      t  positions of this rank (2 C)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.attention.bias import CausalBias, CausalVariant

from seatrial.hardware.accelerator import is_accelerator
from seatrial.model.decoder import Decoder, attention
from seatrial.parallel.collectives import AllGatherPositions, all_gather_positions_op
from seatrial.parallel.packed import packed_attention
from seatrial.parallel.ring import RingAttention


def own_positions(x: Tensor, dim: int, *, size: int, rank: int) -> Tensor:
    """The positions of `rank` of `size` along `dim`, which holds all T of them."""
    chunks = x.chunk(2 * size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def own_chunks(length: int, *, size: int, rank: int) -> list[range]:
    """Which of the `length` positions those are."""
    C = length // (2 * size)
    return [range(chunk * C, (chunk + 1) * C) for chunk in (rank, 2 * size - 1 - rank)]


def in_order(x_BTE: Tensor, size: int) -> Tensor:
    """The positions of all ranks, one rank's after another's -> the positions in the order of the sequence."""
    chunks_B2CE = x_BTE.chunk(size, 1)
    first, second = zip(*(chunks.chunk(2, 1) for chunks in chunks_B2CE), strict=True)
    return torch.cat((*first, *reversed(second)), 1)


def lower_right(queries: int, seen: int) -> Tensor | None:
    """The mask [queries, seen] by which the last query sees all positions, and each before it one less.

    None in a dry run for GPUs (`train.dryrun.kernels`), where nothing is built either.
    """
    return torch.ones(queries, seen, dtype=torch.bool).tril(seen - queries)


class _LowerRight(CausalBias):
    """That mask for GPUs, whose kernels know it: nothing is built.

    torch's own `causal_lower_right` allocates a tensor of 8 bytes an entry that nobody reads.
    """

    @staticmethod
    def __new__(cls, *_sizes: Any) -> _LowerRight:
        mask: _LowerRight = Tensor._make_subclass(cls, torch.empty(0))
        return mask


class ContextAttention:
    """Attention of this rank's positions over all earlier ones of the sequence."""

    def __init__(
        self, group: ProcessGroup, rank: int, sequence_length: int, device: torch.device, *, packs: bool
    ) -> None:
        """`packs`: what it gets for documents are the bounds of both chunks (`packed`), and not a bias."""
        self._group, self._name, self._size, self._packs = group, group.group_name, group.size(), packs
        chunks = own_chunks(sequence_length, size=self._size, rank=rank)
        self._seen = [chunk.stop for chunk in chunks]  # positions, by chunk
        self._masks: list[Tensor] | None = None
        if is_accelerator(device):
            self._masks = [_LowerRight(CausalVariant.LOWER_RIGHT, len(c), c.stop) for c in chunks]

    def __call__(self, q_BtNH: Tensor, k_BtKH: Tensor, v_BtKH: Tensor, mask: Tensor | None = None) -> Tensor:
        """As `model.decoder.attention`. A bias has the rows of this rank's positions."""
        heads = k_BtKH.shape[2:]
        both_BtE = torch.cat((k_BtKH.flatten(2), v_BtKH.flatten(2)), dim=-1)
        if torch.compiler.is_compiling():
            both_BTE = all_gather_positions_op(both_BtE, self._name)
        else:
            both_BTE = AllGatherPositions.apply(both_BtE, self._group)
        both_BTE = in_order(both_BTE, self._size)
        k_BTKH, v_BTKH = (x.unflatten(2, heads) for x in both_BTE.chunk(2, dim=-1))
        attend: Callable[..., Tensor] = attention
        masks: Iterable[Tensor | None]
        if mask is not None and self._packs:
            attend, masks = packed_attention, mask.unbind()
        elif mask is not None:
            masks = [rows[..., :n] for rows, n in zip(mask.chunk(2, 2), self._seen, strict=True)]
        elif self._masks is not None:
            masks = self._masks
        else:
            masks = [lower_right(q_BtNH.shape[1] // 2, n) for n in self._seen]
        outs = [
            attend(q_BCNH, k_BTKH[:, :n], v_BTKH[:, :n], of_chunk)
            for q_BCNH, n, of_chunk in zip(q_BtNH.chunk(2, 1), self._seen, masks, strict=True)
        ]
        return torch.cat(outs, dim=1)


def apply_context_parallel(
    model: Decoder,
    group: ProcessGroup,
    rank: int,
    sequence_length: int,
    device: torch.device,
    *,
    packs: bool,
    ring: bool,
) -> None:
    """Let `model` compute this rank's positions of sequences of `sequence_length`; `ring`: as `ring` does."""
    model.sequence_length = sequence_length
    model.own_positions = partial(own_positions, size=group.size(), rank=rank)
    for block in model.blocks:
        block.self_attn.attend = (
            RingAttention(group)
            if ring
            else ContextAttention(group, rank, sequence_length, device, packs=packs)
        )
