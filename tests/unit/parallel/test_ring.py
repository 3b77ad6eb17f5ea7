"""The operators of ring attention: schema and fake implementation match the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from seatrial.parallel import ring

B, t, N, K, H = 2, 8, 4, 2, 16


@pytest.fixture(params=[0, 1])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a group of two, where what is received is never written."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_compiled_layers_see(name: str, dtype: torch.dtype) -> None:
    q, k, v, grad = (torch.randn(B, t, heads, H, dtype=dtype) for heads in (N, K, K, N))
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(ring.ring_attention_op, (q, k, v, name), **checks)
    out, lse = ring.ring_attention_op(q, k, v, name)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.library.opcheck(ring._ring_attention_backward_op, (grad, q, k, v, out, lse, name), **checks)
