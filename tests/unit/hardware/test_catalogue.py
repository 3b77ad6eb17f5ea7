"""A GPU is known by its whole name or not at all."""

from __future__ import annotations

import pytest

from seatrial.hardware.catalogue import find_gpu, gpus, peak_flops
from seatrial.hardware.mfu import mfu
from seatrial.job import model_presets


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("H100 SXM", "H100 SXM"),
        ("h100 sxm", "H100 SXM"),
        (" NVIDIA  H100 80GB HBM3 ", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200 SXM"),
        ("NVIDIA B300 SXM6 AC", "B300 SXM"),
        ("B300 SXM", "B300 SXM"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB SXM"),
        ("A100-SXM4-40GB", "A100-40GB SXM"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB PCIe"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_known(name: str, found: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.name == found


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "H100",
        "A100",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H20",
        "NVIDIA H800",
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090",
        "Tesla V100-SXM2-32GB",
        "cpu",
    ],
)
def test_unknown_is_never_a_guess(name: str) -> None:
    assert find_gpu(name) is None


def test_names_are_unique() -> None:
    names = [n.casefold() for gpu in gpus() for n in {gpu.name, *gpu.device_names}]
    assert len(names) == len(set(names))
    assert len(gpus()) == 13


def test_figures_are_dense_and_in_one_direction() -> None:
    figures = {g.name: (g.bf16_tflops, g.fp8_tflops, g.hbm_gb, g.link_gb_s) for g in gpus()}
    assert figures["A100-80GB SXM"] == (312.0, None, 80.0, 300.0)
    assert figures["H100 SXM"] == (989.0, 1979.0, 80.0, 450.0)
    assert figures["H200 SXM"] == (989.0, 1979.0, 141.0, 450.0)
    assert figures["B300 SXM"] == (2250.0, 4500.0, 270.0, 900.0)
    assert all(g.source for g in gpus())


def test_mfu_of_the_reference_voyage() -> None:
    """72B at 2,500 tokens/s/GPU on B300: what the design says a good run reaches."""
    gpu = find_gpu("B300 SXM")
    assert gpu is not None
    assert peak_flops(gpu, "bf16") == 2.25e15
    assert peak_flops(gpu, "fp32") is None
    flops = model_presets()["qwen2.5-72b"].flops_per_token(4096)
    share = mfu(flops, 2500.0, peak_flops(gpu, "bf16"))
    assert share is not None
    assert 0.45 < share < 0.52
    assert mfu(flops, 2500.0, None) is None
