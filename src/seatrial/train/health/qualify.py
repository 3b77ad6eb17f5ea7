"""Tests a device's arithmetic and memory: `python -m seatrial.train.health.qualify --device cuda`.

Run on a GPU after a reset, before it is used again. One JSON line on stdout; exit code 0 if all checks pass, else 1.
All values are integers that the floating-point types represent exactly, so results are compared bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from seatrial.hardware import accelerator

_REPEATS = 3
_MEMORY_BYTES = {"cpu": 32 << 20, "cuda": 8 << 30}
_MEMORY_SHARE = 0.5  # at most this fraction of a GPU's free memory
_BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 256 << 20}
# Sums of `inner` products of -1, 0 and 1 have a standard deviation of 2/3 sqrt(`inner`). 256, up to which bfloat16
# represents every integer exactly, is at least eight of these.
_GEMM = {"cpu": (512, 256), "cuda": (8192, 2048)}  # rows and columns, inner

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_product(
    device: torch.device, dtype: torch.dtype, *, multiply: Multiply = torch.matmul
) -> str | None:
    """Check matrix products in `dtype`: the problem, or None. Tests pass a faulty `multiply`.

    C = A B is checked by matrix-vector products: C x = A (B x) in float64 on the host (Freivalds, 1977). x has no zeros,
    so one wrong element of C is always detected. Repeated products must be bit-identical.
    """
    size, inner = _GEMM[device.type]
    seeded = torch.Generator(device="cpu").manual_seed(20)
    a = torch.randint(-1, 2, (size, inner), generator=seeded, dtype=torch.int8)
    b = torch.randint(-1, 2, (inner, size), generator=seeded, dtype=torch.int8)
    x = torch.randint(1, 1024, (size, 1), generator=seeded).double()
    on_device = a.to(device).to(dtype), b.to(device).to(dtype)
    first = multiply(*on_device)
    expected = a.double() @ (b.double() @ x)
    wrong = int((first.cpu().double() @ x != expected).sum())
    if wrong:
        return f"{wrong} of {size} rows of a {dtype} product are wrong"
    for repeat in range(1, _REPEATS):
        if not torch.equal(multiply(*on_device), first):
            return f"{dtype} product {repeat + 1} of the same matrices differs from the first"
    return None


def check_memory(
    device: torch.device, *, disturb: Callable[[torch.Tensor], None] | None = None
) -> str | None:
    """Check memory: the problem, or None. Patterns are written to many blocks, then all blocks are read back.

    Tests pass a `disturb` that changes a block.
    """
    wanted = _MEMORY_BYTES[device.type]
    if accelerator.is_accelerator(device):
        wanted = min(wanted, int(accelerator.free_memory(device) * _MEMORY_SHARE))
    words = _BLOCK_BYTES[device.type] // 8
    count = max(1, wanted // (words * 8))
    index = torch.arange(words, dtype=torch.int64, device=device)
    blocks = torch.empty((count, words), dtype=torch.int64, device=device)
    for name, pattern in (
        ("0101", 0x5555555555555555),
        ("1010", -0x5555555555555556),
        ("each word's number", None),
    ):
        for number, block in enumerate(blocks):
            block.copy_(index + number * words) if pattern is None else block.fill_(pattern)
        if disturb is not None:
            disturb(blocks)
        for number, block in enumerate(blocks):
            expected = index + number * words if pattern is None else torch.full_like(index, pattern)
            wrong = int((block != expected).sum())
            if wrong:
                return f"{wrong} words of block {number} of {count} did not keep the pattern {name}"
    return None


def qualify(devices: Sequence[torch.device]) -> dict[str, Any]:
    """All checks on each device: {"ok", "checks": {"cuda:0 memory": {"ok", "seconds", "problem"}}}."""
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict[str, Any] = {}
    for device in devices:
        checks: dict[str, Callable[[], str | None]] = {
            "gemm_fp32": partial(check_product, device, torch.float32),
            "gemm_bf16": partial(check_product, device, torch.bfloat16),
            "memory": partial(check_memory, device),
        }
        for name, check in checks.items():
            begin = time.perf_counter()
            try:
                problem = check()
            except RuntimeError as error:  # a CUDA error
                problem = f"{type(error).__name__}: {error}"
            seconds = round(time.perf_counter() - begin, 3)
            results[f"{device} {name}"] = {"ok": problem is None, "seconds": seconds, "problem": problem}
    return {"ok": all(r["ok"] for r in results.values()), "checks": results}


def _on_timeout(seconds: float) -> None:
    # On a separate thread: a hung GPU blocks the main thread in a call that no signal interrupts.
    _print({"ok": False, "checks": {}, "problem": f"did not end within {seconds:g} s"})
    os._exit(1)


def _print(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m seatrial.train.health.qualify`; the exit code."""
    parser = argparse.ArgumentParser(prog="seatrial.train.health.qualify", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--gpu", type=int, metavar="N", help="one visible CUDA device (default: all)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="minimum number of devices")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    timer = threading.Timer(arguments.timeout, _on_timeout, [arguments.timeout])
    timer.daemon = True
    timer.start()
    count = 1 if arguments.device == "cpu" else torch.accelerator.device_count()
    wanted = max(arguments.count, 1 + (arguments.gpu or 0))
    if arguments.device == "cpu":
        result = qualify([torch.device("cpu")])
    elif count < wanted:
        problem = f"{wanted} CUDA devices are needed, this process sees {count}"
        result = {"ok": False, "checks": {}, "problem": problem}
    else:
        numbers = range(count) if arguments.gpu is None else [arguments.gpu]
        result = qualify([torch.device(arguments.device, number) for number in numbers])
    timer.cancel()
    _print(result)
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
