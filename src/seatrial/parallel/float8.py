"""Matrix products in FP8: both operands are cast just before the product, which adds up in fp32 and returns bf16.

A cast multiplies by FP8's largest value over the largest one of the operand, so that nothing overflows and, in a healthy
run, little underflows; no scale is remembered from step to step. "rowwise": one scale for each vector that is multiplied
and added up, a power of 2, all values in e4m3. "tensorwise": one scale for the whole operand, output gradients in e5m2.
"mxfp8": one scale for every 32 values of such a vector, a power of 2, all values in e4m3. As torchao's recipes of these
names, "mxfp8" as its "mxfp8_rceil" (arXiv:2209.05433 for the formats, arXiv:2506.08027 for MXFP8). NaN and infinity become
NaN in all that they touch.

    forward           Y [R, O] = X [R, I]  W [O, I]^T
    input gradient    dX [R, I] = dY [R, O]  W [O, I]
    weight gradient   dW [O, I] = dY^T [O, R]  X [R, I]

Saved for the backward pass are the operands themselves: the three products add up over different dimensions, along which
"rowwise" and "mxfp8" scale.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from seatrial.hardware.accelerator import is_accelerator
from seatrial.job.schema import Fp8Scaling
from seatrial.model.decoder import Decoder
from seatrial.model.lora import LoraLinear
from seatrial.parallel.collectives import needs_grad

Scaling = Fp8Scaling | None
"""None: products as their operands are."""

_BLOCK = 32  # values that have a scale in MXFP8
_SMALLEST = 1e-12  # of the largest value: zeros are divided by it
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Operand(NamedTuple):
    """One side of a product, in FP8 or as it is."""

    values: Tensor
    scale: Tensor | None  # what values are multiplied with: fp32, or of "mxfp8" e8m0; None: as they are
    dtype: torch.dtype  # of the product
    of_gradient: bool


def left(x_RK: Tensor, scaling: Scaling, *, of_gradient: bool = False) -> Operand:
    """The left side of a product; `of_gradient`: it is an output gradient."""
    if scaling is None:
        return Operand(x_RK, None, x_RK.dtype, of_gradient)
    wide = of_gradient and scaling == "tensorwise"
    values, scale = _cast(x_RK, scaling, torch.float8_e5m2 if wide else torch.float8_e4m3fn)
    return Operand(values, scale, x_RK.dtype, of_gradient)


def right(x_KR: Tensor, scaling: Scaling) -> Operand:
    """The right side of a product."""
    if scaling is None:
        return Operand(x_KR, None, x_KR.dtype, False)
    # GPUs multiply rows with columns, each contiguous.
    values, scale = _cast(x_KR.t(), scaling, torch.float8_e4m3fn)
    return Operand(values.t(), None if scale is None else scale.t(), x_KR.dtype, False)


def multiply(a: Operand, b: Operand, *, out: Tensor | None = None) -> Tensor:
    """Their product, in `out` if given."""
    if a.scale is None:
        return torch.mm(a.values, b.values, out=out)
    assert b.scale is not None
    if a.scale.dtype == torch.float8_e8m0fnu:
        return torch._scaled_mm(a.values, b.values, a.scale, b.scale, out_dtype=a.dtype, out=out)
    # Hopper adds up faster in less than fp32, which costs accuracy: not for gradients. Its kernel with a scale for each row is
    # slow without that, so such scales are applied to the result.
    fast = not a.of_gradient
    product = partial(torch._scaled_mm, a.values, b.values, out_dtype=a.dtype, use_fast_accum=fast, out=out)
    if fast or a.scale.numel() * b.scale.numel() == 1:
        return product(a.scale, b.scale)
    one = a.scale.new_ones(())
    return product(one, one).mul_(a.scale * b.scale)


def weight_gradient(grad_RO: Tensor, x_RI: Tensor, scaling: Scaling) -> Tensor:
    """[O, I]."""
    return multiply(left(grad_RO.t(), scaling, of_gradient=True), right(x_RI, scaling))


def _cast(x_RK: Tensor, scaling: Fp8Scaling, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """FP8 values [R, K], contiguous, and what they must be multiplied with, fp32 [R, 1] or [1, 1]; or as `_cast_blocks`."""
    if scaling == "mxfp8":
        return _cast_blocks(x_RK)
    dims = 1 if scaling == "rowwise" else (0, 1)
    # The largest |x|, in one kernel and without a copy.
    largest = torch.linalg.vector_norm(x_RK, float("inf"), dims, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=_SMALLEST)).float()
    if scaling == "rowwise":
        scale = torch.exp2(scale.log2().floor())
    return (x_RK * scale).to(dtype).contiguous(), scale.reciprocal()


def _cast_blocks(x_RK: Tensor) -> tuple[Tensor, Tensor | None]:
    """FP8 values [R, K], contiguous, and the scales of their blocks, e8m0, as `_in_tiles`.

    CPUs have no such product. There: the scaled values, in the precision of x, which has room for all of their bits, so a
    plain product is that of a GPU but for the order of its sums.
    """
    x_RNb = x_RK.unflatten(1, (-1, _BLOCK))
    largest_RN1 = torch.linalg.vector_norm(x_RNb, float("inf"), 2, keepdim=True).float()
    # The exponent of fp32 as its bits are, rounded up so that nothing overflows; of infinity and NaN it is 255, which in e8m0
    # is NaN. Not 0, which in fp32 is no power of 2.
    bits_RN1 = (largest_RN1 / torch.finfo(torch.float8_e4m3fn).max).view(torch.int32)
    exponent_RN1 = ((bits_RN1 + 0x7FFFFF) >> 23).clamp(min=1)
    power_RN1 = (exponent_RN1 << 23).view(torch.float32)
    values_RK = (x_RNb * power_RN1.reciprocal().to(x_RK.dtype)).to(torch.float8_e4m3fn).flatten(1)
    if is_accelerator(x_RK.device):
        scale = _in_tiles(exponent_RN1.squeeze(2).to(torch.uint8)).view(torch.float8_e8m0fnu)
        return values_RK.contiguous(), scale
    return (values_RK.to(x_RK.dtype).unflatten(1, (-1, _BLOCK)) * power_RN1.to(x_RK.dtype)).flatten(1), None


def _in_tiles(exponent_RN: Tensor) -> Tensor:
    """In the order in which Blackwell reads them, with zeros up to whole tiles of 128 rows by 4: rows 0, 32, 64, 96, 1, ...

    Source: cuBLAS's documentation, "1D block scaling factors layout".
    """
    rows, columns = exponent_RN.shape
    padded = F.pad(exponent_RN, (0, -columns % 4, 0, -rows % 128))
    return padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32)).permute(0, 3, 2, 1, 4).flatten()


def float8_linear(x_BTI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, scaling: Fp8Scaling) -> Tensor:
    """`F.linear` that multiplies in FP8: [B, T, O]; the bias is added in the input's precision."""
    x_RI = x_BTI.flatten(0, 1)
    view_IO = weight_OI.t()  # has its own autograd node, see `needs_grad`
    marker_RO = _SaveForGradients.apply(x_RI, view_IO, scaling)
    out_RO = _Product.apply(marker_RO, x_RI.detach(), view_IO.detach(), scaling)
    out_BTO: Tensor = out_RO.view(*x_BTI.shape[:2], -1)
    return out_BTO if bias_O is None else out_BTO + bias_O


class Float8Linear(nn.Module):
    """A linear layer that multiplies in FP8."""

    def __init__(self, linear: nn.Linear, scaling: Fp8Scaling) -> None:
        """With the parameters of `linear`."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._scaling = scaling

    def forward(self, x_BTI: Tensor) -> Tensor:
        return float8_linear(x_BTI, self.weight, self.bias, self._scaling)


class _SaveForGradients(torch.autograd.Function):
    """Saves what the gradients of `_Product` need, and computes them. Why apart: see that of `overlap_grad`."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, view_IO: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling = scaling
        ctx.save_for_backward(x_RI if ctx.needs_input_grad[1] else None, view_IO)
        return x_RI.new_empty(()).expand(x_RI.shape[0], view_IO.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RI, view_IO = ctx.saved_tensors
        of_x = of_view = None
        if needs_grad(ctx, 0):
            side = right(view_IO.t(), ctx.scaling)
            of_x = multiply(left(grads[0], ctx.scaling, of_gradient=True), side)
        if needs_grad(ctx, 1):
            of_view = weight_gradient(grads[0], x_RI, ctx.scaling).t()
        return of_x, of_view, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, marker_RO: Tensor, x_RI: Tensor, view_IO: Tensor, scaling: Scaling) -> Tensor:
        return multiply(left(x_RI, scaling), right(view_IO, scaling))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0], None, None, None


def apply_float8(model: Decoder, scaling: Fp8Scaling) -> None:
    """Let the linear layers of every decoder layer that is not split multiply in FP8, but not adapters.

    See `Overlap` for split ones.
    """
    for block in model.blocks:
        for module in (block.self_attn, block.mlp):
            assert not isinstance(module, nn.Linear)
            for name, linear in list(module.named_children()):
                if isinstance(linear, LoraLinear):
                    linear.multiply = partial(float8_linear, scaling=scaling)
                elif name in _LAYERS:
                    assert type(linear) is nn.Linear
                    setattr(module, name, Float8Linear(linear, scaling))
