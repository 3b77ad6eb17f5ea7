"""Attention within documents by flash attention on a CUDA device: that with a bias, and a job's losses those of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_runs import train
from test_train_on_gpu import JOB
from torch import Tensor

from seatrial.hardware.accelerator import has_flash_attention
from seatrial.model.decoder import attention, document_bias
from seatrial.parallel.context import own_chunks
from seatrial.parallel.packed import document_bounds, packed_attention

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_flash_attention(CUDA), reason="flash attention needs a CUDA device of compute capability 8.0"
    ),
]
B, T, N, K, H = 2, 768, 8, 2, 128


def _results(
    attend: object, qkv: list[Tensor], grad: Tensor, mask: Tensor, queries: slice, seen: slice
) -> list[Tensor]:
    own = [x.clone().requires_grad_() for x in qkv]
    q, k, v = own
    out = attend(q[:, queries], k[:, seen], v[:, seen], mask)  # type: ignore[operator]
    return [out, *torch.autograd.grad(out, own, grad[:, queries])]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("often", [0.0, 0.01, 0.3])
def test_it_is_attention_with_a_bias(often: float, size: int) -> None:
    """Within what bf16 rounds; values of other documents get no gradient at all."""
    generator = torch.Generator().manual_seed(0)
    document_BT = (torch.rand(B, T, generator=generator) < often).cumsum(1, dtype=torch.int32)
    shapes = [(B, T, heads, H) for heads in (N, K, K, N)]
    *qkv, grad = (torch.randn(shape, generator=generator).bfloat16().to(CUDA) for shape in shapes)
    bias = document_bias(document_BT.to(CUDA), torch.float64)
    for rank in range(size):
        chunks = own_chunks(T, size=size, rank=rank) if size > 1 else [range(T)]
        bounds = document_bounds(document_BT, B, chunks)[0].to(CUDA)
        for chunk, bounds_2L in zip(chunks, bounds, strict=True):
            queries, seen = slice(chunk.start, chunk.stop), slice(chunk.stop)
            ours = _results(packed_attention, qkv, grad, bounds_2L, queries, seen)
            exact = [x.double() for x in (*qkv, grad)]
            theirs = _results(attention, exact[:3], exact[3], bias[:, :, queries, seen], queries, seen)
            for found, expected in zip(ours, theirs, strict=True):
                assert (found.double() - expected).norm() < 0.01 * expected.norm()
            assert not ours[3][theirs[3] == 0].any()


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_job_trains_as_the_cpu_does(compiled: str, tmp_path: Path) -> None:
    apart = ("data.attend_across_documents=false", "train.sequence_length=1024")
    gpu = train(tmp_path / "gpu", JOB, *apart, "cluster.device=cuda", f"train.compile={compiled}")
    cpu = train(tmp_path / "cpu", JOB, *apart, "cluster.device=cpu", "train.precision=fp32")
    for ours, theirs in zip(gpu, cpu, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.05), ours["step"]
