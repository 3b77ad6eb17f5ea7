"""A GPU's kernels where there is none: what they keep for the backward pass, and what they hand out.

On a CPU torch makes an RMS norm of many small operations, and attention repeats grouped keys and values for every
query head. On CUDA both are one kernel that keeps far less. A dry run for CUDA traces on CPU, and puts these
kernels' shapes in the place of the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention


class _FusedRMSNorm(torch.autograd.Function):
    """aten::_fused_rms_norm, which CUDA has: keeps the input and one fp32 number a row."""

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


def _rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    assert weight is not None
    assert weight.dtype == x.dtype, "CUDA would not take the fused kernel"
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
    # With a bias CUDA has no flash kernel. Which of the others torch takes, and what it keeps, depends on the GPU and
    # on cuDNN, so `dryrun_trace` says that this is not known; the bias itself is counted where it is made.
    width = query.shape[-1]
    if width % 8:  # the kernel wants multiples of 8
        query, key, value = (F.pad(x, (0, -width % 8)) for x in (query, key, value))
    return _flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :width]


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Within it `F.rms_norm` and attention are traced as CUDA's kernels. For fake tensors only.

    Not a TorchFunctionMode: that is off during a backward pass, where recomputed layers run.
    """
    names = {"rms_norm": _rms_norm, "scaled_dot_product_attention": _attention}
    originals = {name: getattr(F, name) for name in names}
    try:
        for name, kernel in names.items():
            setattr(F, name, kernel)
        yield
    finally:
        for name, original in originals.items():
            setattr(F, name, original)
