"""The head's loss in parts beside that of whole logits: memory, time, loss and gradients, on one process.

    python bench/loss.py [--rounds 3] [--positions 2048] [--width 896] [--vocabulary 152064]

Memory is the highest sum of live tensors beside inputs and returned gradients, a logit of all positions, counted on fake tensors. Both
ways take turns on the same inputs in fp32, with one thread; the ratio is the median of the pairs'. The second size is one part.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from seatrial.parallel.loss import cross_entropy
from seatrial.train.dryrun.recorder import Recorder
from seatrial.train.dryrun.timeline import Timeline

SMALL = (512, 256, 8192)
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(x_BTD: Tensor, weight_VD: Tensor, target_BT: Tensor) -> Tensor:
    logits_NV = F.linear(x_BTD, weight_VD).flatten(0, 1).float()
    return F.cross_entropy(logits_NV, target_BT.flatten(), reduction="sum") / target_BT.numel()


def in_parts(x_BTD: Tensor, weight_VD: Tensor, target_BT: Tensor) -> Tensor:
    return cross_entropy(x_BTD, weight_VD, target_BT, tokens=target_BT.numel(), group=None, rank=0)


def inputs(size: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    positions, width, vocabulary = size
    x_BTD = torch.randn(1, positions, width, dtype=dtype).requires_grad_()
    weight_VD = (torch.randn(vocabulary, width, dtype=dtype) / width**0.5).requires_grad_()
    return x_BTD, weight_VD, torch.randint(0, vocabulary, (1, positions))


def bytes_a_logit(way: Way, size: tuple[int, int, int], dtype: torch.dtype) -> float:
    timeline = Timeline()
    with FakeTensorMode(), Recorder(timeline, {}) as recorder:
        args = inputs(size, dtype)
        recorder.add(args)
        recorder.restart()
        timeline.mark("loss")
        way(*args).backward()
    kept = 2 * (args[0].nbytes + args[1].nbytes) + args[2].nbytes
    return (max(p.total for p in timeline.peaks().values()) - kept) / (size[0] * size[2])


def compare(size: tuple[int, int, int], rounds: int) -> None:
    print(f"{size[0]} positions, width {size[1]}, vocabulary {size[2]}")
    for dtype in (torch.float32, torch.bfloat16):
        before, after = (bytes_a_logit(way, size, dtype) for way in (whole, in_parts))
        print(
            f"  {dtype}: {before:.2f} bytes a logit whole, {after:.2f} in parts, ratio {after / before:.3f}"
        )
    args = inputs(size, torch.float32)
    seconds: dict[Way, list[float]] = {whole: [], in_parts: []}
    found: dict[Way, list[Tensor]] = {}
    for _ in range(rounds + 1):
        for way in (whole, in_parts):
            args[0].grad = args[1].grad = None
            begin = time.perf_counter()
            loss = way(*args)
            loss.backward()
            seconds[way].append(time.perf_counter() - begin)
            assert args[0].grad is not None
            assert args[1].grad is not None
            found[way] = [loss.detach(), args[0].grad, args[1].grad]
    ratios = [b / a for a, b in zip(seconds[whole][1:], seconds[in_parts][1:], strict=True)]
    off = [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found.values(), strict=True)]
    print(
        f"  time {statistics.median(seconds[whole][1:]):.3f} s whole, in parts over whole {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}); off by {off[0]:.1e} in the loss, {max(off[1:]):.1e} of a gradient's largest entry"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    compare((options.positions, options.width, options.vocabulary), options.rounds)
    compare(SMALL, 10 * options.rounds)


if __name__ == "__main__":
    main()
