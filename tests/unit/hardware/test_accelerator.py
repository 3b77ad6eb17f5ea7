"""Deterministic kernels, in a process of its own: torch keeps such settings; which kernels attention may use."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from seatrial.base.errors import InputError
from seatrial.hardware import accelerator
from seatrial.hardware.catalogue import AttentionKernel

KERNELS = ("flash", "cudnn", "mem_efficient", "math")
CODE = """
import os, torch
from seatrial.hardware import accelerator
accelerator.make_deterministic()
from torch._inductor import config
print(os.environ["NCCL_ALGO"], os.environ["CUBLAS_WORKSPACE_CONFIG"], torch.are_deterministic_algorithms_enabled(), config.deterministic)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Ring :4096:8 True True"),
        ({"NCCL_ALGO": "ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "ring :16:8 True True"),
        ({"NCCL_ALGO": "^NVLS"}, "NCCL_ALGO=^NVLS does not fix the order"),
    ],
)
def test_deterministic_kernels_and_reductions(given: dict[str, str], said: str) -> None:
    without = {k: v for k, v in os.environ.items() if k not in ("NCCL_ALGO", "CUBLAS_WORKSPACE_CONFIG")}
    ended = subprocess.run(
        [sys.executable, "-c", CODE], env={**without, **given}, capture_output=True, text=True, check=False
    )
    assert said in ended.stdout + ended.stderr
    assert (ended.returncode == 0) == said.endswith("True")


@pytest.mark.parametrize(("device", "variable", "name"), [("cuda", "CC", "gcc"), ("cpu", "CXX", "g++")])
def test_a_missing_compiler_is_said_before_the_first_step(
    device: str, variable: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=f"this one has no {re.escape(name)}"):
        accelerator.check_compiler(device)
    (tmp_path / name).touch(0o755)
    accelerator.check_compiler(device)
    (tmp_path / name).unlink()
    monkeypatch.setenv(variable, "icx")
    accelerator.check_compiler(device)
    monkeypatch.setattr(accelerator.sysconfig, "get_path", lambda name: str(tmp_path / name))
    with pytest.raises(InputError, match=r"this one has no .*include/Python\.h"):
        accelerator.check_compiler(device)


@pytest.fixture
def _torchs_own() -> Iterator[None]:
    cuda = torch.backends.cuda
    before = [getattr(cuda, f"{name}_sdp_enabled")() for name in KERNELS]
    yield
    accelerator.choose_attention("auto", deterministic=False)
    for name, enabled in zip(KERNELS, before, strict=True):
        getattr(cuda, f"enable_{name}_sdp")(enabled)


@pytest.mark.usefixtures("_torchs_own")
@pytest.mark.parametrize(
    ("kernel", "deterministic", "allowed"),
    [
        ("auto", False, {"flash", "cudnn", "mem_efficient"}),
        ("auto", True, {"flash", "math"}),
        ("flash", False, {"flash"}),
        ("flash", True, {"flash", "math"}),
        ("cudnn", False, {"cudnn"}),
        ("efficient", False, {"mem_efficient"}),
    ],
)
def test_kernels_of_attention(kernel: AttentionKernel, deterministic: bool, allowed: set[str]) -> None:
    accelerator.choose_attention(kernel, deterministic=deterministic)
    assert {name for name in KERNELS if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()} == allowed


@pytest.mark.usefixtures("_torchs_own")
@pytest.mark.parametrize(
    ("kernel", "dtype", "head_dim", "biased", "needs"),
    [
        ("auto", torch.bfloat16, 128, False, False),
        ("auto", torch.float32, 128, False, True),
        ("auto", torch.bfloat16, 128, True, True),
        ("auto", torch.bfloat16, 320, False, True),
        ("efficient", torch.bfloat16, 128, False, True),
        ("cudnn", torch.bfloat16, 128, False, True),
    ],
)
def test_only_flash_attention_takes_fewer_keys(
    kernel: AttentionKernel, dtype: torch.dtype, head_dim: int, biased: bool, needs: bool
) -> None:
    accelerator.choose_attention(kernel, deterministic=False)
    query = torch.empty(1, 2, 4, head_dim, dtype=dtype, device="meta")
    assert accelerator.needs_equal_heads(query, biased=biased) == needs
    assert not accelerator.needs_equal_heads(torch.empty_like(query, device="cpu"), biased=biased)
