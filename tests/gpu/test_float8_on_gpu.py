"""FP8 products on a CUDA device: those of the CPU, and a job that learns as in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_runs import train
from test_train_on_gpu import JOB

from seatrial.job.schema import Fp8Scaling
from seatrial.parallel.float8 import left, multiply, right, weight_gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="FP8 products need a CUDA device of compute capability 8.9",
    ),
]
BLACKWELL = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0),
    reason="MXFP8 products need a CUDA device of compute capability 10.0",
)
each_scaling = pytest.mark.parametrize(
    "scaling", ["rowwise", "tensorwise", pytest.param("mxfp8", marks=BLACKWELL)]
)


@each_scaling
@pytest.mark.parametrize("rows", [16, 272, 8352])  # also no multiple of a kernel's tile
def test_products_are_those_of_the_cpu(scaling: Fp8Scaling, rows: int) -> None:
    """But for the order of sums, and on Hopper, forward, for sums in less than fp32."""
    if scaling == "mxfp8":
        rows *= 2  # which are whole blocks
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 512, generator=generator).bfloat16()
    weight = torch.randn(256, 512, generator=generator).bfloat16()
    grad = torch.randn(rows, 256, generator=generator).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        a, w, g = x.to(device), weight.to(device), grad.to(device)
        of_input = multiply(left(g, scaling, of_gradient=True), right(w, scaling))
        output = multiply(left(a, scaling), right(w.t(), scaling))
        found.append([t.float().cpu() for t in (output, of_input, weight_gradient(g, a, scaling))])
    for ours, expected in zip(*found, strict=True):
        assert ours.isfinite().all()
        assert (ours - expected).norm() < 0.01 * expected.norm()


@each_scaling
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_it_learns_as_in_bf16(scaling: Fp8Scaling, compiled: str, tmp_path: Path) -> None:
    settings = ("cluster.device=cuda", f"train.compile={compiled}")
    plain = train(tmp_path / "bf16", JOB, *settings)
    fp8 = ("train.precision=fp8", f"train.fp8_scaling={scaling}")
    ours = train(tmp_path / "fp8", JOB, *settings, *fp8)
    fell = plain[0]["loss"] - plain[-1]["loss"]
    assert fell > 0.3
    assert abs(ours[-1]["loss"] - plain[-1]["loss"]) < 0.1 * fell
