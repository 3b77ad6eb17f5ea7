"""The GPUs with known peaks. A GPU that is not listed is unknown: nothing is guessed from a similar name."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Precision = Literal["fp32", "bf16", "fp8"]
AttentionKernel = Literal["auto", "flash", "cudnn", "efficient"]
FLASH: tuple[AttentionKernel, ...] = ("auto", "flash")  # with which FlashAttention-2 may be used
FLASH_HEAD_DIM = 256  # the widest heads that it takes


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Peaks are dense; bandwidths are decimal and in one direction."""

    name: str
    device_names: tuple[str, ...]  # as NVML and torch report it, without "NVIDIA"
    bf16_tflops: float
    hbm_gb: float
    hbm_tb_s: float
    link_gb_s: float  # NVLink or Infinity Fabric, one direction
    source: str
    architecture: str = ""
    watts: float | None = None  # power limit of the board as sold
    processors: int | None = None  # streaming multiprocessors; None: unknown, and not NVIDIA's
    fp8_tflops: float | None = None
    best_bf16_tflops: float | None = None  # the best measured rate of a matrix product
    best_fp8_tflops: float | None = None
    nvlink_domain: int | None = None  # GPUs that NVLink joins as sold, if more than those of a node


@cache
def gpus() -> tuple[Gpu, ...]:
    """Every GPU of gpus.toml, in its order."""
    table = tomllib.loads(files("seatrial.hardware").joinpath("gpus.toml").read_text(encoding="utf-8"))
    return tuple(Gpu(**(entry | {"device_names": tuple(entry["device_names"])})) for entry in table["gpu"])


def find_gpu(name: str) -> Gpu | None:
    """The GPU with this catalogue name ("H100 SXM") or device name ("NVIDIA H100 80GB HBM3"); None if unknown.

    Only whole names match: "NVIDIA H100 NVL" and "NVIDIA H100 80GB HBM3 MIG 1g.10gb" do not match.
    """
    wanted = normal_name(name)
    for gpu in gpus():
        if wanted in {normal_name(n) for n in (gpu.name, *gpu.device_names)}:
            return gpu
    return None


def peak_flops(gpu: Gpu, precision: Precision) -> float | None:
    """Dense peak in FLOP/s for training in `precision`; None if it is not known.

    fp32 is None: whether the tensor cores (TF32) are used depends on settings, and the figures differ eightfold.
    """
    tflops = {"fp32": None, "bf16": gpu.bf16_tflops, "fp8": gpu.fp8_tflops}[precision]
    return None if tflops is None else tflops * 1e12


def normal_name(name: str) -> str:
    return " ".join(name.split()).casefold().removeprefix("nvidia ")
