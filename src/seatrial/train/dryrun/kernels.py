"""Fake CUDA kernels for a machine without a GPU: the tensors they save for backward, and their outputs.

On a CPU an RMS norm is several operations with results of their own, and attention repeats grouped keys and values for every
query head. On CUDA each is one fused kernel. A dry run for CUDA traces on the CPU with these kernels' shapes instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seatrial.hardware import accelerator
from seatrial.hardware.catalogue import FLASH, AttentionKernel
from seatrial.model import decoder
from seatrial.parallel import context, expert, packed

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention


class _FusedRMSNorm(torch.autograd.Function):
    """CUDA's aten::_fused_rms_norm: saves the input and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        rstd = x.new_empty((*x.shape[: x.dim() - weight.dim()], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        grads[0].contiguous()
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, weight: Tensor, _eps: float) -> Tensor:
    assert weight.dtype == x.dtype, "CUDA would not use the fused kernel"
    return _FusedRMSNorm.apply(x, weight)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # With a bias, which documents have where `packed` cannot be, CUDA has no flash kernel. Which other one torch picks,
    # and what it saves, depends on the GPU and on cuDNN, so `plan.cost.dryrun` reports it as unknown; the bias itself is
    # counted where it is created.
    width = query.shape[-1]
    if width % 8:  # the kernel needs multiples of 8
        query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
    return _flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :width]


def _one_document_a_row(document_BT: Tensor, microbatch: int, chunks: Sequence[range]) -> Tensor:
    return document_BT.new_empty(len(document_BT) // microbatch, len(chunks), 2, microbatch + 1)


@contextmanager
def cuda_kernels(attention: AttentionKernel) -> Iterator[None]:
    """Context in which norms and attention are traced as CUDA's kernels. For fake tensors only.

    Not a TorchFunctionMode: that is disabled during a backward pass, where recomputed layers run.
    """

    def needs_equal_heads(query: Tensor, *, biased: bool) -> bool:
        return not (attention in FLASH and accelerator.flash_takes(query, biased=biased))

    kernels: tuple[tuple[Any, str, Any], ...] = (
        (decoder, "rms_norm", _rms_norm),
        (F, "scaled_dot_product_attention", _attention),
        (context, "lower_right", lambda _queries, _seen: None),  # as attention knows it
        (accelerator, "needs_equal_heads", needs_equal_heads),
        (accelerator, "has_flash_attention", lambda _device: True),
        (packed, "document_bounds", _one_document_a_row),  # fake tensors do not say how many
    )
    with _replaced(kernels):
        yield


def _balanced(sent_nx: Tensor, _received_nx: Tensor, rows: int) -> tuple[list[int], list[int]]:
    n = len(sent_nx)
    sizes = [rows // n + (rank < rows % n) for rank in range(n)]
    return sizes, sizes


@contextmanager
def host_memory_apart() -> Iterator[None]:
    """Context in which host memory for copies from the device is on the meta device, which the recorder leaves out."""
    apart = (
        accelerator,
        "host_memory",
        lambda shape, dtype, _: torch.empty(shape, dtype=dtype, device="meta"),
    )
    with _replaced((apart,)):
        yield


@contextmanager
def balanced_experts() -> Iterator[None]:
    """Context in which every rank of expert parallel sends as much to each: fake tensors do not say how much."""
    with _replaced(((expert, "split_sizes", _balanced),)):
        yield


@contextmanager
def _replaced(kernels: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    originals = [(module, name, getattr(module, name)) for module, name, _ in kernels]
    try:
        for module, name, kernel in kernels:
            setattr(module, name, kernel)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
