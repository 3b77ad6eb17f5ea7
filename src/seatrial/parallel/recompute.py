"""Selective activation checkpointing: what a decoder layer keeps for its backward pass, and what it computes again.

Kept are the outputs of matrix products, of attention, and of tensor parallel's products with their collectives; computed
again is what reads and writes memory only: norms, rotary embedding, SiLU, sums, copies. Keys and values that context
parallel gathered are gathered again: kept, they would be as many times those of this rank as the group has ranks, where
sequences are long and memory is short.

A kept product of [rows, I] and [I, O] holds one value for each 2 I FLOPs that are not repeated. I is the model's width for
all products but the last one, so none of them is the one to leave out (torchtitan leaves out every second); recomputing
only some of the layers is the setting for what lies between. The last product's output is not kept: no gradient of the layer
needs it. Nor are those of adapters' second products, whose I is the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from seatrial.model.decoder import Block
from seatrial.parallel.overlap_ops import all_gather_matmul_op, matmul_reduce_scatter_op
from seatrial.parallel.ring import ring_attention_op

_aten = torch.ops.aten
# Operator -> which of its arguments is the weight, and the weight's dimension of input features.
_PRODUCTS = {
    _aten.mm.default: (1, 0),
    _aten.addmm.default: (2, 0),
    _aten._scaled_mm.default: (1, 0),
    _aten._grouped_mm.default: (1, 1),
    matmul_reduce_scatter_op._opoverload: (1, 1),
}
_OTHERS = {
    all_gather_matmul_op._opoverload,
    ring_attention_op._opoverload,
    # Not attention without a fused kernel: its scores are what recomputing is to save.
    _aten._scaled_dot_product_flash_attention.default,
    _aten._flash_attention_forward.default,  # of `packed`
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._efficient_attention_forward.default,  # what torch calls for the masks of `context` without flash attention
}


def keep_products(block: Block, mlp_widths: list[int], rank: int | None) -> None:
    """Let `block` keep what this module lists. `mlp_widths`: this rank's part of each MLP's width; `rank`: of adapters."""

    def policy(_ctx: Any, op: Any, *args: Any, **_: Any) -> CheckpointPolicy:
        keep = op in _OTHERS
        if op in _PRODUCTS:
            weight, dim = _PRODUCTS[op]
            # An MLP's second product is the layer's last.
            keep = args[weight].shape[dim] not in (*mlp_widths, rank)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Callable[[], Any] = partial(create_selective_checkpoint_contexts, policy)
    block.contexts = contexts


def recompute_in_parts(block: Block) -> None:
    """Recompute attention and MLP apart: what a compiled part keeps can be chosen only within it. The MLP's input is kept too."""
    contexts = block.contexts
    assert contexts is not None

    def recomputed(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            return checkpoint(
                part, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )

        return run

    block.recompute = False
    block.attend = recomputed(block.attend)  # type: ignore[method-assign]
    block.mlp.forward = recomputed(block.mlp.forward)  # type: ignore[method-assign]
