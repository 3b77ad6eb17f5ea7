"""The custom operators of compiled layers: schema and fake implementation match the real one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from seatrial.job.schema import Fp8Scaling
from seatrial.parallel import overlap_ops
from seatrial.parallel.float8 import Float8Linear
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
        overlap_ops.all_gather_matmul_op, (x, weights, biases, in_parts, name, None), test_utils=CHECKS
    )
    outs = overlap_ops.all_gather_matmul_op(x, weights, biases, in_parts, name, None)
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
        (grads, x.detach(), plain, biased, in_parts, name, None),
        test_utils=CHECKS,
    )


@pytest.mark.parametrize("microbatch", [1, B])
@pytest.mark.parametrize("in_parts", [False, True])
def test_matmul_reduce_scatter(name: str, microbatch: int, in_parts: bool) -> None:
    h, weight = _random(microbatch, t, O), _random(D, O)
    cut = Cut.of(microbatch, t, 1, in_parts=in_parts)
    torch.library.opcheck(
        overlap_ops.matmul_reduce_scatter_op,
        (cut.in_parts(h), weight, microbatch, in_parts, name, None),
        test_utils=CHECKS,
    )
    y = overlap_ops.matmul_reduce_scatter_op(cut.in_parts(h), weight, microbatch, in_parts, name, None)
    assert torch.allclose(y, h @ weight.t(), atol=1e-6)
    ours = torch.autograd.grad(y.square().sum(), (h, weight))
    theirs = torch.autograd.grad((h @ weight.t()).square().sum(), (h, weight))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    torch.library.opcheck(
        overlap_ops._matmul_reduce_scatter_backward_op,
        (torch.randn(microbatch, t, D), cut.in_parts(h).detach(), weight.detach(), in_parts, name, None),
        test_utils=CHECKS,
    )


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_float8_products_are_those_of_a_linear_layer(name: str, scaling: Fp8Scaling) -> None:
    """In a group of one, to the bit."""
    linear = torch.nn.Linear(64, 48).bfloat16()
    x = torch.randn(B, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    inputs = (x, linear.weight, linear.bias)
    (gathered,) = overlap_ops.all_gather_matmul_op(x, [linear.weight], [linear.bias], False, name, scaling)
    expected = Float8Linear(linear, scaling)(x)
    grad = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, inputs, grad)
    for a, b in zip(torch.autograd.grad(gathered, inputs, grad.flatten(0, 1)), theirs, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(gathered.view_as(expected), expected)
    scattered = overlap_ops.matmul_reduce_scatter_op(x.flatten(0, 1), linear.weight, B, False, name, scaling)
    linear.bias = None
    assert torch.equal(scattered, Float8Linear(linear, scaling)(x))
    ours = torch.autograd.grad(scattered, inputs[:2], grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=False))
