"""FP8 products: torchao's bits, how far they are from exact ones, and values that are not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear as Torchao
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from seatrial.job.schema import Fp8Scaling
from seatrial.parallel import float8
from seatrial.parallel.float8 import Float8Linear, _in_tiles, left, multiply, right, weight_gradient

B, T, I, O = 2, 32, 64, 96  # noqa: E741  the letters of shapes
SCALINGS: tuple[Fp8Scaling, ...] = ("rowwise", "tensorwise", "mxfp8")
each_scaling = pytest.mark.parametrize("scaling", SCALINGS)


def _gradients(layer: Callable[[Tensor], Tensor], linear: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of input, weight and bias."""
    own = x.clone().requires_grad_()
    linear.zero_grad()
    out = layer(own)
    out.backward(grad)
    found = [out.detach(), own.grad, linear.weight.grad, *([] if linear.bias is None else [linear.bias.grad])]
    return [f.clone() for f in found if f is not None]


def _torchao(linear: nn.Linear, scaling: Fp8Scaling) -> Callable[[Tensor], Tensor]:
    if scaling != "mxfp8":
        return Torchao.from_float(linear, Float8LinearConfig.from_recipe_name(scaling))

    def in_blocks(x: Tensor) -> Tensor:
        mode = (KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)
        out = _to_mxfp8_then_scaled_mm(x, linear.weight, *mode)
        return out if linear.bias is None else out + linear.bias

    return in_blocks


@each_scaling
@given(
    seed=st.integers(0, 2**32),
    exponents=st.tuples(*[st.integers(-20, 20)] * 3),
    outlier=st.sampled_from([0.0, 1.0, 1e4]),
    bias=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_results_have_the_bits_of_torchao(
    scaling: Fp8Scaling, seed: int, exponents: tuple[int, int, int], outlier: float, bias: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(I, O, bias=bias).bfloat16()
    of_x, of_weight, of_grad = (2.0**e for e in exponents)
    with torch.no_grad():
        linear.weight.copy_(of_weight * torch.randn(O, I, generator=generator))
    x = of_x * torch.randn(B, T, I, generator=generator)
    x[0, 3] *= outlier  # a row of zeros, as others, or far larger
    x, grad = x.bfloat16(), (of_grad * torch.randn(B, T, O, generator=generator)).bfloat16()
    theirs = _torchao(linear, scaling)
    ours = Float8Linear(linear, scaling)
    for a, b in zip(_gradients(ours, linear, x, grad), _gradients(theirs, linear, x, grad), strict=True):
        assert torch.equal(a, b)


@each_scaling
def test_the_error_is_that_of_three_bits(scaling: Fp8Scaling) -> None:
    """e4m3 rounds by 1/16 at most: of sums of many such, 4 % of what is usual."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, I, generator=generator), torch.randn(I, 128, generator=generator)
    exact = a.double() @ b.double()
    found = multiply(left(a.bfloat16(), scaling), right(b.bfloat16(), scaling)).double()
    assert 0.02 < (found - exact).norm() / exact.norm() < 0.05


@each_scaling
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(scaling: Fp8Scaling, bad: float) -> None:
    """In its row, or with one scale for all everywhere; and in all weights that this row has a part in."""
    x, weight = torch.ones(T, I, dtype=torch.bfloat16), torch.ones(O, I, dtype=torch.bfloat16)
    x[3, 5] = bad
    out = multiply(left(x, scaling), right(weight.t(), scaling))
    wrong = torch.zeros(T, dtype=torch.bool)
    wrong[3] = True
    if scaling == "tensorwise":
        wrong[:] = True
    assert torch.equal(~out.isfinite().any(1), wrong)
    grad = torch.ones(T, O, dtype=torch.bfloat16)
    assert not weight_gradient(grad, x, scaling)[:, 5].isfinite().any()


def test_without_scaling_products_are_torchs() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    assert torch.equal(multiply(left(a, None), right(b, None)), a @ b)
    assert torch.equal(weight_gradient(a, torch.ones(3, 2), None), a.t() @ torch.ones(3, 2))


@given(rows=st.integers(1, 300), columns=st.integers(1, 10))
@settings(deadline=None)
def test_scales_of_blocks_have_the_order_of_torchao(rows: int, columns: int) -> None:
    exponents = torch.randint(256, (rows, columns), dtype=torch.uint8)
    assert torch.equal(_in_tiles(exponents), to_blocked(exponents))


def test_blocks_of_a_gpu_stand_for_what_a_cpu_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(B * T, I).bfloat16() * torch.randn(B * T, 1).exp2()
    sides = {"cpu": (left(x, "mxfp8"), right(x.t(), "mxfp8"))}
    monkeypatch.setattr(float8, "is_accelerator", lambda device: True)
    sides["gpu"] = left(x, "mxfp8"), right(x.t(), "mxfp8")
    rows, columns = sides["gpu"]
    assert rows.scale is not None
    assert columns.scale is not None
    assert rows.values.is_contiguous()
    assert columns.values.t().is_contiguous()
    of_cpu = sides["cpu"][0].values
    assert torch.equal(sides["cpu"][1].values, of_cpu.t())
    for values, scale in ((rows.values, rows.scale), (columns.values.t(), columns.scale)):
        of_blocks = from_blocked(scale.view(torch.uint8), B * T, I // 32).view(torch.float8_e8m0fnu)
        assert torch.equal(values.float() * of_blocks.float().repeat_interleave(32, 1), of_cpu.float())


def test_torch_takes_the_blocks_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all three products: on the meta device it judges the order of the operands and the number of scales."""
    monkeypatch.setattr(float8, "is_accelerator", lambda device: True)
    x, weight, grad = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((T, I), (O, I), (T, O))
    )
    assert multiply(left(x, "mxfp8"), right(weight.t(), "mxfp8")).shape == (T, O)
    assert multiply(left(grad, "mxfp8", of_gradient=True), right(weight, "mxfp8")).shape == (T, I)
    assert weight_gradient(grad, x, "mxfp8").shape == (O, I)
