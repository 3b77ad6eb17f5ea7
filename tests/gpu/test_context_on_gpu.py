"""Context parallel on CUDA: attention of a rank's positions on one device, training on two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_runs import train
from torch import Tensor
from torch.nn.attention.bias import CausalVariant

from seatrial.model.decoder import attention
from seatrial.parallel.context import _LowerRight, own_positions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

B, N, K, T, H, RANKS = 1, 8, 2, 8192, 128, 4


@pytest.mark.parametrize("rank", range(RANKS))
def test_attention_of_a_ranks_positions_needs_no_mask_in_memory(rank: int) -> None:
    """Outputs and gradients against attention over all positions, in bf16."""

    def drawn(heads: int) -> Tensor:
        return torch.randn(B, T, heads, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def own(x: Tensor) -> Tensor:
        return own_positions(x, 1, size=RANKS, rank=rank)

    q, k, v = drawn(N), drawn(K), drawn(K)
    whole = attention(q, k, v)
    grad = own(torch.randn_like(whole))
    expected = torch.autograd.grad(own(whole), (q, k, v), grad)
    C = T // (2 * RANKS)
    seen = [(chunk + 1) * C for chunk in (rank, 2 * RANKS - 1 - rank)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outs = [
        attention(part, k[:, :n], v[:, :n], _LowerRight(CausalVariant.LOWER_RIGHT, C, n))
        for part, n in zip(own(q).chunk(2, 1), seen, strict=True)
    ]
    out = torch.cat(outs, dim=1)
    found = torch.autograd.grad(out, (q, k, v), grad)
    used = torch.cuda.max_memory_allocated() - before
    torch.testing.assert_close(out, own(whole), atol=2e-2, rtol=2e-2)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.15, rtol=0.15)
    scores = B * N * C * T * out.element_size()
    assert used < 16 * q.nbytes < 4 * scores


JOB = """
name = "two-gpus"
[model]
preset = "qwen2.5-tiny"
[data]
train = "builtin:python-library"
[cluster]
gpus_per_node = 2
device = "cuda"
[train]
steps = 12
sequence_length = 512
global_batch = 16
microbatch = 4
sample_tokens = 0
[optimizer]
lr = 3e-3
warmup_steps = 2
[checkpoint]
every_steps = 12
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a context group needs 2 CUDA devices")
@pytest.mark.parametrize("ring", ["false", "true"])
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_it_trains_as_sharded_data_parallel_does(compiled: str, ring: str, tmp_path: Path) -> None:
    compiles = f"train.compile={compiled}"
    plain = train(tmp_path / "shard", JOB, "parallel.shard=2", compiles)
    ours = train(tmp_path / "context", JOB, "parallel.context=2", f"parallel.ring_attention={ring}", compiles)
    assert plain[-1]["loss"] < plain[0]["loss"] - 0.5
    assert [m["loss"] for m in ours] == pytest.approx([m["loss"] for m in plain], abs=0.02)
