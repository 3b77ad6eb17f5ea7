"""Kernel times on one GPU: matrix products by shape, attention, and memory-bound operators.

These are times of good kernels that run alone. The effect of a software stack (other kernels, clocks under power limits,
gaps between kernels) is its `pace`, see `calibration.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from seatrial.hardware.catalogue import Gpu, Precision, peak_flops

# Output tile of large kernels; both orders are tried (docs.nvidia.com, "Matrix Multiplication Background").
TILE = (128, 256)
PROCESSORS_SOURCE = "NVIDIA's white papers: A100 108; H100 SXM 132, PCIe 114; cudaDeviceProp of B200: 148; B300 and GB300 assumed as B200"
# Share of the data sheet's bandwidth that copying or adding large arrays reaches.
MEMORY_SHARE = 0.85
MEMORY_SOURCE = "assumption: STREAM-like kernels read 83 to 93 % of the data sheet on A100 and H100"
# Batched GEMMs of heads whose width is not a multiple of 8 do not use tensor cores (docs.nvidia.com, "Matrix
# Multiplication Background"): an A100's TFLOP/s without them, from the data sheet. BigScience (chronicles-prequel):
# 162.7 s with 128 heads of 108 where 96 of 144 took 124.8; 221 s with 96 of 150 (width 14,400) where 13,824 took 160.
TENSOR_CORE_ROWS, WITHOUT_TENSOR_CORES = 8, 19.5
NARROW = 64  # the narrower side of the smaller usual tiles (same document)
# Filling and draining a matrix product's pipeline, per wave of tiles.
WAVE_S = 1.0e-6


class UnknownSpeedError(ValueError):
    """The GPU's speed in this precision is unknown."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Shares of the dense bf16 peak that attention reaches on long sequences, and the length that halves its speed."""

    forward: float
    backward: float
    half_length: float
    source: str


_FLASH2_A100 = AttentionSpeed(
    0.64, 0.58, 600, "FlashAttention-2, arXiv:2307.08691 figures 5-6: A100, head dimension 128"
)
_FLASH2_H100 = AttentionSpeed(
    0.42, 0.34, 600, "FlashAttention-2 on H100, arXiv:2307.08691 figure 7; 2407.08608 section 4"
)
_CUDNN_H100 = AttentionSpeed(
    0.62, 0.52, 1000, "FlashAttention-3 and cuDNN 9, arXiv:2407.08608 figures 5-6: H100"
)
_CUDNN_B200 = AttentionSpeed(
    0.62, 0.48, 1500, "assumption: cuDNN on B200 reaches the shares that it has on H100"
)
_FLASH1_A100 = AttentionSpeed(
    0.40, 0.30, 600, "FlashAttention 1: 30-50 % forward, 25-35 % backward, arXiv:2307.08691 section 1: A100"
)
_FLASH1_H100 = AttentionSpeed(
    0.24, 0.18, 600, "FlashAttention 1 with Ampere's instructions, which give 0.6 of an H100's peak"
)


# By architecture; torch's FlashAttention-2 has no kernels for Blackwell, where SDPA uses cuDNN. Others are unmeasured.
ATTENTION = {
    "Ampere": {"flash1": _FLASH1_A100, "flash2": _FLASH2_A100, "cudnn": _FLASH2_A100},
    "Hopper": {"flash1": _FLASH1_H100, "flash2": _FLASH2_H100, "cudnn": _CUDNN_H100},
    "Blackwell": {"flash1": _FLASH1_H100, "flash2": _CUDNN_B200, "cudnn": _CUDNN_B200},
}


@dataclass(frozen=True)
class Kernels:
    """Kernel times of one GPU in one precision, in seconds."""

    gpu: Gpu
    precision: Precision
    attention_kernel: str = "flash2"

    def __post_init__(self) -> None:
        if self.gpu.architecture not in ATTENTION:
            of = self.gpu.architecture or self.gpu.name
            raise UnknownSpeedError(f"no training run and no attention kernel of {of} was measured")

    @cached_property
    def peak(self) -> float:
        """Dense FLOP/s of matrix products, from the data sheet."""
        peak = peak_flops(self.gpu, self.precision)
        if peak is None:
            raise UnknownSpeedError(f"no peak is known for {self.precision} on {self.gpu.name}")
        return peak

    @cached_property
    def best(self) -> float:
        """Best measured FLOP/s of a matrix product; where unmeasured, the peak times bf16's share of its peak."""
        fp8 = self.precision == "fp8"
        measured = self.gpu.best_fp8_tflops if fp8 else self.gpu.best_bf16_tflops
        if measured is not None:
            return measured * 1e12
        if self.gpu.best_bf16_tflops is not None:
            return self.peak * self.gpu.best_bf16_tflops / self.gpu.bf16_tflops
        return self.peak * 0.75  # all measured ones are between 0.71 and 0.87; stated in `provenance`

    @cached_property
    def memory(self) -> float:
        """Bytes/s that a memory-bound operator moves."""
        return self.gpu.hbm_tb_s * 1e12 * MEMORY_SHARE

    @cached_property
    def _attention(self) -> AttentionSpeed:
        return ATTENTION[self.gpu.architecture][self.attention_kernel]

    def product(self, m: int, n: int, k: int) -> float:
        """Seconds of a matrix product [m, k] x [k, n].

        Whole tiles, in waves of one tile per SM, of which the last is seldom full; each wave writes its tiles. Not below
        the time of moving operands and result (roofline). Split-K and stream-K split the last wave, so half of its idle
        time counts.
        """
        if min(m, n, k) <= 0:
            return 0.0
        size = 1 if self.precision == "fp8" else 2
        floor = (size * (m * k + k * n) + 2 * m * n) / self.memory
        processors = self.gpu.processors
        if processors is None:  # wave quantisation is ignored
            return max(2.0 * m * n * k / self.best, floor)
        tiles = min(math.ceil(m / a) * math.ceil(n / b) for a, b in (TILE, TILE[::-1]))
        waves = tiles / processors
        if waves >= 1:
            waves = (waves + math.ceil(waves)) / 2
        else:  # smaller tiles or split-K keep most SMs busy
            waves = max(waves, min(1.0, 0.5 + waves / 2))
        area = TILE[0] * TILE[1]
        tile_s = 2.0 * area * k / (self.best / processors) + 2.0 * area * processors / self.memory + WAVE_S
        return max(waves * tile_s, floor)

    def heads(self, head_dim: int) -> tuple[float, float]:
        """Unfused attention's GEMMs: FLOP/s (0.6 of the best), and the width in whole tiles over a head's width."""
        speed = 0.6 * (WITHOUT_TENSOR_CORES * 1e12 if head_dim % TENSOR_CORE_ROWS else self.best)
        return speed, math.ceil(head_dim / NARROW) * NARROW / head_dim

    def move(self, n_bytes: float) -> float:
        """Seconds of an operator that reads and writes this much."""
        return n_bytes / self.memory

    def attention(self, flops: float, length: int, *, backward: bool) -> float:
        """Seconds of fused attention; `flops` are forward FLOPs, backward has 2.5 times that (it recomputes scores)."""
        speed = self._attention
        share = (speed.backward if backward else speed.forward) * length / (length + speed.half_length)
        return flops * (2.5 if backward else 1.0) / (self.gpu.bf16_tflops * 1e12 * share)
