from __future__ import annotations

from functools import partial

import pytest
import torch

from presets import preset_job
from seatrial.train.meter import Meter, memory_bytes

job = partial(preset_job, "first-voyage")


def test_rates_of_the_world_and_of_one_rank() -> None:
    record = Meter(job(), torch.device("cpu"), 7).record(
        3, loss=2.0, grad_norm=1.0, lr=0.1, seconds=2.0, data_wait=0.5, memory=5
    )
    assert record.tokens == 3 * 8192
    assert record.tokens_per_s == 4096
    assert record.tokens_per_s_per_gpu == 512
    assert record.generation == 7
    assert record.mfu is None


def test_mfu_of_an_unknown_device_is_unknown() -> None:
    words, numbers = Meter(job("cluster.gpu=B300 SXM"), torch.device("cpu"), 1).convention()
    assert words == "cpu: its fp32 peak is unknown, and so is MFU"
    assert numbers["peak_flops"] is None
    assert numbers["flops_per_token_full_attention"] > numbers["flops_per_token"] > 0


def test_mfu_of_a_known_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    meter = Meter(job("train.precision=bf16"), torch.device("cuda"), 1)
    words, numbers = meter.convention()
    assert numbers["peak_flops"] == 989e12
    assert words.startswith("NVIDIA H200: MFU is of 989 TFLOP/s (dense bf16), attention counted as causal")
    record = meter.record(1, loss=1.0, grad_norm=1.0, lr=0.1, seconds=1.0, data_wait=0.0, memory=1)
    assert record.mfu == pytest.approx(1024 * numbers["flops_per_token"] / 989e12)


def test_memory_bytes_is_the_resident_memory_on_a_cpu() -> None:
    before = memory_bytes(torch.device("cpu"))
    held = torch.ones(50_000_000)
    assert memory_bytes(torch.device("cpu")) - before > 150_000_000
    del held
