"""The custom operators of compiled layers: schema and fake implementation match the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.parallel import overlap_ops
from seatrial.parallel.overlap import Cut

B, t, D, O = 2, 6, 8, 4  # noqa: E741  the letters of shapes
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture
def name() -> Iterator[str]:
    """Of a group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


@pytest.mark.parametrize("microbatch", [1, B])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("in_parts", [False, True])
def test_all_gather_matmul(name: str, microbatch: int, biased: bool, in_parts: bool) -> None:
    x, weights = _random(microbatch, t, D), [_random(O, D), _random(2 * O, D)]
    biases = [_random(O), _random(2 * O)] if biased else []
    torch.library.opcheck(
        overlap_ops.all_gather_matmul_op, (x, weights, biases, in_parts, name), test_utils=CHECKS
    )
    outs = overlap_ops.all_gather_matmul_op(x, weights, biases, in_parts, name)
    cut = Cut.of(microbatch, t, 1, in_parts=in_parts)
    for out, weight, bias in zip(outs, weights, biases or [None, None], strict=True):
        expected = torch.nn.functional.linear(x, weight, bias)
        assert torch.allclose(cut.in_order(out), expected, atol=1e-6)
    sum(out.square().sum() for out in outs).backward()
    ours = [p.grad for p in (x, *weights, *biases)]
    for p in (x, *weights, *biases):
        p.grad = None
    expected_outs = [
        torch.nn.functional.linear(x, w, b) for w, b in zip(weights, biases or [None, None], strict=True)
    ]
    sum(out.square().sum() for out in expected_outs).backward()
    for p, grad in zip((x, *weights, *biases), ours, strict=True):
        assert torch.allclose(p.grad, grad, atol=1e-4)
    grads = [torch.randn_like(out) for out in outs]
    plain = [w.detach() for w in weights]
    torch.library.opcheck(
        overlap_ops._all_gather_matmul_backward_op,
        (grads, x.detach(), plain, biased, in_parts, name),
        test_utils=CHECKS,
    )


@pytest.mark.parametrize("microbatch", [1, B])
@pytest.mark.parametrize("in_parts", [False, True])
def test_matmul_reduce_scatter(name: str, microbatch: int, in_parts: bool) -> None:
    h, weight = _random(microbatch, t, O), _random(D, O)
    cut = Cut.of(microbatch, t, 1, in_parts=in_parts)
    torch.library.opcheck(
        overlap_ops.matmul_reduce_scatter_op,
        (cut.in_parts(h), weight, microbatch, in_parts, name),
        test_utils=CHECKS,
    )
    y = overlap_ops.matmul_reduce_scatter_op(cut.in_parts(h), weight, microbatch, in_parts, name)
    assert torch.allclose(y, h @ weight.t(), atol=1e-6)
    ours = torch.autograd.grad(y.square().sum(), (h, weight))
    theirs = torch.autograd.grad((h @ weight.t()).square().sum(), (h, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    torch.library.opcheck(
        overlap_ops._matmul_reduce_scatter_backward_op,
        (torch.randn(microbatch, t, D), cut.in_parts(h).detach(), weight.detach(), in_parts, name),
        test_utils=CHECKS,
    )
