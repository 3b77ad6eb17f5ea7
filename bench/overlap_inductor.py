"""How inductor schedules asynchronous collectives: the order in which it launches, waits and computes.

    python bench/overlap_inductor.py

Gathers in four parts with a product each, then four products with a reduce-scatter each, written as functional
collectives in an order in which communication overlaps computation. Prints the order in the compiled code, forward and backward: G and S launch
a gather and a reduce-scatter, W waits, P is a matrix product; other kernels are left out. The backward pass has a
wait after each launch, because an autograd function cannot express more. Nothing runs on other ranks.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS, PARTS, ROWS, WIDTH, INNER = 2, 4, 64, 32, 48
_ops = torch.ops._c10d_functional
_CALL = re.compile(r"_c10d_functional\.(\w+)\.default\(|extern_kernels\.(\w+)\(")
_LETTERS = {"all_gather_into_tensor": "G", "reduce_scatter_tensor": "S", "wait_tensor": "W"}


class Gather(torch.autograd.Function):
    """Forward: launches a gather. Backward: a reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _ops.all_gather_into_tensor(part, RANKS, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ops.wait_tensor(_ops.reduce_scatter_tensor(grads[0], "sum", RANKS, ctx.group)), None


class Scatter(torch.autograd.Function):
    """Forward: launches a reduce-scatter. Backward: a gather."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _ops.reduce_scatter_tensor(rows, "sum", RANKS, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ops.wait_tensor(_ops.all_gather_into_tensor(grads[0].contiguous(), RANKS, ctx.group)), None


class Wait(torch.autograd.Function):
    """Waits for the result; passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, under_way: Tensor) -> Tensor:
        return _ops.wait_tensor(under_way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def written(x: Tensor, into: Tensor, out_of: Tensor, group: str) -> Tensor:
    """GGGG, then WP for each part; PS for each part, then WWWW."""
    under_way = [Gather.apply(part, group) for part in x.chunk(PARTS)]
    hidden = torch.nn.functional.silu(torch.cat([Wait.apply(part) @ into.t() for part in under_way]))
    sums = [Scatter.apply(part @ out_of.t(), group) for part in hidden.chunk(PARTS)]
    return torch.cat([Wait.apply(part) for part in sums])


def main() -> int:
    """Compile, run, and print the order in the compiled code."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    shapes = ((ROWS, WIDTH), (INNER, WIDTH), (WIDTH, INNER))
    given = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    compiled = torch.compile(written, fullgraph=True)
    _, codes = run_and_get_code(lambda: compiled(*given, group).sum().backward())
    print(f"torch {torch.__version__}; written: GGGG WP WP WP WP PS PS PS PS WWWW")
    for name, code in zip(("forward", "backward"), codes, strict=True):
        calls = [_LETTERS.get(collective, "P") for collective, _ in _CALL.findall(code)]
        print(f"{name}: {' '.join(calls)}")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
