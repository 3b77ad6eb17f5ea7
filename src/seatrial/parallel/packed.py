"""Attention within documents by a kernel for sequences of different lengths, which CUDA's flash attention has.

It computes no score between documents and needs no mask; a bias [T, T], as elsewhere, costs both, and has no flash kernel.
The rows of a microbatch follow one another, and the kernel is told where each document's queries and keys end: tensors, not
numbers, since they differ from microbatch to microbatch. They are found on the host, so that nothing waits for the device.

    M  microbatches      C  positions that queries are of: all, or a chunk (`context`)      S  positions up to their last
    L  bounds of the documents of a microbatch
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seatrial.hardware import accelerator
from seatrial.job.architecture import Architecture
from seatrial.model.decoder import Decoder, OwnPositions, attention


def packs_documents(arch: Architecture, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel exists for these heads there."""
    return dtype == torch.bfloat16 and arch.flash_heads and accelerator.has_flash_attention(device)


def document_bounds(document_BT: Tensor, microbatch: int, chunks: Sequence[range]) -> Tensor:
    """Document numbers, on the host -> what `packed_attention` takes for each chunk of positions, int32 [M, chunks, 2, L]."""
    first_BT = torch.ones_like(document_BT, dtype=torch.bool)
    first_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    starts = [row.nonzero().flatten().tolist() for row in first_BT]
    rows = range(0, len(starts), microbatch)
    bounds = [_bounds(starts[i : i + microbatch], chunk) for i in rows for chunk in chunks]
    longest = max(len(queries) for queries, _ in bounds)
    filled = [[x + x[-1:] * (longest - len(x)) for x in pair] for pair in bounds]
    return torch.tensor(filled, dtype=torch.int32).view(len(rows), len(chunks), 2, longest)


def _bounds(starts: list[list[int]], chunk: range) -> tuple[list[int], list[int]]:
    """Bounds of queries and of keys; `starts`: of the documents of each row."""
    queries, keys = [0], [0]
    for row, of_row in enumerate(starts):
        first_query, first_key = row * len(chunk), row * chunk.stop
        before = max(start for start in of_row if start <= chunk.start)
        if before:  # keys of earlier documents, which no query attends to
            queries.append(first_query)
            keys.append(first_key + before)
        for end in [start for start in of_row if chunk.start < start < chunk.stop] + [chunk.stop]:
            queries.append(first_query + end - chunk.start)
            keys.append(first_key + end)
    return queries, keys


def packed_attention(q_BCNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, bounds_2L: Tensor) -> Tensor:
    """Causal attention within documents: queries are of the last C of S positions. [B, C, N, H]."""
    B, C = q_BCNH.shape[:2]
    S = k_BSKH.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (q_BCNH, k_BSKH, v_BSKH))  # of a chunk of several sequences: copies
    # The last query of a document sees its last key. No dropout.
    # Its public form, torch.nn.attention.varlen, has another signature in torch 2.11 than in 2.13.
    out = torch.ops.aten._flash_attention_forward(q, k, v, bounds_2L[0], bounds_2L[1], C, S, 0.0, True, False)
    return out[0].unflatten(0, (B, C))


def apply_packed_attention(model: Decoder) -> None:
    """Let `model` take one microbatch of `document_bounds` for document numbers."""
    model.document_mask = _of_one_microbatch
    for block in model.blocks:
        block.self_attn.attend = _attend


def _of_one_microbatch(bounds: Tensor, _dtype: torch.dtype, _own: OwnPositions | None) -> Tensor:
    return bounds.squeeze(0)


def _attend(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, bounds_12L: Tensor | None = None) -> Tensor:
    """As `model.decoder.attention`, with bounds for a bias."""
    if bounds_12L is None:
        return attention(q_BTNH, k_BTKH, v_BTKH)
    return packed_attention(q_BTNH, k_BTKH, v_BTKH, bounds_12L[0])
