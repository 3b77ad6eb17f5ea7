"""Deterministic kernels, in a process of its own: torch keeps such settings."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, torch
from seatrial.hardware import accelerator
accelerator.make_deterministic()
print(os.environ["NCCL_ALGO"], os.environ["CUBLAS_WORKSPACE_CONFIG"], torch.are_deterministic_algorithms_enabled())
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "Ring :4096:8 True"),
        ({"NCCL_ALGO": "ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}, "ring :16:8 True"),
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
