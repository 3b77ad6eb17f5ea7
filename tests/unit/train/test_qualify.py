"""The device test: it passes on a healthy device and detects wrong results."""

from __future__ import annotations

import json

import pytest
import torch

from seatrial.train.health.qualify import check_memory, check_product, main

CPU = torch.device("cpu")


def test_a_healthy_cpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["ok"]
    assert set(told["checks"]) == {"cpu gemm_fp32", "cpu gemm_bf16", "cpu memory"}
    assert all(check["ok"] for check in told["checks"].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_element_is_detected(dtype: torch.dtype) -> None:
    def almost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = a @ b
        c[17, 3] += 1
        return c

    assert check_product(CPU, dtype) is None
    problem = check_product(CPU, dtype, multiply=almost)
    assert problem is not None
    assert problem.startswith("1 of 512 rows")


def test_a_result_that_varies_is_detected() -> None:
    calls = []

    def second_time_wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        c = a @ b
        if len(calls) == 2:
            c[0, 0] = -c[0, 0] + 1
        return c

    problem = check_product(CPU, torch.float32, multiply=second_time_wrong)
    assert problem is not None
    assert "product 2 of the same matrices differs" in problem


@pytest.mark.parametrize("pattern", [0, 1, 2])
def test_a_flipped_bit_in_memory_is_detected(pattern: int) -> None:
    calls = []

    def flip(blocks: torch.Tensor) -> None:
        if len(calls) == pattern:
            blocks[2, 5] ^= 1 << 40
        calls.append(1)

    problem = check_memory(CPU, disturb=flip)
    assert problem is not None
    assert problem.startswith("1 words of block 2")


@pytest.mark.parametrize("option", ["--gpu", "--count"])
def test_a_missing_device_fails(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = torch.cuda.device_count()
    assert main(["--device", "cuda", option, str(seen + 1)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert f"this process sees {seen}" in told["problem"]


@pytest.mark.gpu
def test_a_healthy_gpu_passes(capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    assert main(["--device", "cuda", "--count", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
